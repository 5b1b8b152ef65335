"""Where a training step's time goes: into matrix products, and into what only moves memory; and the output layer alone.

PyTorch's article pads the vocabulary to a multiple of 64, which makes the products of the output layer "nearly" 3 times
as fast on an A100. AMD's article cites "Data Movement Is All You Need" (arXiv:2007.00072): in training BERT, matrix
products are 99.8 % of the operations, but 61 % of the time. The rest of the time goes to waiting for memory, and fused
attention saves some of it.

B batch, T sequence, C channels, N = B T tokens; V rows of the output layer: the ids, with or without padding.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import functional as F

from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import observe
from fusedgpt.bench import check, drawing, options, report
from fusedgpt.bench.disturbance import comparable
from fusedgpt.bench.proof import cost, prove_kernel, verdict
from fusedgpt.bench.rows import name_of, trace_path
from fusedgpt.bench.step import training_step
from fusedgpt.errors import UserError
from fusedgpt.machine import timing
from fusedgpt.machine.device import DTYPES, dtype_name, resolve_dtype
from fusedgpt.machine.profiler import busy_ms, profile
from model import GPTConfig

MULTIPLE = 64  # the article's padding: 50257 -> 50304
COMPARED = 16  # evenly spaced tokens and ids whose logits and gradients are compared with float64
FORWARD, BOTH = "forward", "forward + backward"
PRODUCTS, ATTENTION, MEMORY, OPTIMIZER, OTHER = CATEGORIES = (
    "matrix products",
    "fused attention",
    "memory-bound",
    "gradient norm and AdamW",
    "other",
)
# PyTorch's operators, without the underscore of in-place ones; a backward has the category of its forward
_OPERATORS = {
    PRODUCTS: "mm addmm bmm baddbmm",
    OPTIMIZER: "_fused_adamw linalg_vector_norm _foreach_norm",
    MEMORY: "add mul sum cat copy fill zero masked_fill tril bitwise_not gelu native_layer_norm _softmax _log_softmax"
    " nll_loss nll_loss_forward index_select embedding_dense",
}
_CATEGORY = {name: category for category, names in _OPERATORS.items() for name in names.split()}

TRAINS = False  # a step is taken apart in this process, not in train.py
UNUSED = {}
GROUP = ("part", "dtype", "pass")


@dataclasses.dataclass
class Settings(options.Timed):
    repeats: int = 20  # timed calls, or profiled steps, of each row
    n_layer: int = 12  # layers of the GPT that makes the step
    n_head: int = 12  # heads in a layer
    n_embd: int = 768  # channels (C), also of the output layer
    block_size: int = 1024  # tokens in a sequence (T)
    batch_size: int = 12  # sequences in a step (B)
    vocab_size: int = 50257  # ids; the output layer is measured with these, and padded to a multiple of 64
    # dtype of matrix products; the output layer is measured in float32 too
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


def defaults(gpu: bool) -> dict:
    """GPT-2 124M, at 12 x 1024 on a GPU and at 1 x 1024 on a CPU."""
    return {} if gpu else {"batch_size": 1}


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The rows: the output layer, padded and not, then the step. Raises UserError if no model has these dimensions."""
    sizes = dict.fromkeys((s.vocab_size, _config(s, "manual").padded_vocab_size))
    output = [
        {"part": "output layer", "dtype": dtype, "pass": direction, "V": V}
        for dtype in dict.fromkeys((dtype_name(resolve_dtype(s.dtype, device)), "float32"))
        for direction in (FORWARD, BOTH)
        for V in sizes
    ]
    return output + [{"part": "step", "attention": name} for name in ("manual", "flash")]


