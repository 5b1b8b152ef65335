"""report.md and the figures of a benchmark, from its rows alone: `python -m parts.bench.report FOLDER [FOLDER ...]`."""

import math
import pathlib
import sys

from parts.bench import ladder, numerics, plots, sweep
from parts.errors import UserError, one_sentence
from parts.files import atomic, read_jsonl

GIB = 2**30


def write(folder):
    """Write report.md and draw the figures of the rows.jsonl in `folder`; the paths written."""
    path = pathlib.Path(folder) / "rows.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a benchmark, such as out-bench/ladder")
    lines = read_jsonl(path)
    head, rows = lines[0], [line for line in lines if line["kind"] == "row"]
    kind = head["benchmark"]
    figures = plots.draw(kind, rows, pathlib.Path(folder))
    text = [*_head(head, lines), *SECTIONS[kind](rows), ""]
    text += [line for figure in figures for line in (f"![{figure.stem}]({figure.name})", "")]
    text += _failures(rows)
    with atomic(path.with_name("report.md"), "w") as file:
        file.write("\n".join(text).rstrip() + "\n")
    return [path.with_name("report.md"), *figures]


def _table(names, rows):
    return [
        f"| {' | '.join(names)} |",
        "|" + "---|" * len(names),
        *(f"| {' | '.join(map(str, row))} |" for row in rows),
    ]


def _head(head, lines):
    environment = dict(head["environment"])
    s = head["settings"]
    if "memory" in environment:
        environment["memory"] = f"{environment['memory'] / GIB:.0f} GiB"
    for when in ("before", "after"):
        states = [line for line in lines if line["kind"] == when]
        if states:
            state = {name: value for name, value in states[-1].items() if name != "kind"}
            environment[f"{when} the rows"] = ", ".join(f"{name} {value}" for name, value in state.items())
    settings = ", ".join(f"{name} {s[name]}" for name in head["set"])
    return [
        f"# {head['benchmark'].replace('_', ' ')}",
        "",
        f"`{head['command']}`",
        "",
        *_table(["", ""], [*environment.items(), ("settings other than the defaults", settings)]),
        "",
    ]


def _failures(rows):
    """Rows with no measurement, grouped by their reason."""
    reasons = {}
    for row in rows:
        if row["status"] != "measured":
            named = row.get("rung") or row.get("path") or row.get("pair") or row["attention"]
            if row["status"] != "refused" and "T" in row:
                named = ", ".join(str(row[key]) for key in ("model", "heads", "pass", "attention", "T") if key in row)
            reasons.setdefault((row["status"], row["reason"]), {})[named] = None
    return [f"- {'; '.join(names)}: {status}: {reason}" for (status, reason), names in reasons.items()]


def _kernel(row, backward=True):
    ways = [row["kernel"][way] for way in (("forward", "backward") if backward else ("forward",))]
    return " / ".join("+".join(names) for names in ways)


def _spread(row, digits=1):
    return f"{row['median_ms']:.{digits}f} ({row['p10_ms']:.{digits}f}-{row['p90_ms']:.{digits}f})"


def _ladder(rows):
    measured = {row["rung"]: row for row in rows if row["status"] == "measured"}
    base = measured.get(ladder.BASELINE)
    names = ["rung", "ms a step, median (p10-p90)", "faster than manual", "the article, A100", "tokens/s", "MFU"]
    table = []
    for row in rows:
        told = ladder.ARTICLE.get(row["rung"])
        theirs = f"{told} ms, {ladder.faster(ladder.ARTICLE[ladder.BASELINE], told):.2f} %" if told else ""
        if row["status"] != "measured":
            table.append([row["rung"], f"{row['status']}: {row['reason']}", "", theirs, *[""] * 5])
            continue
        ours = f"{ladder.faster(base['median_ms'], row['median_ms']):+.2f} %" if base else ""
        ran, memory = row["ran"], f"{row['peak_memory'] / GIB:.2f} GiB"
        way = "compiled" if ran["compile"] else "eager"
        how = f"{ran['attention']}, {ran['dtype']}, {way}, {ran['padded_vocab_size']}"
        mfu = row["mfu"] * row["peak_flops"] / _peaks(measured.values())[ran["dtype"]]
        rates = f"{row['tokens_per_s']:,.0f}", f"{100 * mfu:.1f} %"
        kernel = f"{_kernel(row)} ({how})"
        table.append([row["rung"], _spread(row), ours, theirs, *rates, memory, f"{row['final_loss']:.4f}", kernel])
    text = _table([*names, "peak memory", "final loss", "kernel seen forward / backward (as it ran)"], table)
    return [*text, "", *(f"- {note}" for note in _ladder_notes(measured))]


