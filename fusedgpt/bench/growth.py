"""How cost grows: a training step over tokens, layers, channels and sequences; generation; preparing a text.

Each curve has a power law: cost = a n^b (power_laws.py). Beside its b stands what theory says: the b of a count of
operations or bytes at the same sizes, and the b of the term that grows fastest, which leads in the end. Every curve is
measured in rounds, each of which gives its own b.

B sequences or samples, T tokens of each, L layers, C channels.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Iterator
from typing import Literal

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import check, drawing, options, prepare_time, report
from fusedgpt.bench.power_laws import AXES, BEND, STEPS, counts, curve_of, curves, fit, laws
from fusedgpt.bench.proof import counting_faults, prove_kernel, verdict
from fusedgpt.bench.rows import trace_path
from fusedgpt.bench.step import training_step
from fusedgpt.errors import UserError
from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.run import Run
from fusedgpt.estimates.step import flops_per_token
from fusedgpt.generation import engines, generate
from fusedgpt.machine import determinism, memory, timing
from fusedgpt.machine.device import dtype_name, resolve_compile, resolve_dtype
from model import GPT, GPTConfig

PICKED = "sdpa"  # the kernel of all parts but `length`: PyTorch picks one on every device
PROMPT = 32  # tokens of each prompt in generation
NEW_TOKENS = 64  # tokens generated of each of several samples
ENOUGH_MS, MOST = 500, 100  # repeat quick calls until they took this long, at most so many times
FITTED = " Lines: the power law through all points or, if a curve bends, through its last half."

TRAINS = False  # a step is made in this process, so that its memory is that of its tensors alone
UNUSED = {}
GROUP = ("part", "attention", "over", "round")  # the points of a curve


# the setting with the sizes of an axis
SETTINGS = {"length": "lengths", "depth": "depths", "width": "widths", "batch": "batches", "tokens": "texts"}
SETTINGS |= {"text": "megabytes"}
OVER = {"generation": ("tokens", "samples"), "prepare": ("text", "cores")}
RATES = {"generation": ("tokens", "tokens/s"), "prepare": ("megabytes", "MB/s")}  # (what of a row, its unit a second)


@dataclasses.dataclass
class Settings(options.Timed):
    repeats: int = 20  # timed calls of each row, at least; quick ones are repeated for half a second
    rounds: int = 2  # measurements of every curve; the exponents of the rounds show how sure one is
    lengths: str = "256,512,1024,2048,4096,8192,16384"  # tokens in a sequence, one sequence a step
    depths: str = "3,6,12,24,48"  # layers
    widths: str = "192,384,768,1536,3072"  # channels, in heads of n_embd / n_head
    batches: str = "1,2,4,8,16,32,64"  # sequences in a step, and samples generated together
    texts: str = "128,256,512,1024,2048"  # tokens generated after a prompt of 32
    megabytes: str = "1,4,16,64"  # MB of text to prepare
    tokenizer: str = "train:2048"  # tokenizer of that text, as in data/text/prepare.py
    n_layer: int = 12  # layers (L), if these do not grow
    n_head: int = 12  # heads in a layer
    n_embd: int = 768  # channels (C)
    block_size: int = 1024  # tokens in a sequence (T)
    batch_size: int = 4  # sequences in a step (B)
    vocab_size: int = 50257  # ids
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # dtype of matrix products
    compile: bool | Literal["auto"] = "auto"  # torch.compile for training steps; auto: on a GPU


def defaults(gpu: bool) -> dict:
    """GPT-2 124M on a GPU; on a CPU two layers of 256 channels, which take a quarter of an hour on two cores."""
    if gpu:
        return {}
    small = dict(n_layer=2, n_head=4, n_embd=256, block_size=256, vocab_size=256, repeats=3, warmup=0)
    small |= dict(lengths="256,512,1024,2048,4096,8192", depths="1,2,4,8,16", widths="64,128,256,512,1024")
    return small | dict(batches="1,2,4,8,16,32", texts="64,128,256,512,1024", megabytes="1,2,4,8,16")


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The rows, round by round; at each length the kernels are in turn. Raises UserError if a setting is wrong.

    {'part', 'attention', 'n', 'round'}, or for generation and preparing {'part', 'over', 'n', 'round'}.
    """
    sizes = _sizes(s)
    _config(s)  # raises if no model has these dimensions
    for C in sizes["width"]:
        if C % (s.n_embd // s.n_head):
            each = f"n_embd / n_head = {s.n_embd // s.n_head}, the channels of a head"
            raise UserError(f"{C} of widths={s.widths!r} is no multiple of {each}: take multiples")
    specs = [{"part": "length", "attention": name, "n": T} for T in sizes["length"] for name in SINGLE_KERNELS]
    specs += [{"part": part, "attention": PICKED, "n": n} for part in STEPS[1:] for n in sizes[part]]
    specs += [{"part": part, "over": axis, "n": n} for part, axes in OVER.items() for axis in axes for n in sizes[axis]]
    return [{**spec, "round": number} for number in range(1, s.rounds + 1) for spec in specs]


def _sizes(s):
    """{axis: its sizes, in order}."""
    found = {axis: sorted(set(options.lengths(getattr(s, name), name))) for axis, name in SETTINGS.items()}
    return found | {"samples": found["batch"], "cores": prepare_time.counts_of_cores()}


def _config(s, attention=PICKED, **changes):
    """The model with `changes` to its dimensions; heads keep their size."""
    shape = {name: getattr(s, name) for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")} | changes
    shape["n_head"] = s.n_head * shape["n_embd"] // s.n_embd
    return GPTConfig(**shape, vocab_multiple=64, bias=False, attention=attention)


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A row: its proof, its times in ms, and what theory counts. Of a step also its memory, that of all its tensors.

    `work` is what time is compared with: FLOPs of a step, bytes that generation reads, or bytes of text for each core.
    Raises UserError, ParityError and MemoryError as rows.attempt expects.
    """
    if spec["part"] == "prepare":
        every = prepare_time.counts_of_cores()
        megabytes, cores = (spec["n"], None) if spec["over"] == "text" else (_sizes(s)["text"][-1], spec["n"])
        row = prepare_time.run(megabytes, cores, s.tokenizer, folder)
        return row | {"work": 1e6 * row["megabytes"] / (cores or max(every, default=1))}
    if spec["part"] == "generation":
        return _generate(spec, s, device)
    return _step(spec, s, device, trace_path(folder, spec))


def _step(spec, s, device, trace):
    part, n, name, dtype = spec["part"], spec["n"], spec["attention"], resolve_dtype(s.dtype, device)
    grown = {"length": "block_size", "depth": "n_layer", "width": "n_embd"}
    config = _config(s, name, **({grown[part]: n} if part in grown else {}))
    B, compiled = {"length": 1, "batch": n}.get(part, s.batch_size), resolve_compile(s.compile, device)[0]
    ran = {"dtype": dtype_name(dtype), "compile": compiled}
    estimate = Memory.of(config, Run(B, attention=name, cpu=device.type == "cpu", **ran))
    _require_room(estimate, device)
    case = Case.of_model(config, B, device, dtype)
    row = dict(_proven(name, case))
    step = training_step(config, B, device, dtype, compiled)
    step()
    weights_and_moments = 12 * config.num_params  # float32: the weights and AdamW's two means
    held = weights_and_moments + memory.peak_bytes(step, device)
    receipt = observe(step, trace if s.profile else None, case=case)
    if reason := contradiction(name, receipt, case):
        raise UserError(reason)
    tokens = B * config.block_size
    counted = {"work": flops_per_token(config) * tokens, "estimated_memory": estimate.total}
    row |= {"kernel": receipt, "peak_memory": held, "tokens": tokens, "ran": ran}
    return row | counted | _timed(step, s, device)


_proven = functools.lru_cache(prove_kernel)  # each round asks for it again


def _require_room(estimate, device):
    """Raise MemoryError on a CPU if a step certainly does not fit: the system would end this process, and all rows."""
    least, there = estimate.range[0], memory.total_memory(device)
    if device.type == "cpu" and least > there:
        least, there = (f"{n / 2**30:.1f} GiB" for n in (least, there))
        raise MemoryError(f"it needs {least} or more, and this machine or its container has {there}")


def _timed(step, s, device):
    """Times of `step`: s.repeats samples, or more if they are quick."""
    counted, faults = counting_faults(step)
    (first,) = timing.samples(counted, device, 1, s.warmup)
    samples_ms = timing.samples(counted, device, max(s.repeats, min(MOST, int(ENOUGH_MS / first))), 0)
    return {"page_faults": faults(), "samples_ms": samples_ms, **timing.summary(samples_ms)}


def _generate(spec, s, device):
    """Time greedy generation after a random prompt. Before that, the logits after it must be those without a cache."""
    B, new = (1, spec["n"]) if spec["over"] == "tokens" else (spec["n"], NEW_TOKENS)
    dtype, config = resolve_dtype(s.dtype, device), _config(s, block_size=PROMPT + new)
    determinism.seed(0, "init")
    with torch.device(device):
        model, idx = GPT(config).eval(), torch.randint(s.vocab_size, (B, PROMPT))
    engine = engines.prepare(model, device, dtype_name(dtype), B, PROMPT, new)

    def step():
        return torch.cat([idx, *generate.new_tokens(engine, idx, new, temperature=0, cache=engine.cache)], dim=1)

    ids = step()
    model.use_attention("manual")
    with torch.no_grad():
        got, want = (z[0][:, -1, : s.vocab_size].float() for z in (engine(ids[:, -1:], engine.cache), model(ids)))
    errors = {"logits": ((got - want).abs().max() / want.abs().max()).nan_to_num(nan=torch.inf).item()}
    row = {"errors": errors, "parity": verdict(errors, dtype, f"in the logits after {new} tokens")}
    key = 2 * config.n_layer * config.n_embd * generate.cache_dtype(device, dtype).itemsize  # and its value
    read = new * engine.bytes_per_step + B * key * sum(range(PROMPT, PROMPT + new))
    ran = {"dtype": dtype_name(dtype), "compile": False}
    return row | {"tokens": B * new, "work": read, "ran": ran} | _timed(step, s, device)


def table(rows: list[dict]) -> list[str]:
    """A table of all power laws, then one of the points of each panel of the figures."""
    text, found = [], curves(rows)
    for part in (*STEPS, *OVER):
        for axis, lines in _axes(part, found).items():
            text += ["", f"## {part}, over {AXES[axis].what}", "", *_points(part, axis, lines)]
    names = ["part", "curve", "cost", "for twice as much, times", "exponent (of its rounds)", "fitted from", "to"]
    names += ["exponent of the count", "in the end"]
    worst = max((parity.largest(row["errors"]) for row in rows if "errors" in row), default=0)
    return [
        *report.markdown(names, map(_law_cells, laws(rows))),
        "",
        "A law is fitted to all points of a curve or, if the curve bends, to its last half. It bends if one law for",
        f"all points misses one by more than {100 * (BEND - 1):.0f} %. The count is made at the same points: FLOPs of",
        "a step (6 N + 12 L C T a token), bytes of weights and keys that generation reads, bytes of text for each",
        "core; for memory it is the planner's estimate. In the end, the term that grows fastest has this exponent. The",
        "memory of a step is that of its tensors, with weights and moments. Every time follows a passed comparison:",
        "attention with float64, generation with a reading without a cache, and ids with their text. The largest error",
        f"is {worst:.1e}.",
        *report.page_faults(rows),
        *text,
    ]


def _axes(part, found):
    """{axis: {name of a curve: its points}} of a part: curves of steps share their axis, others each have their own."""
    lines = {name: points for (of, name), points in found.items() if of == part}
    lines = {name: points for name, points in lines.items() if any(counts(row, "memory") for row in points.values())}
    if part in STEPS:
        return {part: lines} if lines else {}
    return {axis: {axis: points} for axis, points in lines.items()}


def _points(part, axis, lines):
    """A table with a line for each n of an axis, and a column for each of its curves."""
    unit = "ms (MiB)" if part in STEPS else f"ms ({RATES[part][1]})"
    every = sorted(set().union(*lines.values()))
    cells = [[n, *(_cell(points.get(n)) for points in lines.values())] for n in every]
    return report.markdown([AXES[axis].what, *(f"{name}, {unit}" for name in lines)], cells)


def _cell(row):
    if row is None:
        return ""
    if row["status"] != "measured":
        return row["status"]
    beside = _drawn(row, "peak_memory") if row["part"] in STEPS else _drawn(row, "median_ms")
    ms, beside = (f"{number:,.0f}" if number >= 1000 else f"{number:.4g}" for number in (row["median_ms"], beside))
    return f"{ms} ({beside}){report.mark(row)}"


def _law_cells(law):
    each = law["exponents"].values()
    spread = f" ({min(each):.2f} to {max(each):.2f})" if len(each) > 1 else ""
    cells = [*curve_of(law), law["law"], f"{law['doubling']:.2f}", f"{law['exponent']:.2f}{spread}"]
    return [*cells, law["n"][0], law["n"][-1], f"{law['counted']:.2f}", law["limit"]]


def claims(rows: list[dict]) -> list[check.Claim]:
    """By what each cost is multiplied for twice as much, with the range of the rounds; refusals."""
    found = []
    for law in laws(rows):
        of, axis, which = curve_of(law), AXES[law.get("over", law["part"])], law["law"]
        on = [row for row in rows if curve_of(row) == of and row["n"] in law["n"] and counts(row, which)]
        each = [2**b for b in law["exponents"].values()]
        spread = (min(each), max(each)) if len(each) > 1 else ()
        name = f"{', '.join(of)}: {which} for twice the {axis.what}"
        found.append(check.Claim(name, on, law["doubling"], *spread, timed=which == "time"))
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """A figure for each part: for steps with a panel of time and one of memory, for others with one for each axis."""
    found, every = curves(rows), laws(rows)
    for part in (*STEPS, *OVER):
        if axes := _axes(part, found):
            mine = [law for law in every if law["part"] == part]
            points = [row for lines in axes.values() for points in lines.values() for row in points.values()]
            hollow = " Hollow: disturbed, and in no law." if any(row.get("disturbed") for row in points) else ""
            left_out = drawing.left_out(row for row in rows if row["part"] == part)
            yield part, finding(part, mine), _subject(part, s, axes) + hollow + left_out, _figure(part, axes, mine)


def finding(part: str, found: list[dict]) -> str:
    """By what time and memory are multiplied for twice as much. found: the laws of this part."""
    said = {}  # {what grows: {time or memory: {curve: its number}}}
    for law in found:
        of = said.setdefault(AXES[law.get("over", law["part"])].what, {}).setdefault(law["law"], {})
        of[curve_of(law)] = f"{law['doubling']:.1f}"
    parts = []
    for what, costs in said.items():
        named, each = [], []
        for cost, numbers in sorted(costs.items(), reverse=True):  # time first
            again = [*numbers] == named  # the names of kernels were just said
            parted = [f"{n} ({of[1]})" if of[0] == "length" and not again else n for of, n in numbers.items()]
            each.append(f"{', '.join(parted)} times the {cost}")
            named = [*numbers]
        parts.append(f"twice the {what} take {' and '.join(each)}")
    text = "; ".join(parts) or f"no undisturbed curve of {part}"
    return text[0].upper() + text[1:]


def _subject(part, s, axes):
    """What was measured. s: the settings of a header."""
    if part == "prepare":
        how = f"The whole command data/text/prepare.py --tokenizer={s['tokenizer']} on Python's standard library; over"
        return f"{how} cores, on {max(options.lengths(s['megabytes']))} MB of it.{FITTED}"
    layers = "L" if part == "depth" else s["n_layer"]
    channels = "C" if part == "width" else s["n_embd"]
    row = next(row for lines in axes.values() for points in lines.values() for row in points.values() if "ran" in row)
    model = f"A GPT of {layers} layers, {channels} channels, heads of {s['n_embd'] // s['n_head']}"
    model += f" ({row['ran']['dtype']}, {report.compiled(row)})"
    if part == "generation":
        return f"{model}, greedy, after {PROMPT} tokens: one sample, or {NEW_TOKENS} tokens of several.{FITTED}"
    tokens = {"length": "1 × T", "batch": f"B × {s['block_size']}"}.get(part, f"{s['batch_size']} × {s['block_size']}")
    kernel = "" if part == "length" else f" with {PICKED}"
    return f"{model}, {tokens} tokens a step{kernel}.{FITTED}"


def _figure(part, axes, found):
    """Each curve's points, dotted, and over them its power law; disturbed points are hollow."""
    if part in STEPS:
        ((axis, lines),) = axes.items()
        panels = [("ms a step: median, p10 to p90", axis, lines, "time"), ("MiB of tensors", axis, lines, "memory")]
    else:
        panels = [(RATES[part][1], axis, lines, "time") for axis, lines in axes.items()]
    figure, grid = drawing.new(2.4, ncols=len(panels), squeeze=False)
    for place, (label, axis, lines, which) in zip(grid[0], panels):
        for name, points in lines.items():
            law = next((law for law in found if curve_of(law) == (part, name) and law["law"] == which), None)
            _draw(place, axis, name, points, which, law)
        every = sorted(set().union(*lines.values()))
        drawing.doubling("x", place, ticks=every)
        drawing.doubling("y", place)
        place.set(title=label, xlabel=AXES[axis].what)
        if place.has_data():
            low, high = place.dataLim.intervaly
            # from one power of two to another, because an axis within one doubling would have no number
            place.set_ylim(0.93 * 2 ** math.floor(math.log2(low)), 1.07 * 2 ** math.ceil(math.log2(high)))
            place.legend(frameon=False, labelcolor="linecolor", fontsize=7.5)
    return figure


def _draw(place, axis, name, points, which, law):
    """Draw a curve and its law into a panel; the legend has the power of what is drawn."""
    field, *ends = ("median_ms", "p10_ms", "p90_ms") if which == "time" else ("peak_memory",)
    color, mark = (drawing.color(name), drawing.mark(name)) if axis == "length" else (drawing.FILLS[0], "o")
    fitted = {n: _drawn(points[n], field, law["factor"] * n ** law["exponent"]) for n in law["n"]} if law else {}
    power = f"{AXES[axis].letter}^{fit(fitted)[0]:.2f}" if law else "no law"
    look = dict(color=color, marker=mark, linewidth=0.8, label=f"{name}: {power}" if axis == "length" else power)
    measured = {n: row for n, row in points.items() if row["status"] == "measured"}
    for calm, style in ((True, dict(linestyle=":")), (False, dict(linestyle="", markerfacecolor="none"))):
        drawn = [(n, *(_drawn(row, each) for each in (field, *ends))) for n, row in measured.items()]
        drawn = [point for point in drawn if counts(points[point[0]], which) is calm]
        if drawn:
            drawing.line(place, name, [point if ends else (*point, None, None) for point in drawn], **look | style)
            look["label"] = None
    place.plot(fitted.keys(), fitted.values(), color=color, linewidth=1.3)


def _drawn(row, field, value=None):
    """The cost `field` of a row, or `value` in its place, as it is drawn: ms or MiB, tokens or MB a second."""
    value = row[field] if value is None else value
    if field == "peak_memory":
        return value / 2**20
    return value if row["part"] in STEPS else 1e3 * row[RATES[row["part"]][0]] / value
