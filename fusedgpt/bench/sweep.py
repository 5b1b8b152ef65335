"""Attention alone over a range of lengths, and training end to end: from which length on one kernel overtakes another.

AMD's article "Accelerating Large Language Models with Flash Attention on AMD GPUs" has causal attention, batch 1, 256
to 4096 tokens by 64, hand-written against fused. Here kernels take turns at each length, so that drift of the machine
affects them all. Lengths go from coarse to fine, so that a sweep that ends early has a figure of all kernels.
"""

import dataclasses
import functools
import itertools
import math
import pathlib
import statistics
from collections.abc import Iterator
from typing import Literal

import torch

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.receipt import contradiction
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import check, child, drawing, options, report
from fusedgpt.bench.disturbance import comparable, speedup
from fusedgpt.bench.proof import prove, prove_kernel, refusals, tflops, timed
from fusedgpt.bench.rows import slug, trace_path
from fusedgpt.errors import UserError
from fusedgpt.machine.device import dtype_name, resolve_dtype

FIRST = (1024, 4096, 256, 2048, 512, 8192, 16384)  # the lengths to measure first, in this order
LONGEST_TRAINED = 4096

TRAINS = True
UNUSED = {
    **child.UNUSED,
    "attention": options.EACH_ROW_NAMES_IT,
    "block_size": "each row of the sweep sets it",
    "eval_iters": "a row makes --steps steps and no evaluation",
}
GROUP = ("part", "heads", "pass", "T")


@dataclasses.dataclass
class Settings(options.Trained, options.Timed):
    heads: str = "32x128,12x64"  # heads x head size of attention alone, comma-separated
    lengths: str = "256-4096-64,8192,16384"  # numbers of tokens, as first-last-step or one by one
    # dtype of attention alone; training has the dtype that auto means
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"


def defaults(gpu: bool) -> dict:
    """AMD's lengths in float16 on a GPU; four lengths on a CPU."""
    if gpu:
        return child.DEFAULTS | dict(steps=55, compile=True, dtype="float16", batch_size=4)
    small = dict(vocab_size=None, repeats=20, lengths="256,512,1024,2048", heads="8x128,12x64")
    return child.DEFAULTS | child.ON_A_CPU | small


def plan(s: Settings, device: torch.device) -> list[dict]:
    """Attention alone at powers of two, then training there, then attention alone at the other lengths.

    All shapes, directions and kernels, also the user's own, are measured at one length before the next. Raises
    UserError if --heads or --lengths cannot be read, or if --n_kv_head does not divide all heads.
    """
    own = options.own_kernel(s.attention)
    lengths, model = coarse_to_fine(options.lengths(s.lengths)), options.family(vars(s))
    for nh, _ in options.heads(s.heads):
        if nh % (s.n_kv_head or nh):
            raise UserError(
                f"{nh} of --heads={s.heads} cannot share n_kv_head={s.n_kv_head} heads of keys: take a divisor of all"
            )
    alone = [
        {"part": "attention", "heads": f"{nh}x{hs}", **model, "pass": direction, "T": T, "attention": name}
        for T in lengths
        for nh, hs in options.heads(s.heads)
        for direction in ("forward", "forward + backward")
        for name in (*SINGLE_KERNELS, "masked", *own)
        if name != "flex" or T in FIRST  # flex is compiled for each length
    ]
    trained = [T for T in lengths if _power_of_two(T) and T <= LONGEST_TRAINED]
    names = (*SINGLE_KERNELS, *own)
    whole = [{"part": "training", **model, "T": T, "attention": name} for T in trained for name in names]
    coarse = [spec for spec in alone if _power_of_two(spec["T"])]
    return coarse + whole + [spec for spec in alone if not _power_of_two(spec["T"])]


def coarse_to_fine(lengths: list[int]) -> list[int]:
    """`lengths` without repetitions: FIRST, then other powers of two, then the rest, so that the gaps close evenly.

    After FIRST, the next length is the one whose ratio to the nearest earlier length is largest.
    """
    order = [T for T in FIRST if T in lengths]
    left = sorted(set(lengths) - set(order))
    while left:
        distance = {T: min((abs(math.log2(T / other)) for other in order), default=0) for T in left}
        order.append(max(left, key=lambda T: (_power_of_two(T), distance[T])))
        left.remove(order[-1])
    return order


