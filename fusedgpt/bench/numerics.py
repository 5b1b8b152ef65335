"""How exact attention is: against float64, on ordinary and on large inputs, and against each other.

In appendix A of PyTorch's article, hand-written attention equals SDPA to `allclose` if it scales before the product,
(q·√scale) (k·√scale)ᵀ. If it scales after the product, (q kᵀ)·scale, as nanoGPT does, it does not. The article gives
SDPA the causal mask as a tensor, so each SDPA kernel is measured with one too. In float16 the order decides whether the
product overflows. The scale is 1 / √hs.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION, MASKED
from fusedgpt.attention.receipt import observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import figures, options
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
# other attention on ordinary inputs: three heads of queries share keys and values; a query sees 100 keys; both
VARIANTS = {"grouped": {"kv_heads": 4}, "window": {"window": 100}}
VARIANTS["grouped, window"] = VARIANTS["grouped"] | VARIANTS["window"]
# {pair: whether the article calls the two `allclose`, or None if it does not say}. The article calls SDPA with
# attn_mask, for which PyTorch 2.0 had `math` alone; with the flag is_causal, `math` computes the same
PAIRS = {
    ("scaled before", "math, masked"): True,
    ("manual", "math, masked"): False,
    ("scaled before", "math"): True,
    ("manual", "math"): False,
    ("scaled before", "flash"): None,
    ("manual", "flash"): None,
    ("masked", "math, masked"): None,  # `masked`: the kernel that PyTorch picks now if there is a mask
}

BEFORE = "`scaled before` is hand-written attention with q and k each times √scale before the product, as in SDPA;"
BEFORE += " `manual` scales q kᵀ, as in nanoGPT."

TRAINS, TOGETHER, TURN = False, True, 0.0
UNUSED = {"attention": options.EACH_ROW_NAMES_IT}
UNUSED |= dict.fromkeys(("precision", "seconds"), "errors are no times")
PAIR = "allclose"


def scaled_before(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """`manual` in another order: it multiplies q and k by √scale before the product, as SDPA's math does."""
    T, root = q.size(-2), q.size(-1) ** -0.25
    scores = (q * root) @ (k * root).transpose(-2, -1)  # (B, nh, T, T)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


PATHS = {"scaled before": scaled_before, **{name: ATTENTION[name] for name in SINGLE_KERNELS}, **MASKED}
PAIRED = {**PATHS, "masked": ATTENTION["masked"]}


@dataclasses.dataclass
class Settings(options.Common):
    attention: str = "auto"  # path/to/file.py:function, to measure this kernel of your own too


def defaults(gpu: bool) -> dict:
    """The same defaults on every machine."""
    return {}


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """Every path in every dtype on both inputs, then the article's pairs, then kernels on VARIANTS."""
    own = options.own_kernel(s.attention)
    found = [_each(inputs, dtype, (*PATHS, *own)) for inputs in INPUTS for dtype in DTYPES]
    found += [_each(PAIR, dtype, tuple(f"{a} = {b}" for a, b in PAIRS)) for dtype in DTYPES]
    return found + [_each(inputs, dtype, (*SINGLE_KERNELS, *own)) for inputs in VARIANTS for dtype in DTYPES]


def _each(inputs, dtype, names):
    return Comparison({"inputs": inputs, "dtype": dtype}, names, names[0])


def build(of: dict, name: str, s: Settings, device: torch.device) -> tuple[None, dict]:
    """Errors of a path, or whether a pair is `allclose` at PyTorch's tolerance (1e-5, 1e-8)."""
    variant = VARIANTS.get(of["inputs"])
    case = Case(SHAPE, device, DTYPES[of["dtype"]], **(variant or {}))
    if of["inputs"] == PAIR:
        return None, _pair(*name.split(" = "), case)
    if name == "flex":
        torch.compiler.reset()  # PyTorch counts recompilations over a whole process, and stops at the eighth
    attend = PATHS[name] if name in PATHS else ATTENTION[name]
    case = dataclasses.replace(case, backward=_has_backward(name, case))
    with refusals():  # some kernels take no mask
        errors = parity.compare(attend, case, case.inputs(INPUTS.get(of["inputs"], 1.0)))
        if name in MASKED:
            odd = dataclasses.replace(case, shape=ODD_SHAPE)
            odd = parity.compare(attend, odd, odd.inputs(INPUTS.get(of["inputs"], 1.0)))
            errors = {part: max(error, odd[part]) for part, error in errors.items()}
    found = {"errors": errors, "error": parity.largest(errors)}
    if of["inputs"] != "large":  # there the error is the result: the tolerance is for ordinary inputs only
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
    for path in (a, b):
        _has_backward(path, case)
    q, k, v, _ = dataclasses.replace(case, backward=False).inputs()
    one, other = PAIRED[a](q, k, v), PAIRED[b](q, k, v)
    seen = [observe(lambda path=path: PAIRED[path](q, k, v)) for path in (a, b)]
    close, claimed = torch.allclose(one, other), PAIRS[a, b]
    return {
        "allclose": close,
        "claimed": claimed,
        "largest_difference": (one.double() - other.double()).abs().max().item(),
        "seen": ["+".join(receipt["forward"]) for receipt in seen],
    }