def _config(s, attention):
    dimensions = {name: getattr(s, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")}
    return GPTConfig(**dimensions, vocab_multiple=MULTIPLE, bias=False, attention=attention)


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A row: times of the output layer's products, or of a step by category."""
    if spec["part"] == "step":
        return _step(spec["attention"], s, device, trace_path(folder, spec))
    return _output_layer(spec, s, device)


def _output_layer(spec, s, device):
    """Time z = x Wᵀ, the logits, and if the pass has a backward also dx = dz W and dW = dzᵀ x."""
    dtype, backward = DTYPES[spec["dtype"]], spec["pass"] == BOTH
    x, w, dz = inputs(s, spec["V"], device, dtype)
    dz = dz if backward else None
    errors = compare(x, w, dz)
    if spec["V"] > s.vocab_size:  # padding must change no logit
        unpadded = w[: s.vocab_size].clone()
        errors["beside unpadded"] = _error(products(x, w)[0][:, : s.vocab_size], products(x, unpadded)[0])
    row = {"errors": errors, "parity": verdict(errors, dtype, f"in {COMPARED} rows of each result")}
    row |= cost(lambda: products(x, w, dz), s, device)
    flops = 2 * x.size(0) * w.numel() * (3 if backward else 1)
    return row | {"tflops": flops / (row["median_ms"] * 1e9)}


def inputs(s: Settings, V: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, C), W (V, C) and dz (N, V); rows of W and columns of dz beyond vocab_size are 0, as in training."""
    generator, N = torch.Generator(device).manual_seed(0), s.batch_size * s.block_size

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    padding = V - s.vocab_size
    x, w, dz = normal(N, s.n_embd), 0.02 * normal(s.vocab_size, s.n_embd), normal(N, s.vocab_size)
    return x, F.pad(w, (0, 0, 0, padding)), F.pad(dz, (0, padding))


def products(x: Tensor, w: Tensor, dz: Tensor | None = None) -> tuple[Tensor, ...]:
    """(z,) of the model's output layer; (z, dx, dW) if `dz`, the gradient of z, is given."""
    if dz is None:
        return (F.linear(x, w),)
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    z = F.linear(x, w)
    return z.detach(), *torch.autograd.grad(z, (x, w), dz)


def compare(x: Tensor, w: Tensor, dz: Tensor | None) -> dict[str, float]:
    """The largest errors of `products` against float64, in COMPARED rows of each: 'z', and with `dz` 'dx' and 'dw'.

    An error is a fraction of the largest number in its row, as in fusedgpt/attention/parity.py.
    """
    got = products(x, w, dz)
    tokens, ids = (torch.linspace(0, n - 1, min(n, COMPARED), device=x.device).long() for n in (len(x), len(w)))
    errors = {"z": _error(got[0][tokens], x[tokens].double() @ w.double().T)}
    if dz is not None:
        errors["dx"] = _error(got[1][tokens], dz[tokens].double() @ w.double())
        errors["dw"] = _error(got[2][ids], dz[:, ids].double().T @ x.double())
    return errors


def _error(got, want):
    largest = want.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(got.dtype).tiny)  # a row of padding is all 0
    fraction = (got - want).abs() / largest
    return fraction.max().nan_to_num(nan=torch.inf).item()


def _step(attention, s, device, trace):
    """Time an eager training step (forward, backward, gradient norm and AdamW) by category."""
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"PyTorch's profiler has no times of operators on {device.type}: set --device=cpu")
    dtype, config = resolve_dtype(s.dtype, device), _config(s, attention)
    row = prove_kernel(attention, Case.of_model(config, s.batch_size, device, dtype))
    step = training_step(config, s.batch_size, device, dtype)
    for _ in range(s.warmup):
        step()
    row["kernel"] = observe(step, trace if s.profile else None)
    spent = [self_ms(profile(step), device) for _ in range(s.repeats)]
    each = [by_category(operators) for operators in spent]
    row["ms"] = {category: [ms[category] for ms in each] for category in CATEGORIES}
    unknown = {name: statistics.median(ms.get(name, 0.0) for ms in spent) for name in spent[0]}
    unknown = {name: ms for name, ms in unknown.items() if category_of(name) == OTHER}
    row["largest_other"] = dict(sorted(unknown.items(), key=lambda item: -item[1])[:3])
    row["samples_ms"] = [sum(ms.values()) for ms in each]
    ran = {"dtype": dtype_name(dtype), "compile": False, "device": str(device), "parameters": config.num_params}
    return row | timing.summary(row["samples_ms"]) | {"ran": ran}