def _power_of_two(T):
    return T & (T - 1) == 0


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """A row: parity with float64, then times; for attention alone also TFLOP/s and memory beyond the inputs."""
    if spec["attention"] == "flex":
        torch.compiler.reset()  # PyTorch counts recompilations over a whole process, and stops at the eighth
    if spec["part"] == "training":
        return _training(spec, s, device, folder)
    ((nh, hs),) = options.heads(spec["heads"])
    name, dtype, T = spec["attention"], resolve_dtype(s.dtype, device), spec["T"]
    window = s.window if s.window and s.window < T else None
    of_all = dict(dropout=s.dropout, packed=s.packed, kv_heads=s.n_kv_head, window=window)
    case = Case((1, nh, T, hs), device, dtype, backward=spec["pass"] != "forward", **of_all)
    few = case.of_heads(1, 1)
    if reason := _refusal(name, dataclasses.replace(few, shape=(1, few.shape[1], 256, hs), window=window and 64)):
        raise UserError(reason)
    attend, inputs = ATTENTION[name], _inputs(case)
    with refusals():
        row = prove(attend, case)
        row |= timed(lambda: case.run(attend, *inputs), s, case, trace_path(folder, spec))
    if reason := contradiction(name, row["kernel"], case):
        raise UserError(reason)
    return row | {"dtype": dtype_name(dtype), "tflops": tflops(case, row["median_ms"])}


_inputs = functools.lru_cache(maxsize=1)(Case.inputs)  # kernels share them, because drawing them is slow
_refusal = functools.lru_cache(permitted.refusal)  # for one length; if a kernel refuses another length, it raises there


def _training(spec, s, device, folder):
    s = dataclasses.replace(s, block_size=spec["T"], attention=spec["attention"], dtype="auto")
    cases = Case.of_layers(s, s.batch_size, device, resolve_dtype(s.dtype, device), dropout=s.dropout)
    row = prove_kernel(s.attention, *cases)
    out_dir = folder / "runs" / slug(f"{s.attention} {s.block_size}")
    return row | child.measured(*child.run(child.settings(s, Settings), out_dir, trace=trace_path(folder, spec)))


def crossovers(rows: list[dict]) -> dict[tuple[str, str], tuple[float, float]]:
    """{(slower, faster): (perhaps, surely)}: the lengths from which on one kernel is faster, in rows of one part.

    At every length from `surely` on, the p90 of the faster kernel is below the p10 of the slower one. From `perhaps`
    on, the p90 of the slower is not below the p10 of the faster. 0 means at every length, infinity at none. Disturbed
    rows do not count.
    """
    by_kernel, found = {}, {}
    for row in rows:
        if comparable(row):
            by_kernel.setdefault(row["attention"], {})[row["T"]] = row
    for a, b in itertools.permutations(by_kernel, 2):
        slow, fast = by_kernel[a], by_kernel[b]
        gains = {T: speedup(fast[T], slow[T]) for T in slow.keys() & fast.keys()}
        perhaps = _from_on({T: high >= 1 for T, (_, _, high) in gains.items()})
        if len(gains) > 1 and perhaps < math.inf:
            found[a, b] = perhaps, _from_on({T: low > 1 for T, (_, low, _) in gains.items()})
    return found


def _from_on(ahead):
    """The first length from which on `ahead`, {length: bool}, is true; 0 if always, infinity if not at the last."""
    behind = [length for length in ahead if not ahead[length]]
    return min((length for length in ahead if length > max(behind)), default=math.inf) if behind else 0


def table(rows: list[dict]) -> list[str]:
    """For each part, shape and direction: a line for each length, a column for each kernel, and the crossovers."""
    text = []
    for (part, *shape), group in _groups(rows).items():
        model = "".join(f", {row['model']}" for row in group[:1] if "model" in row)
        if part == "attention":
            text += [
                "",
                f"## attention alone, {', '.join(filter(None, shape))}{model}",
                "",
                *_times(group, "ms (TFLOP/s)"),
            ]
        else:
            text += ["", f"## training, end to end{model}", "", *_times(group, "ms (tokens/s)")]
        found = {pair: surely for pair, (_, surely) in crossovers(group).items() if surely < math.inf}
        if found:
            text += ["", *(f"- `{b}` is faster than `{a}` {_where(length)}." for (a, b), length in found.items())]
    measured = [row for row in rows if row["status"] == "measured"]
    seen = {f"{row['attention']}: {report.kernel(row, row.get('pass') != 'forward')}" for row in measured}
    worst = max((parity.largest(row["errors"]) for row in rows if "errors" in row), default=0)
    return [
        *text,
        "",
        f"Kernels seen, forward / backward: {'; '.join(sorted(seen))}. Every time follows a passed comparison with",
        f"float64; the largest error is {worst:.1e}. TFLOP/s counts the causal half: 2 B nh T² hs",
        "forward, 3.5 times that with the backward; with a window, only the scores in it. A kernel is called faster if",
        "its p90 is below the other's p10.",
        *report.how_timed(rows),
    ]


