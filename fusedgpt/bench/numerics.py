"""How exact each way to compute attention is: against float64, on ordinary and on large inputs, and against each other.

In appendix A of PyTorch's article, hand-written attention equals SDPA to `allclose` if it scales before the product,
(q·√scale) (k·√scale)ᵀ. If it scales after the product, (q kᵀ)·scale, as nanoGPT does, it does not. The article gives
SDPA the causal mask as a tensor, so each SDPA kernel is measured with one too. In float16 the order decides whether the
product overflows. The scale is 1 / √hs.

The loss is compared too, in a row for each dtype (loss_parity.py).
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator

import torch
from torch import Tensor

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION, MASKED
from fusedgpt.attention.receipt import observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import check, drawing, loss_parity, options, report
from fusedgpt.bench.proof import refusals, tflops, timed, verdict
from fusedgpt.bench.rows import name_of, trace_path
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

TRAINS = False
UNUSED = {"attention": options.EACH_ROW_NAMES_IT}
GROUP = ("inputs", "dtype")


def scaled_before(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0) -> Tensor:
    """`manual` in another order: it multiplies q and k by √scale before the product, as SDPA's math does."""
    T, root = q.size(-2), q.size(-1) ** -0.25
    scores = (q * root) @ (k * root).transpose(-2, -1)  # (B, nh, T, T)
    hidden = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ v


PATHS = {"scaled before": scaled_before, **{name: ATTENTION[name] for name in SINGLE_KERNELS}, **MASKED}
PAIRED = {**PATHS, "masked": ATTENTION["masked"]}


@dataclasses.dataclass
class Settings(options.Timed):
    repeats: int = 20  # timed calls of each row
    attention: str = "auto"  # path/to/file.py:function, to measure this kernel of your own too


def defaults(gpu: bool) -> dict:
    """The same defaults on every machine."""
    return {}


def plan(s: Settings, device: torch.device) -> list[dict]:
    """Every path in every dtype on both inputs, then the article's pairs, the loss, and kernels on VARIANTS."""
    own = options.own_kernel(s.attention)
    pairs = [{"pair": f"{a} = {b}", "dtype": dtype} for dtype in DTYPES for a, b in PAIRS]
    loss = [{"part": "loss", "dtype": dtype} for dtype in DTYPES]
    return _each(INPUTS, (*PATHS, *own)) + pairs + loss + _each(VARIANTS, (*SINGLE_KERNELS, *own))


def _each(kinds, paths):
    each = itertools.product(kinds, DTYPES, paths)
    return [{"inputs": inputs, "dtype": dtype, "path": path} for inputs, dtype, path in each]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A row: errors of a path or of the loss, or whether a pair is `allclose` at PyTorch's tolerance (1e-5, 1e-8)."""
    if "part" in spec:
        with refusals():
            return loss_parity.proven(device, DTYPES[spec["dtype"]])
    variant = VARIANTS.get(spec.get("inputs"))
    case = Case(SHAPE, device, DTYPES[spec["dtype"]], **(variant or {}))
    if "pair" in spec:
        return _pair(*spec["pair"].split(" = "), case)
    path, scale = spec["path"], INPUTS.get(spec["inputs"], 1.0)
    if path == "flex":
        torch.compiler.reset()  # PyTorch counts recompilations over a whole process, and stops at the eighth
    attend = PATHS[path] if path in PATHS else ATTENTION[path]
    case = dataclasses.replace(case, backward=_has_backward(spec["path"], case))
    with refusals():  # some kernels take no mask
        errors = parity.compare(attend, case, case.inputs(scale))
        if spec["path"] in MASKED:
            odd = dataclasses.replace(case, shape=ODD_SHAPE)
            odd = parity.compare(attend, odd, odd.inputs(scale))
            errors = {name: max(error, odd[name]) for name, error in errors.items()}
    row = {"errors": errors, "overflows": not all(e < float("inf") for e in errors.values())}
    if spec["inputs"] == "large":  # here the error is the result: the tolerance is for ordinary inputs only
        return row
    row["parity"] = verdict(errors, case.dtype, f"on all {SHAPE[1]} heads")
    if variant:
        return row
    inputs = case.inputs()
    row |= timed(lambda: case.run(attend, *inputs), s, case, trace_path(folder, spec))
    return row | {"tflops": tflops(case, row["median_ms"])}


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
        "reproduced": None if claimed is None else close == claimed,
        "largest_difference": (one.double() - other.double()).abs().max().item(),
        "seen": ["+".join(receipt["forward"]) for receipt in seen],
    }


