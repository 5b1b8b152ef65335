"""Figures of a benchmark, from its rows alone. Lines differ in marks and bars in hatching: they read in grey."""

MARKS = {"manual": "o", "math": "s", "efficient": "^", "flash": "D", "cudnn": "v", "flex": "P", "eager": "o"}
HATCHES = ("", "///", "...", "xx", "\\\\")
GREYS = ("0.35", "0.75", "0.55", "0.9", "0.65")


def draw(kind, rows, folder):
    """Draw the figures of `kind` into `folder`; their paths."""
    import matplotlib

    matplotlib.use("agg")
    measured = [row for row in rows if row["status"] == "measured"]
    paths = []
    for name, figure in FIGURES[kind](measured):
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def _new(**options):
    from matplotlib import pyplot as plt

    plt.close("all")
    return plt.subplots(layout="constrained", **options)


def _ladder(rows):
    if not rows:
        return
    figure, axes = _new(figsize=(7.5, 0.45 * len(rows) + 1.2))
    names, medians = [row["rung"] for row in rows], [row["median_ms"] for row in rows]
    spread = [[row["median_ms"] - row["p10_ms"] for row in rows], [row["p90_ms"] - row["median_ms"] for row in rows]]
    axes.barh(names, medians, xerr=spread, color="C0", ecolor="0.3", capsize=2, height=0.65)
    for n, row in enumerate(rows):
        axes.text(row["p90_ms"] + 0.01 * max(medians), n, f"{row['median_ms']:.4g}", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(
        xlabel="ms a training step: median, p10 to p90 (less is better)",
        xlim=(0, 1.15 * max(r["p90_ms"] for r in rows)),
    )
    yield "ladder", figure


def _lines(axes, rows, value):
    for name in dict.fromkeys(row["attention"] for row in rows):
        points = sorted((row["T"], value(row)) for row in rows if row["attention"] == name and value(row) is not None)
        marks = dict(marker=MARKS.get(name, "x"), markersize=4, markevery=max(1, len(points) // 12))
        if points:
            axes.plot(*zip(*points), label=name, **marks)
    lengths = sorted({row["T"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks([T for T in lengths if T & (T - 1) == 0] or lengths)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.grid(alpha=0.3)


def _sweep(rows):
    alone = [row for row in rows if row["part"] == "attention"]
    groups = list(dict.fromkeys((row["heads"], row["pass"]) for row in alone))
    for name, label, value in (
        ("speedup", "times as fast as manual", lambda r, m: m["median_ms"] / r["median_ms"]),
        ("memory", "MiB held above the inputs", lambda r, m: r["peak_memory"] / 2**20 or None),
    ):
        if not groups:
            break
        across = min(2, len(groups))
        down = -(-len(groups) // across)
        figure, grid = _new(nrows=down, ncols=across, figsize=(5 * across, 3.3 * down), squeeze=False)
        for axes, (heads, way) in zip(grid.flat, groups):
            group = [row for row in alone if (row["heads"], row["pass"]) == (heads, way)]
            manual = {row["T"]: row for row in group if row["attention"] == "manual"}
            _lines(axes, [r for r in group if r["T"] in manual], lambda r, m=manual, v=value: v(r, m[r["T"]]))
            axes.set(title=f"{heads.replace('x', ' heads × ')}, {way}", xlabel="tokens", ylabel=label)
            if name == "memory":
                axes.set_yscale("log")
            axes.legend(frameon=False, fontsize=8)
        yield name, figure
    whole = [row for row in rows if row["part"] == "training"]
    if whole:
        figure, axes = _new(figsize=(5.5, 3.6))
        _lines(axes, whole, lambda row: row["tokens_per_s"])
        axes.set(xlabel="tokens in a sequence", ylabel="tokens/s, training end to end", ylim=(0, None))
        axes.legend(frameon=False)
        yield "training", figure


def _prefill(rows):
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        return
    figure, grid = _new(ncols=len(models), figsize=(2.9 * len(models) + 0.6, 3.4), squeeze=False)
    for axes, model in zip(grid.flat, models):
        group = [row for row in rows if row["model"] == model]
        kinds, lengths = (list(dict.fromkeys(row[key] for row in group)) for key in ("attention", "T"))
        width = 0.8 / len(kinds)
        for n, kind in enumerate(kinds):
            bars = [row for row in group if row["attention"] == kind]
            at = [lengths.index(row["T"]) + (n - (len(kinds) - 1) / 2) * width for row in bars]
            look = dict(color=GREYS[n], edgecolor="black", hatch=HATCHES[n], linewidth=0.6)
            axes.bar(at, [row["median_ms"] for row in bars], width, label=kind, **look)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set(title=model, xlabel="tokens of prompt")
    grid[0, 0].set_ylabel("ms to the first token, median")
    grid[0, 0].legend(frameon=False)
    yield "prefill", figure


def _numerics(rows):
    rows = [row for row in rows if "path" in row]
    kinds = list(dict.fromkeys(row["inputs"] for row in rows))
    if not kinds:
        return
    figure, grid = _new(ncols=len(kinds), figsize=(4.6 * len(kinds), 3.6), squeeze=False, sharey=True)
    for axes, inputs in zip(grid.flat, kinds):
        group = [row for row in rows if row["inputs"] == inputs]
        paths = list(dict.fromkeys(row["path"] for row in group))
        for dtype, mark in (("bfloat16", "s"), ("float16", "D"), ("float32", "o")):
            found = [(row["path"], row["errors"]["y"]) for row in group if row["dtype"] == dtype]
            finite = [(paths.index(path), error) for path, error in found if error < float("inf")]
            axes.plot(*zip(*finite) if finite else ([], []), mark, label=dtype, markersize=6)
            lost = [paths.index(path) for path, error in found if error == float("inf")]
            axes.plot(lost, [1.0] * len(lost), "kx", markersize=9, label=f"{dtype}: overflows" if lost else None)
        axes.set_xticks(range(len(paths)), paths, rotation=30, ha="right")
        axes.set(title=f"{inputs} inputs", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    grid[0, 0].set_ylabel("largest error of the output\nagainst float64, as a share")
    yield "errors", figure


def _max_batch(rows):
    if not rows:
        return
    figure, axes = _new(figsize=(5.2, 3.4))
    names = [row["attention"] for row in rows]
    for n, (label, values) in enumerate(
        {"measured": [r["largest"] for r in rows], "estimated": [r["estimate"]["largest"] for r in rows]}.items()
    ):
        look = dict(color=GREYS[n], edgecolor="black", hatch=HATCHES[n], linewidth=0.6)
        bars = axes.bar([i + (n - 0.5) * 0.38 for i in range(len(names))], values, 0.38, label=label, **look)
        axes.bar_label(bars, fontsize=8)
    axes.set_xticks(range(len(names)), names)
    axes.set(xlabel="attention", ylabel="largest micro-batch (sequences)")
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    yield "largest", figure
    curves = [row for row in rows if row.get("curve")]
    if curves:
        figure, axes = _new(figsize=(5.6, 3.6))
        for row in curves:
            name = row["attention"]
            label = f"{name}, batch {row['largest']}"
            axes.plot(*zip(*row["curve"]), marker=MARKS.get(name, "x"), markersize=4, label=label)
        axes.set(xlabel="seconds of training", ylabel="validation loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        yield "curves", figure


FIGURES = {
    "ladder": _ladder,
    "sweep": _sweep,
    "prefill": _prefill,
    "numerics": _numerics,
    "max_batch": _max_batch,
}