def _peaks(rows):
    """The peak FLOP/s of each dtype: the most that a run of `rows` found, as a disturbed one finds less."""
    peaks = {}
    for row in rows:
        dtype = row["ran"]["dtype"]
        peaks[dtype] = max(peaks.get(dtype, 0), row["peak_flops"])
    return peaks


def _mfu_convention(rows):
    peaks = ", ".join(f"{peak / 1e12:.4g} TFLOP/s in {dtype}" for dtype, peak in _peaks(rows).items())
    return f"MFU counts 6 N + 12 L C T a token, against {peaks} ({next(iter(rows))['peak_source']})."


def _ladder_notes(measured):
    base = measured.get(ladder.BASELINE)
    if not base:
        return
    losses = [row["final_loss"] for row in measured.values()]
    spread = max(losses) - min(losses)
    finite = all(map(math.isfinite, losses))
    agree = "they agree" if finite and spread < 0.01 * min(losses) else "**they DISAGREE**"
    yield f"Losses after {base['steps']} steps lie within {spread:.4f} of each other: {agree}."
    worst = ", ".join(f"{name}: {max(row['errors'].values()):.0e}" for name, row in measured.items())
    yield f"Parity with float64 was passed before each time; largest errors: {worst}."
    yield "Per cent are `baseline / rung - 1`, as the article counts."
    yield _mfu_convention(measured.values())
    slowest, best = measured.get("manual, float32, eager"), measured.get(ladder.PADDED)
    if slowest and best:
        times = slowest["median_ms"] / best["median_ms"]
        yield f"`{ladder.PADDED}` is {times:.2f} times as fast as `manual, float32, eager`."
    if again := measured.get("manual, again"):
        drift = again["median_ms"] / base["median_ms"] - 1
        yield f"The baseline measured again at the end: {drift:+.1%} ms; that much the machine drifts."


def _sweep(rows):
    text, groups = [], {}
    for row in rows:
        groups.setdefault((row["part"], row.get("heads"), row.get("pass")), []).append(row)
    for (part, heads, way), group in groups.items():
        text += ["", f"## {f'attention alone, {heads}, {way}' if part == 'attention' else 'training, end to end'}", ""]
        kernels = list(dict.fromkeys(row["attention"] for row in group if row["status"] == "measured"))
        cells = {(row["T"], row["attention"]): row for row in group}
        lengths = sorted({row["T"] for row in group})
        shown = [T for T in lengths if T & (T - 1) == 0] or lengths  # the figures have them all
        unit = "ms (TFLOP/s)" if part == "attention" else "ms (tokens/s)"
        table = [[T, *(_cell(cells.get((T, name)), cells.get((T, "manual"))) for name in kernels)] for T in shown]
        text += _table(["tokens", *(f"{name}, {unit}, times manual" for name in kernels)], table)
        found = sweep.crossovers(group)
        if found:
            text += ["", *(_crossover(pair, T) for pair, T in found.items())]
    seen = {f"{r['attention']}: {_kernel(r, r.get('pass') != 'forward')}" for r in rows if r["status"] == "measured"}
    errors = [max(row["errors"].values()) for row in rows if "errors" in row]
    return [
        *text,
        "",
        f"Kernels seen, forward / backward: {'; '.join(sorted(seen))}. Every time follows a passed comparison with",
        f"float64; the largest error is {max(errors, default=0):.1e}. TFLOP/s counts the causal half: 2 B nh T² hs",
        "forward, 3.5 times that with the backward.",
    ]


def _cell(row, manual):
    if row is None or row["status"] != "measured":
        return row["status"] if row else ""
    rate = f"{row['tflops']:.2f}" if "tflops" in row else f"{row['tokens_per_s']:,.0f}"
    times = f", {manual['median_ms'] / row['median_ms']:.2f}x" if manual and manual["status"] == "measured" else ""
    return f"{row['median_ms']:.2f} ({rate}){times}"


def _crossover(pair, T):
    slower, faster = pair
    where = f"from T = {T} on" if T else "at every length"
    return f"- `{faster}` is faster than `{slower}` {where}."


def _prefill(rows):
    table = []
    eager = {
        (row["model"], row["T"]): row for row in rows if row["attention"] == "eager" and row["status"] == "measured"
    }
    for row in rows:
        if row["status"] != "measured":
            table.append([row["model"], row["T"], row["attention"], row["status"], *[""] * 6])
            continue
        base = eager.get((row["model"], row["T"]))
        times = f"{base['median_ms'] / row['median_ms']:.2f}x" if base else ""
        share = f"{row['logits_differ']:.1e}" if row.get("logits_differ") is not None else ""
        n = row["parameters"]
        size = f"{n / 1e9:.2f} B" if n >= 1e9 else f"{n / 1e6:.0f} M"
        what = f"{row['model']} ({size})", row["T"], row["attention"]
        memory, kernel = f"{row['peak_memory'] / GIB:.2f} GiB", "+".join(row["kernel"]["forward"])
        table.append([*what, _spread(row), times, f"{row['tflops']:.3g}", memory, kernel, row["logits"], share])
    names = ["model", "tokens", "attention", "ms to the first token, median (p10-p90)", "times eager", "TFLOP/s"]
    table = _table([*names, "peak memory", "kernel seen", "logits for", "logits differ from eager's by"], table)
    return [*table, "", "TFLOP/s counts two operations a weight and token, without the embedding and the output layer."]