def table(rows: list[dict]) -> list[str]:
    """Errors by path and dtype, times, the article's pairs, and errors of the loss."""
    errors = [row for row in rows if "path" in row]
    text = [
        "Errors are against float64: of the output y, and behind the slash the largest of dq, dk and dv. An error is a",
        f"share of the largest number in its row of the float64 result: 1e-02 is one per cent. {BEFORE}",
    ]
    for inputs in dict.fromkeys(row["inputs"] for row in errors):
        group = [row for row in errors if row["inputs"] == inputs]
        dtypes, cells = dict.fromkeys(row["dtype"] for row in group), {}
        text += ["", f"## {_described(inputs)}", ""]
        for row in group:
            cells.setdefault(row["path"], dict.fromkeys(dtypes, ""))[row["dtype"]] = _errors(row)
        text += report.markdown(["path", *dtypes], [[path, *errors_in.values()] for path, errors_in in cells.items()])
    text += ["", "## time and memory, ordinary inputs", ""]
    names = ["path", "dtype", "ms, median (p10-p90)", "TFLOP/s, causal half", "peak MiB"]
    text += report.markdown(names, [_time_cells(row) for row in errors if "median_ms" in row])
    said = report.how_timed(errors)
    if said:
        text += ["", *said]
    text += ["", "## allclose, as the article's appendix A claims", ""]
    names = ["pair", "dtype", "allclose", "the article", "reproduced", "largest difference", "kernels seen"]
    pairs = [row for row in rows if "pair" in row and row["status"] == "measured"]
    text += report.markdown(names, map(_pair_cells, pairs))
    losses = [row for row in rows if "part" in row]
    return text + (_of_the_loss(losses) if losses else [])  # rows of earlier versions have none


def _described(inputs):
    if inputs in INPUTS:
        return f"{inputs} inputs (q and k are normal, times {INPUTS[inputs]:g})"
    heads = VARIANTS[inputs].get("kv_heads")
    shares = [f"{SHAPE[1]} heads of queries share {heads} of keys and values"] if heads else []
    window = VARIANTS[inputs].get("window")
    return ", ".join([*shares, *([f"a window of {window} tokens"] if window else [])]) + " (ordinary inputs)"


def _of_the_loss(rows):
    ids, padded = loss_parity.IDS, loss_parity.PADDED
    text = [
        "",
        "## the loss",
        "",
        f"The loss of {loss_parity.TOKENS} tokens, from {padded} logits each, of which {ids}",
    ]
    text[-1] += " count, against float64 from the same logits. The error of a gradient is a share of the number itself."
    names = ["dtype of the logits", "loss of a token, nats", "allowed", "gradient by the logits", "allowed"]
    return [*text, "", *report.markdown(names, map(_loss_cells, rows))]


def _loss_cells(row):
    if row["status"] != "measured":
        return [row["dtype"], row["status"], *[""] * 3]
    pairs = [(row["errors"][name], row["allowed"][name]) for name in ("loss", "gradient")]
    return [row["dtype"], *(f"{error:.1e}" for pair in pairs for error in pair)]


def _time_cells(row):
    peak = f"{row['peak_memory'] / 2**20:.1f}"
    return [row["path"], row["dtype"], report.spread(row, 3), f"{row['tflops']:.3g}", peak]


def _pair_cells(row):
    yes = {True: "yes", False: "no", None: ""}
    said = [yes[row[column]] for column in ("allclose", "claimed", "reproduced")]
    seen = " = ".join(row.get("seen", []))  # rows of earlier versions lack it
    return [row["pair"], row["dtype"], *said, f"{row['largest_difference']:.1e}", seen]


def _errors(row):
    if row["status"] != "measured":
        return row["status"]
    if row["overflows"]:
        return "**overflows**"
    gradients = [error for name, error in row["errors"].items() if name.startswith("d")]
    return f"{row['errors']['y']:.1e} / " + (f"{max(gradients):.1e}" if gradients else "no backward")