def _groups(rows):
    """{(part, heads, pass): its rows}; for training, heads and pass are None."""
    found = {}
    for row in rows:
        found.setdefault((row["part"], row.get("heads"), row.get("pass")), []).append(row)
    return found


def _manual(rows):
    """{length: manual's row}."""
    return {row["T"]: row for row in rows if row["attention"] == "manual"}


def _times(rows, unit):
    """A table of the times of a group, in `unit`."""
    shown = list(dict.fromkeys(row["attention"] for row in rows if row["status"] == "measured"))
    cells, manual = {(row["T"], row["attention"]): row for row in rows}, _manual(rows)
    lines = []
    for T in _ticks(rows):  # the figures show all lengths
        lines.append([T, *(_cell(cells.get((T, name)), manual.get(T)) for name in shown)])
    return report.markdown(["tokens", *(f"{name}, {unit}, times as fast as manual" for name in shown)], lines)


def _cell(row, manual):
    if row is None:
        return ""
    if row["status"] != "measured":
        return row["status"]
    rate = f"{row['tflops']:.2f}" if "tflops" in row else f"{row['tokens_per_s']:,.0f}"
    times = report.ratio(row, manual)
    return f"{row['median_ms']:.2f} ({rate}){times and f', {times}'}{report.mark(row)}"


def _where(length):
    if length == math.inf:
        return check.NOWHERE
    return f"from T = {length} on" if length else "at every length"


def claims(rows: list[dict]) -> list[check.Claim]:
    """Speedups over manual, lengths from which on a kernel is faster or slower than manual, losses and refusals."""
    found = []
    for where, group in _groups(rows).items():
        where, manual = ", ".join(filter(None, where)), _manual(group)
        for row in group:
            name = f"{where}, T = {row['T']}, {row['attention']}"
            found += check.ratio(f"{name}: speed over manual", row, manual.get(row["T"]))
            if row["part"] == "training":
                found += check.same_loss(f"{name}: last loss beside manual", row, manual.get(row["T"]))
        for pair, (perhaps, surely) in crossovers(group).items():
            if "manual" in pair:
                name = f"{where}: {pair[1]} is faster than {pair[0]}"
                rests_on = [row for row in group if row["attention"] in pair and comparable(row)]
                found.append(check.Claim(name, rests_on, _where(surely), perhaps, surely, whole=True))
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """speedup.png and memory.png, with a panel for each shape and direction; training.png in tokens/s.

    Disturbed times are left out.
    """
    alone, trained = ([row for row in rows if row["part"] == part] for part in ("attention", "training"))
    left_out = drawing.left_out(alone)
    alone, trained = ([row for row in part if row["status"] == "measured"] for part in (alone, trained))
    if alone:
        dtypes = ", ".join(dict.fromkeys(row["dtype"] for row in alone))
        also = [*options.family(s).values(), *options.changed(s, ("mask", "dropout"))]
        model = "".join(f", {each}" for each in also)
        subject = f"Causal attention alone, batch 1, {dtypes}{model}; manual is the hand-written masked softmax."
        subject += left_out
        figure = _panels(alone, "times as fast as manual, p10 to p90", _over_manual)
        yield "speedup", f"Attention {finding(alone)}", subject, figure
        figure = _panels(alone, "MiB above the inputs", _memory)
        yield "memory", _finding_of_memory(alone), subject, figure
    whole = list(filter(comparable, trained))
    if whole:
        figure, axes = drawing.new(2.5)
        _lines(axes, whole, _rates)
        drawing.doubling("x", axes, ticks=_ticks(whole))
        axes.set(xlabel="tokens in a sequence", ylabel="tokens/s: median, p10 to p90", ylim=(0, None))
        axes.legend(frameon=False, labelcolor="linecolor")
        ran = ", ".join(dict.fromkeys(f"{row['ran']['dtype']}, {report.compiled(row)}" for row in whole))
        subject = f"Training {child.subject(s | {'block_size': 'T'})} ({ran})"
        if len(whole) < len(trained):
            subject += f"; without {len(trained) - len(whole)} disturbed time(s)"
        yield "training", f"Training {finding(whole)}", subject, figure