def self_ms(profiled: torch.autograd.profiler.profile, device: torch.device) -> dict[str, float]:
    """Milliseconds of each operator, without the operators that it calls, so that nothing counts twice.

    On a GPU, an operator's time is that of the kernels that it launched itself. All other work of the GPU counts as the
    operator "outside of operators". Raises UserError if the profiler saw no kernel on a GPU.
    """
    operators = [event for event in profiled.key_averages() if event.device_type == DeviceType.CPU]
    if device.type == "cpu":
        return {event.key: event.self_cpu_time_total / 1e3 for event in operators}
    found = {event.key: event.self_device_time_total / 1e3 for event in operators}
    busy = busy_ms(profiled)
    if busy is None:
        raise UserError("PyTorch's profiler saw no kernel on this GPU, and so no time of an operator")
    return found | {"outside of operators": max(0.0, busy - sum(found.values()))}


def by_category(operators: dict[str, float]) -> dict[str, float]:
    """The sum of the milliseconds of `operators` in each of CATEGORIES."""
    found = dict.fromkeys(CATEGORIES, 0.0)
    for name, ms in operators.items():
        found[category_of(name)] += ms
    return found


def category_of(operator: str) -> str:
    """The category of an operator, named as the profiler names it, such as 'aten::add_'; OTHER if it is unknown."""
    name = operator.removeprefix("aten::")
    if name.startswith("Optimizer."):
        return OPTIMIZER
    if not operator.startswith("aten::"):
        return OTHER
    if "_attention" in name:
        return ATTENTION
    name = name.removesuffix("_out").rstrip("_")
    for ending in ("_backward_data", "_backward"):
        name = name.removesuffix(ending)
    return _CATEGORY.get(name, OTHER)


def shares(row: dict, categories: tuple[str, ...], of: tuple[str, ...] = CATEGORIES) -> tuple[float, float, float]:
    """The share of `categories` in the time of `of`: median, 10th and 90th percentile over the steps of a row."""
    part, whole = (np.sum([row["ms"][category] for category in names], axis=0) for names in (categories, of))
    p10, median, p90 = np.percentile(part / whole, [10, 50, 90]).tolist()
    return median, p10, p90


def table(rows: list[dict]) -> list[str]:
    """A table of the output layer, padded and not, and one of a step by category."""
    output, steps = ([row for row in rows if row["part"] == part] for part in ("output layer", "step"))
    text = ["## the output layer", ""] if output else []
    if output:
        names = ["dtype", "pass", "rows of W", "ms, median (p10-p90)", "TFLOP/s", "peak MiB", "timed"]
        names += ["times as fast, padded"]
        text += [*report.markdown(names, [_output_cells(row, output) for row in output]), ""]
        text += ["The article: nearly 3 times as fast with 50304 rows in place of 50257, on an A100."]
        text += [*report.page_faults(output), ""]
    if steps:
        names = ["attention", "ms, median (p10-p90)", *CATEGORIES, f"{PRODUCTS} in forward and backward"]
        text += ["## a training step", "", *report.markdown(names, map(_step_cells, steps)), ""]
        text += [
            "Milliseconds count only time in operators. Per cent are shares of it; in the last column, of forward and",
            "backward alone, with the 10th and 90th percentile of the steps. BERT (arXiv:2007.00072): 61 %.",
        ]
    return text


def _unpadded(row, rows):
    """The row of the same product without padding; None if `row` itself is unpadded."""
    group = [r for r in rows if all(r[key] == row[key] for key in ("dtype", "pass"))]
    smallest = min(group, key=lambda r: r["V"])
    return None if smallest is row else smallest


def _output_cells(row, rows):
    if row["status"] != "measured":
        return [row["dtype"], row["pass"], row["V"], f"{row['status']}: {row['reason']}", *[""] * 4]
    ratio = report.ratio(row, _unpadded(row, rows), spread=True)
    cells = [row["dtype"], row["pass"], row["V"], report.spread(row, 3), f"{row['tflops']:.3g}"]
    return [*cells, f"{row['peak_memory'] / 2**20:.1f}", row["timed"], ratio]