def claims(rows: list[dict]) -> list[check.Claim]:
    """Each path's largest error, or that it overflows; whether each pair is `allclose`; the loss's errors; refusals."""
    found = []
    for row in rows:
        if row["status"] == "measured" and "pair" in row:
            value = "yes" if row["allclose"] else "no"
            found.append(check.Claim(f"{name_of(row)}: allclose", [row], value, timed=False))
        elif row["status"] == "measured" and "part" in row:
            for name, error in row["errors"].items():
                found.append(check.Claim(f"{name_of(row)}: error of the {name}", [row], error, error=True, timed=False))
        elif row["status"] == "measured":
            value = "overflows" if row["overflows"] else parity.largest(row["errors"])
            name = f"{name_of(row)}: largest error"
            found.append(check.Claim(name, [row], value, error=True, timed=False))
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """errors.png: a panel for each kind of input, with the errors of each path, one mark per dtype."""
    rows = [row for row in rows if row.get("inputs") in INPUTS]
    left_out = drawing.left_out([row | {"path": row["path"].removesuffix(", masked")} for row in rows])
    rows = [row for row in rows if row["status"] == "measured"]
    kinds = list(dict.fromkeys(row["inputs"] for row in rows))
    if not rows:
        return
    there = [row["path"] for row in rows]
    paths = [path for path in dict.fromkeys((*PATHS, *there)) if path in there]
    figure, grid = drawing.new(0.21 * len(paths) + 1.15, ncols=len(kinds), squeeze=False, sharey=True, sharex=True)
    for axes, inputs in zip(grid.flat, kinds):
        _dots(axes, [row for row in rows if row["inputs"] == inputs], paths)
        axes.set(title=f"{inputs}: q and k normal × {INPUTS[inputs]:g}", xscale="log")
    grid[0, 0].set_yticks(range(len(paths)), paths)
    grid[0, 0].set_ylim(len(paths) - 0.5, -0.5)
    for axes in grid.flat:
        axes.set_xlabel("largest error")
    figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    _, nh, T, hs = SHAPE
    subject = (
        f"Causal attention, {nh} heads of {hs} channels, {T} tokens, forward, against float64. An error is a share"
    )
    subject += f" of the largest number in its row of the result. {BEFORE.replace('`', '')}{left_out}"
    yield "errors", finding(rows), subject, figure


def finding(rows: list[dict]) -> str:
    """The errors of manual and flash in 16 bits on large inputs. rows: measured ones of paths."""
    said = []
    for path in ("manual", "flash"):
        found = {r["dtype"]: r["errors"]["y"] for r in rows if (r["inputs"], r["path"]) == ("large", path)}
        found = {dtype: error for dtype, error in found.items() if dtype != "float32"}
        lost = [dtype for dtype, error in found.items() if error == float("inf")]
        finite = [100 * error for error in found.values() if error < float("inf")]
        parts = [f"overflows in {' and '.join(lost)}"] * bool(lost)
        parts += [f"is off by up to {max(finite):.{0 if max(finite) >= 10 else 1}f} %"] if finite else []
        said += [f"{path} {' and '.join(parts)}"] * bool(parts)
    where = "On large inputs in 16 bits " if said else "How exact each way to compute attention is"
    return where + "; ".join(said)


def _dots(axes, rows, paths):
    """A mark for each path and dtype; a cross at the right edge if it overflows."""
    for dtype, mark, color in (("bfloat16", "s", "#e69f00"), ("float16", "D", "#0072b2"), ("float32", "o", "black")):
        found = [(row["errors"]["y"], paths.index(row["path"])) for row in rows if row["dtype"] == dtype]
        finite = [point for point in found if point[0] < float("inf")]
        axes.plot(*zip(*finite) if finite else ([], []), mark, label=dtype, markersize=5, color=color)
        lost = [at for error, at in found if error == float("inf")]
        edge = [0.97] * len(lost)
        label = f"{dtype} overflows" if lost else None
        axes.plot(edge, lost, "x", color=color, markersize=7, transform=axes.get_yaxis_transform(), label=label)