def _numerics(rows):
    errors = [row for row in rows if "path" in row]
    text = []
    for inputs in dict.fromkeys(row["inputs"] for row in errors):
        group = [row for row in errors if row["inputs"] == inputs]
        dtypes = list(dict.fromkeys(row["dtype"] for row in group))
        times = f"q and k are normal, times {numerics.INPUTS[inputs]:g}"
        text += ["", f"## {inputs} inputs ({times}): largest error against float64, y / worst of dq, dk, dv", ""]
        cells = {(row["path"], row["dtype"]): _errors(row) for row in group}
        paths = list(dict.fromkeys(row["path"] for row in group))
        text += _table(
            ["path", *dtypes], [[path, *(cells.get((path, dtype), "") for dtype in dtypes)] for path in paths]
        )
    claim = ("allclose", "claimed", "reproduced")
    timed = [row for row in errors if "median_ms" in row]
    text += ["", "## time and memory, ordinary inputs", ""]
    table = [
        [row["path"], row["dtype"], _spread(row, 3), f"{row['tflops']:.3g}", f"{row['peak_memory'] / 2**20:.1f}"]
        for row in timed
    ]
    text += _table(["path", "dtype", "ms, median (p10-p90)", "TFLOP/s, causal half", "peak MiB"], table)
    pairs = [
        [row["pair"], row["dtype"], *(_yes(row[name]) for name in claim), f"{row['largest_difference']:.1e}"]
        for row in rows
        if "pair" in row and row["status"] == "measured"
    ]
    text += ["", "## allclose, as the article's appendix A claims", ""]
    return text + _table(["pair", "dtype", "allclose", "the article", "reproduced", "largest difference"], pairs)


def _yes(value):
    return "yes" if value else "no"


def _errors(row):
    if row["status"] != "measured":
        return row["status"]
    if row["overflows"]:
        return "**overflows**"
    gradients = [error for name, error in row["errors"].items() if name != "y"]
    return (
        f"{row['errors']['y']:.1e} / {max(gradients):.1e}" if gradients else f"{row['errors']['y']:.1e} / no backward"
    )


def _max_batch(rows):
    table = []
    for row in rows:
        if "largest" not in row:
            table.append([row["attention"], row["status"], *[""] * 7])
            continue
        guess = row["estimate"]["fixed"] + row["largest"] * row["estimate"]["each"]
        peak = row["peak_memory"] - row["held_by_pytorch"]
        last = f"{row['curve'][-1][1]:.4f} after {row['curve'][-1][0]:.0f} s" if row.get("curve") else ""
        sizes = row["attention"], row["largest"], row["estimate"]["largest"]
        memory, rate = (f"{guess / GIB:.2f} GiB", f"{peak / GIB:.2f} GiB"), f"{row['tokens_per_s']:,.0f}"
        mfu = row["mfu"] * row["peak_flops"] / _peaks(r for r in rows if "largest" in r)[row["ran"]["dtype"]]
        table.append([*sizes, *memory, _spread(row, 0), rate, f"{100 * mfu:.1f} %", last])
    names = ["attention", "largest batch", "by the estimate", "eager estimate at the largest", "measured peak"]
    text = _table([*names, "ms a step there", "tokens/s", "MFU", "validation loss"], table)
    measured = [row for row in rows if "largest" in row]
    if measured:
        room = f"{measured[0]['memory'] / GIB:.1f} GiB for a run, beside what PyTorch itself holds."
        text += ["", f"Memory: {room} {_mfu_convention(measured)}"]
        text += ["Seconds are those of training steps, without evaluations and compilation."]
    return text


SECTIONS = {
    "ladder": _ladder,
    "sweep": _sweep,
    "prefill": _prefill,
    "numerics": _numerics,
    "max_batch": _max_batch,
}


if __name__ == "__main__":
    with one_sentence():
        if len(sys.argv) < 2:
            raise UserError("name the folder of a benchmark: python -m parts.bench.report FOLDER [FOLDER ...]")
        for folder in sys.argv[1:]:
            print(f"wrote {', '.join(map(str, write(folder)))}")