def _step_cells(row):
    if row["status"] != "measured":
        return [row["attention"], f"{row['status']}: {row['reason']}", *[""] * (len(CATEGORIES) + 1)]
    cells = [f"{row['attention']} ({row['ran']['dtype']})", report.spread(row)]
    cells += [f"{100 * shares(row, (category,))[0]:.1f} %" for category in CATEGORIES]
    largest = ", ".join(f"{name} {ms:.2f} ms" for name, ms in row["largest_other"].items())
    cells[-1] += f" ({largest})"
    if not comparable(row):
        return [*cells, ""]
    return [*cells, "{:.1f} % ({:.1f}-{:.1f})".format(*(100 * x for x in _products(row)))]


def _products(row):
    """The share of matrix products in forward and backward, and its spread. Fused attention does not count as one."""
    return shares(row, (PRODUCTS,), (PRODUCTS, ATTENTION, MEMORY, OTHER))


def claims(rows: list[dict]) -> list[check.Claim]:
    """How much padding speeds up the output layer, the time of products in a step, and refusals."""
    found, output = [], [row for row in rows if row["part"] == "output layer"]
    for row in output:
        base = _unpadded(row, output)
        found += check.ratio(f"{name_of(row)}: speed over {base and base['V']} rows", row, base)
    for row in rows:
        if row["part"] == "step" and comparable(row):
            name = f"{name_of(row)}: time of {PRODUCTS} over all else in forward and backward"
            found.append(check.Claim(name, [row], *(share / (1 - share) for share in _products(row))))
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """output_layer.png: a bar for each product; step.png: a bar for each attention, divided by category."""
    output, steps = ([row for row in rows if row["part"] == part] for part in ("output layer", "step"))
    model = f"{s['batch_size']} × {s['block_size']} tokens"
    left_out, output = drawing.left_out(output), [row for row in output if row["status"] == "measured"]
    if output:
        figure, axes = drawing.new(0.36 * len(output) + 0.6)
        pairs = [(row, _unpadded(row, output)) for row in output]
        names = [f"{row['dtype']}, {row['pass']}, {row['V']} rows{', padded' if base else ''}" for row, base in pairs]
        colors = [drawing.FILLS[0 if base else 1] for _, base in pairs]
        drawing.times(axes, dict(zip(names, output)), [report.time(*pair) for pair in pairs], colors)
        said = report.clause([pair for pair in pairs if pair[1]], "the unpadded one") or "was not compared"
        subject = f"{model}, {s['n_embd']} channels times as many rows of W as each bar says.{left_out}"
        yield "output_layer", f"The padded output layer alone {said}", subject, figure
    steps = [row for row in steps if comparable(row)]
    if steps:
        ran = ", ".join(dict.fromkeys(row["ran"]["dtype"] for row in steps))
        layers = f"{s['n_layer']} layers, {s['n_head']} heads, {s['n_embd']} channels"
        subject = f"A GPT of {layers}, {model} a step, {ran}, eager: the time in PyTorch's operators, by category"
        parts = " and ".join(f"{100 * shares(row, (PRODUCTS,))[0]:.0f} % with {row['attention']}" for row in steps)
        yield "step", f"{PRODUCTS.capitalize()} take {parts} of a training step", subject, _divided(steps)


def _divided(rows):
    """A bar for each row, divided by category. Wide pieces show their per cent."""
    figure, axes = drawing.new(0.5 * len(rows) + 1.0)
    ends = np.zeros(len(rows))
    for n, category in enumerate(CATEGORIES):
        ms = np.array([statistics.median(row["ms"][category]) for row in rows])
        bars = axes.barh(range(len(rows)), ms, left=ends, height=0.6, label=category, **drawing.bar_style(n))
        parts = [shares(row, (category,))[0] for row in rows]
        said = [f"{100 * part:.0f} %" if part > 0.06 else "" for part in parts]
        axes.bar_label(bars, said, label_type="center", fontsize=8, bbox=drawing.WHITE)
        ends += ms
    axes.set_yticks(range(len(rows)), [row["attention"] for row in rows])
    axes.invert_yaxis()
    axes.set(xlabel="ms of a step: medians")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
