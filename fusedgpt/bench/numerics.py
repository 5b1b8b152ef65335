"""How exact attention is: against float64, on ordinary and on large inputs, and against each other.

In appendix A of PyTorch's article, hand-written attention equals SDPA to `allclose` if it scales before the product,
(q·√scale) (k·√scale)ᵀ. If it scales after the product, (q kᵀ)·scale, as nanoGPT does, it does not. In the article SDPA
gets the mask as a tensor, so it gets one here too. In float16 the order decides what overflows. The scale is 1 / √hs.
"""

import dataclasses

import torch
from torch import Tensor

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION, MASKED
from fusedgpt.attention.receipt import observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import options
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.proof import refusals, verdict
from fusedgpt.bench.report import Shown
from fusedgpt.bench.rows import Result
from fusedgpt.errors import UserError
from fusedgpt.machine.device import DTYPES

SHAPE = (1, 12, 256, 64)  # (B, nh, T, hs): GPT-2's heads
# with a mask and large inputs, cuDNN's dq held NaN if T % 128 == 64 (pytorch#196678)
ODD_SHAPE = (1, 2, 192, 64)
# factors on normal q and k; with 64, q kᵀ exceeds float16's largest number, 65504, and its scaled value does not
INPUTS = {"ordinary": 1.0, "large": 64.0}
# {pair: whether the article calls the two `allclose`}. The article calls SDPA with attn_mask, for which PyTorch 2.0 had
# `math` alone; with the flag is_causal, `math` computes the same
PAIRS = {("scaled before", "math, masked"): True, ("manual", "math, masked"): False}
PAIRS |= {("scaled before", "math"): True, ("manual", "math"): False}

TRAINS, TOGETHER, TURN = False, True, 0.0
UNUSED = ("attention", "precision", "seconds")
PAIR = "allclose"


def scaled_before(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """`manual` in another order: it multiplies q and k by √scale before the product, as SDPA's math does."""
    T, root = q.size(-2), q.size(-1) ** -0.25
    scores = (q * root) @ (k * root).transpose(-2, -1)  # (B, nh, T, T)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


PATHS = {"scaled before": scaled_before, **{name: ATTENTION[name] for name in SINGLE_KERNELS}, **MASKED}


@dataclasses.dataclass
class Settings(options.Common):
    attention: str = "auto"  # path/to/file.py:function, to measure this kernel of your own too


GPU = CPU = {}


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """Every path in every dtype on both inputs, then the article's pairs."""
    names = dict.fromkeys(INPUTS, (*PATHS, *options.own_kernel(s.attention)))
    names[PAIR] = tuple(f"{a} = {b}" for a, b in PAIRS)
    return [Comparison({"inputs": i, "dtype": dtype}, names[i], names[i][0]) for i in names for dtype in DTYPES]


def build(workload: dict, name: str, s: Settings, device: torch.device) -> tuple[None, dict]:
    """Errors of a path, or whether a pair is `allclose` at PyTorch's tolerance (1e-5, 1e-8)."""
    case = Case(SHAPE, device, DTYPES[workload["dtype"]])
    if workload["inputs"] == PAIR:
        return None, _pair(*name.split(" = "), case)
    attend = PATHS[name] if name in PATHS else ATTENTION[name]
    case = dataclasses.replace(case, backward=_has_backward(name, case))
    with refusals():  # some kernels take no mask
        errors = parity.compare(attend, case, case.inputs(INPUTS[workload["inputs"]]))
        if name in MASKED:
            odd = dataclasses.replace(case, shape=ODD_SHAPE)
            odd = parity.compare(attend, odd, odd.inputs(INPUTS[workload["inputs"]]))
            errors = {part: max(error, odd[part]) for part, error in errors.items()}
    found = {"errors": errors, "error": parity.largest(errors)}
    if workload["inputs"] != "large":  # there the error is the result: the tolerance is for ordinary inputs only
        found["parity"] = verdict(errors, case.dtype, f"on all {SHAPE[1]} heads")
    return None, found


def _has_backward(path, case):
    """Whether `path` has a backward here. Raises UserError if not even its forward runs."""
    kernel = path.removesuffix(", masked")
    if path == "scaled before" or not permitted.refusal(kernel, case):
        return True
    if reason := permitted.refusal(kernel, dataclasses.replace(case, backward=False)):
        raise UserError(reason)
    return False


def _pair(a, b, case):
    q, k, v, _ = dataclasses.replace(case, backward=False).inputs()
    one, other = PATHS[a](q, k, v), PATHS[b](q, k, v)
    seen = [observe(lambda path=path: PATHS[path](q, k, v)) for path in (a, b)]
    return {
        "allclose": torch.allclose(one, other),
        "claimed": PAIRS[a, b],
        "largest_difference": (one.double() - other.double()).abs().max().item(),
        "seen": ["+".join(receipt["forward"]) for receipt in seen],
    }


def columns(result: Result, name: str) -> dict[str, str]:
    """The errors of a path, or what the article says about a pair."""
    line = result.measured[name]
    if result.workload["inputs"] == PAIR:
        return {
            "allclose": str(line["allclose"]),
            "in the article": str(line["claimed"]).replace("None", "no claim"),  # of earlier rows
            "largest difference": f"{line['largest_difference']:.1e}",
            "kernels seen": " = ".join(line["seen"]),
        }
    # JSON has no infinity, so null stands for it
    errors = {part: float("inf") if error is None else error for part, error in line["errors"].items()}
    gradients = [error for part, error in errors.items() if part.startswith("d")]
    found = {"error of y": errors["y"]} | ({"of dq, dk and dv": max(gradients)} if gradients else {})
    return {part: f"{error:.1e}" if error < float("inf") else "overflows" for part, error in found.items()}


def notes(results: list[Result]) -> list[str]:
    """What an error is, and what the inputs are."""
    return [
        f"Shape (B, nh, T, hs): {SHAPE}. An error is a share of the largest number in its row of the float64 result:"
        " 1e-02 is one per cent. `scaled before` is hand-written attention with q and k each times √scale before the"
        " product, as in SDPA; `manual` scales q kᵀ, as in nanoGPT. Ordinary: q and k are normal; large: times"
        f" {INPUTS['large']:g}."
    ]


SHOWN = Shown("causal attention against float64", columns=columns, notes=notes)