def columns(result: Result, name: str) -> dict[str, str]:
    """The errors of a path, or what the article says about a pair."""
    line, yes = result.measured[name], {True: "yes", False: "no", None: ""}
    if result.of["inputs"] == PAIR:
        said = {"allclose": yes[line["allclose"]], "the article": yes[line["claimed"]]}
        return said | {
            "largest difference": f"{line['largest_difference']:.1e}",
            "kernels seen": " = ".join(line["seen"]),
        }
    errors = _errors(line)
    gradients = [error for part, error in errors.items() if part.startswith("d")]
    return {
        "error of y": _error(errors["y"]),
        "of dq, dk and dv": _error(max(gradients)) if gradients else "no backward",
    }


def _errors(line):
    """The errors of a line; JSON has no infinity, so null stands for it."""
    return {part: float("inf") if error is None else error for part, error in line["errors"].items()}


def _error(error):
    return f"{error:.1e}" if error < float("inf") else "**overflows**"


def notes(results: list[Result]) -> list[str]:
    """What an error is, and what the inputs are."""
    heads = VARIANTS["grouped"]["kv_heads"]
    return [
        f"Shape (B, nh, T, hs): {SHAPE}. Errors are against float64; an error is a share of the largest number in its"
        f" row of the float64 result: 1e-02 is one per cent. {BEFORE}",
        f"ordinary: q and k are normal; large: times {INPUTS['large']:g}; grouped: {SHAPE[1]} heads of queries share"
        f" {heads} of keys and values; window: of {VARIANTS['window']['window']} tokens.",
    ]


def subject(s: dict) -> str:
    """What was measured."""
    return "Causal attention against float64"


def draw(results: list[Result], s: dict) -> Iterator[tuple]:
    """errors.png: a panel for each kind of input, with the errors of each path, one mark for each dtype."""
    results = [result for result in results if result.of["inputs"] in INPUTS and result.measured]
    kinds = list(dict.fromkeys(result.of["inputs"] for result in results))
    if not results:
        return
    there = {name for result in results for name in result.measured}
    paths = [path for path in dict.fromkeys((*PATHS, *sorted(there))) if path in there]
    figure, grid = figures.new(0.21 * len(paths) + 1.15, ncols=len(kinds), squeeze=False, sharey=True, sharex=True)
    for axes, inputs in zip(grid.flat, kinds):
        for result in results:
            if result.of["inputs"] == inputs:
                _dots(axes, result, paths)
        axes.set(title=f"{inputs}: q and k normal × {INPUTS[inputs]:g}", xscale="log", xlabel="largest error")
    grid[0, 0].set_yticks(range(len(paths)), paths)
    grid[0, 0].set_ylim(len(paths) - 0.5, -0.5)
    figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    _, nh, T, hs = SHAPE
    what = (
        f"Causal attention, {nh} heads of {hs} channels, {T} tokens, forward, against float64. An error is a share of"
    )
    what += f" the largest number in its row of the result. {BEFORE.replace('`', '')}"
    yield "errors", finding(results), what, figure


def finding(results: list[Result]) -> str:
    """The errors of manual and flash in 16 bits on large inputs."""
    said, large = [], {r.of["dtype"]: r.measured for r in results if r.of["inputs"] == "large"}
    for path in ("manual", "flash"):
        found = {d: _errors(lines[path])["y"] for d, lines in large.items() if path in lines and d != "float32"}
        lost = [dtype for dtype, error in found.items() if error == float("inf")]
        finite = [100 * error for error in found.values() if error < float("inf")]
        parts = [f"overflows in {' and '.join(lost)}"] if lost else []
        if finite:
            parts.append(f"is off by up to {max(finite):.{0 if max(finite) >= 10 else 1}f} %")
        said += [f"{path} {' and '.join(parts)}"] if parts else []
    where = "On large inputs in 16 bits " if said else "How exact each way to compute attention is"
    return where + "; ".join(said)


LOOKS = {"bfloat16": ("s", "#e69f00"), "float16": ("D", "#0072b2"), "float32": ("o", "black")}


def _dots(axes, result, paths):
    """A mark for each path; a cross at the right edge if it overflows."""
    dtype = result.of["dtype"]
    mark, color = LOOKS[dtype]
    errors = {name: _errors(line)["y"] for name, line in result.measured.items()}
    finite = [(error, paths.index(name)) for name, error in errors.items() if error < float("inf")]
    axes.plot(*zip(*finite) if finite else ([], []), mark, label=dtype, markersize=5, color=color)
    lost = [paths.index(name) for name, error in errors.items() if error == float("inf")]
    if lost:
        edge = dict(transform=axes.get_yaxis_transform(), label=f"{dtype} overflows")
        axes.plot([0.97] * len(lost), lost, "x", color=color, markersize=7, **edge)


SHOWN = Shown("", lambda result: [], notes, subject, columns, extra=draw)