def finding(rows: list[dict]) -> str:
    """How the fastest kernel and flash stand beside manual, over all shapes and directions.

    It is about the longest length with a ratio: at the longest of all, manual may run out of memory.
    """
    found = {}  # {length: {kernel: pairs}}
    for group in _groups(rows).values():
        manual = _manual(group)
        for row in group:
            if row["attention"] != "manual" and speedup(row, base := manual.get(row["T"])):
                found.setdefault(row["T"], {}).setdefault(row["attention"], []).append((row, base))
    if not found:
        return "alone: no ratio to manual" if rows[0]["part"] == "attention" else "end to end: no ratio to manual"
    pairs = found[max(found)]
    # a kernel without a backward here has ratios in fewer panels than others, and those of the forward are larger
    everywhere = [name for name in pairs if len(pairs[name]) == max(map(len, pairs.values()))]
    best = max(everywhere, key=lambda name: statistics.geometric_mean(speedup(*pair)[0] for pair in pairs[name]))
    names = dict.fromkeys((best, *({"flash"} & pairs.keys())))
    said = [f"{name} {report.clause(pairs[name], 'manual')}" for name in names]
    return f"at {max(found)} tokens: {'; '.join([said[0], *(each.removesuffix(' as manual') for each in said[1:])])}"


def _finding_of_memory(rows):
    """How much manual holds at its longest length, as a multiple of flash or of the kernel that holds least."""
    longest = max((row["T"] for row in rows if row["attention"] == "manual"), default=None)
    found = {}
    for group in _groups(rows).values():
        held = {row["attention"]: row["peak_memory"] for row in group if row["T"] == longest and row["peak_memory"]}
        other = "flash" if "flash" in held else min(held, key=held.get, default=None)
        if "manual" in held and other != "manual":
            found.setdefault(other, []).append(held["manual"] / held[other])
    if not found:
        return "What attention holds above its inputs"
    spans = [f"{report.span(ratios)} times as much memory as {other}" for other, ratios in found.items()]
    return f"At {longest} tokens manual holds {', '.join(spans)}"


def _over_manual(row, manual):
    """(speedup over manual, least, greatest), or None; for manual itself 1, without a spread."""
    found = speedup(row, manual)
    return (1.0, None, None) if found and row is manual else found


def _memory(row, manual):
    return (row["peak_memory"] / 2**20, None, None) if row["peak_memory"] else None


def _rates(row, manual):
    """Tokens/s, and its least and greatest, from the p90 and p10 of the times."""
    tokens = row["tokens_per_s"] * row["median_ms"]
    return row["tokens_per_s"], tokens / row["p90_ms"], tokens / row["p10_ms"]


def _panels(rows, label, value):
    """A figure with a panel for each shape and direction, all with the same axes; value: as in _lines."""
    groups = _groups(rows)
    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure, grid = drawing.new(2.0 * down + 0.3, nrows=down, ncols=across, squeeze=False, sharex=True, sharey=True)
    names = {}
    for axes, (_, heads, direction) in zip(grid.flat, sorted(groups)):
        _lines(axes, groups["attention", heads, direction], value)
        axes.set_title(f"{heads.replace('x', ' heads × ')}, {direction}")
        names |= {line.get_label(): line for line in axes.lines}
    drawing.doubling("x", *grid.flat, ticks=_ticks(rows))
    drawing.doubling("y", *grid.flat)
    for axes in grid[-1]:
        axes.set_xlabel("tokens")
    for axes in grid[:, 0]:
        axes.set_ylabel(label.replace(", ", ",\n"))
    if names:  # there is none if every time was disturbed
        figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _lines(axes, rows, value):
    """A line for each kernel. value: (row, manual's row at that length) -> (y, low, high), or None to leave it out."""
    manual = _manual(rows)
    for name in dict.fromkeys(row["attention"] for row in rows):
        found = {row["T"]: value(row, manual.get(row["T"])) for row in rows if row["attention"] == name}
        points = [(T, *found[T]) for T in sorted(found) if found[T]]
        if points:
            drawing.line(axes, name, points)


def _ticks(rows):
    """The lengths of `rows` that are powers of two, or all if none is."""
    lengths = sorted({row["T"] for row in rows})
    return list(filter(_power_of_two, lengths)) or lengths
