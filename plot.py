"""Draw one run, or several together: loss, learning rate, gradient norm, tokens per second, memory.

    python plot.py RUN [RUN ...] [--y=NAME] [--x=NAME] [--out=PATH] [--html]
    python plot.py RUN --attention=TEXT [--out=PATH]

RUN is the folder of a run; --out_dir=RUN names one too. Training is a line, pale if it is a loss; validation has marks.

--y=NAME    draw only this: loss, bits_per_byte, lr, grad_norm, tokens_per_s, memory, or what your train_step adds
--x=NAME    against iterations (the default), tokens, or time: the time of the training steps, without evaluations
--out=PATH  write the figure here, as PNG, PDF or SVG. The default for one run is RUN/NAME.png with --y=NAME, otherwise
            RUN/curves.png with all panels and RUN/loss.png with the loss. The default for several runs is one figure
            in the current folder, named after the runs
--html      write a page in place of a figure: several runs side by side, with their settings, receipts and samples, or
            for one run its report.html anew
--attention=TEXT    draw what each head of the run's model attends to in this text, into RUN/attention.png

Runs with different tokenizers are drawn in bits per byte, because their losses per token cannot be compared.
"""

import collections
import hashlib
import math
import os
import pathlib
import re
import sys
import textwrap

import numpy as np

from configurator import separate
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.home import as_called
from fusedgpt.machine.files import atomic
from fusedgpt.runs import report_page
from fusedgpt.runs.metrics import MEANING, OVERFITS, LoggedRun, above, losses_in, names_of, view
from fusedgpt.runs.style import AXES, COLOURS, DPI, MARKERS, SUFFIXES, WIDTH, label_x, plain, time_unit, title

SKIPPED = 8  # the first queries of a map, which see so few keys that each gets much; of a short text its first half
MARGIN = 0.25  # a distance is named if a head prefers it by more than this share of its attention
MAPS = f"""Each row is a token that looks back, each column one that it sees; darker is more. A distance is named
if it gets {MARGIN:.0%} of a row more than if all tokens of the row got the same, on average without the first rows."""
LONGEST_NAME = 100  # bytes of a figure's file name that its runs take at most; file systems allow 255 in all


def finding(runs: list[LoggedRun], y: str) -> str:
    """The title of a figure of `y`: which loss the runs reached; of what is no loss, what it is."""
    if y not in ("loss", "bits_per_byte"):
        return f"{(what := MEANING.get(y, y))[0].upper()}{what[1:]}: {', '.join(names_of(runs))}"
    if len(runs) > 1:
        return report_page.headline(runs, y).removesuffix(".")
    ((_, validation),) = (run.lines(y) for run in runs)
    what = "Validation loss" if y == "loss" else "Bits per byte"
    if not len(validation.values):
        return f"{what}: {runs[0].name} has not been evaluated"
    last, after = validation.values[-1], f"after {validation.iters[-1]:,.0f} iterations"
    said = f"{what} {last:.3f} {after}" if math.isfinite(last) else f"{what} not finite {after}"
    lowest = np.nanmin(validation.values, initial=math.inf)
    return said + f", the lowest {lowest:.3f}" * bool(last > (1 + OVERFITS) * lowest)


def captions(runs: list[LoggedRun]) -> list[str]:
    """What a reader needs to judge a figure of each run; one text if it is the same for all."""
    texts = [report_page.about(run) for run in runs]
    if len(set(texts)) > 1:
        texts = [f"{name}: {text}" for name, text in zip(names_of(runs), texts)]
    return list(dict.fromkeys(texts))


def draw_panel(axes, runs: list[LoggedRun], y: str, x: str) -> None:
    """Draw `y` of all runs: training as a line, pale if it is a loss, and validation with marks."""
    unit, scale = time_unit(runs) if x == "time" else (x, 1)
    shown = []
    for n, (run, label) in enumerate(zip(runs, names_of(runs))):
        for line in run.lines(y):
            shown.append(line)
            at = run.position(line.iters, x) / scale
            name = plain(f"{' ' * label.startswith('_')}{label}: {line.name}") if len(runs) > 1 else line.name
            look = dict(color=COLOURS[n % len(COLOURS)], linewidth=0.9)
            if line.name == "validation":
                for last in line.values[-1:]:
                    name += f", at the end {last:.3f}" if math.isfinite(last) else ", at the end not finite"
                look |= dict(marker=MARKERS[n % len(MARKERS)], markersize=4, linewidth=1.2, zorder=3)
            elif y in ("loss", "bits_per_byte"):
                look |= dict(alpha=0.45)
            axes.plot(at, line.values, label=name, **look)
    label_x(axes, x, unit)
    axes.set_ylim(view(shown, y))
    axes.set_title(MEANING.get(y, y), fontsize=9, loc="left")
    if (top := above(shown, axes.get_ylim())) is not None:
        axes.set_title(f"▲ up to {top:.3g} above", fontsize=7.5, loc="right", color="0.35")
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)


def draw_legend(figure, axes, inside: bool) -> None:
    """Draw the legend of `axes`: inside them, or below all panels, for which the figure grows."""
    handles, names = axes.get_legend_handles_labels()
    if inside:
        axes.legend(handles, names, frameon=False, fontsize=8)
        return
    names = [textwrap.fill(name, 72) for name in names]
    lines = sum(name.count("\n") + 1 for name in names)
    figure.set_figheight(figure.get_figheight() + 0.17 * max(0, lines - 2))
    figure.legend(handles, names, frameon=False, fontsize=8, loc="outside lower center")


def draw(runs: list[LoggedRun], path: pathlib.Path, y: str | None = None, x: str = "iterations") -> None:
    """Draw `y` of the `runs` to the file `path`. `y` is a key of MEANING, one of a run's `others`, or None for all.

    A value that was not finite (null in metrics.jsonl) is a gap.
    """
    from matplotlib.figure import Figure

    main = losses_in(runs) if y in (None, "loss") else y
    others = sorted({name for run in runs for name in run.others})
    small = () if y else ("lr", "grad_norm", "tokens_per_s", "memory", *others)
    rows = [[main, main], *([*small[n : n + 2], "."][:2] for n in range(0, len(small), 2))]
    heights = [1.9] + [1] * (len(rows) - 1)
    size = (WIDTH, 4 if y else 3.5 + 1.85 * (len(rows) - 1))  # inches
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplot_mosaic(rows, height_ratios=heights)
    for name, axes in panels.items():
        draw_panel(axes, runs, name, x)
    draw_legend(figure, panels[main], inside=len(runs) == 1)
    title(figure, finding(runs, main), captions(runs))
    with atomic(path) as file:
        figure.savefig(file, format=pathlib.Path(path).suffix[1:], dpi=DPI)


def by_distance(weights: np.ndarray) -> np.ndarray:
    """What the key 0, 1, 2 ... tokens back gets of `weights` (..., T, T): means over queries, (T // 2 + 1, ...)."""
    T = weights.shape[-1]
    skipped, shares = min(SKIPPED, T // 2), []
    for back in range(T // 2 + 1):
        diagonal = np.diagonal(weights, -back, -2, -1)  # begins with query `back`
        shares.append(diagonal[..., max(0, skipped - back) :].mean(-1))
    return np.stack(shares)


def places(weights: np.ndarray) -> dict[tuple[int, int], tuple[str, str]]:
    """{(layer, head): which distance it prefers to attention to all keys alike, such as "1 back", and its share}."""
    sees, share, found = np.tri(weights.shape[-1]), by_distance(weights), {}
    preferred = by_distance(weights - sees / sees.sum(-1, keepdims=True))
    for head, back in np.ndenumerate(preferred.argmax(0)):
        found[head] = "no single distance", ""
        if preferred[(back, *head)] > MARGIN:
            found[head] = {0: "itself"}.get(back, f"{back} back"), f": {share[(back, *head)]:.0%}"
    return found


def draw_heads(weights: np.ndarray, subtitle: list[str]):
    """A matplotlib Figure of attention `weights` (n_layer, nh, T, T): a row of maps for each layer."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    n_layer, n_head = weights.shape[:2]
    side, found = max(WIDTH / 4, WIDTH / n_head), places(weights)
    figure = Figure((side * n_head, (side + 0.3) * n_layer), layout="constrained")
    panels = figure.subplots(n_layer, n_head, squeeze=False, subplot_kw=dict(xticks=[], yticks=[]))
    for (layer, head), (place, share) in found.items():
        axes = panels[layer, head]
        axes.imshow(weights[layer, head], cmap="Blues", norm=PowerNorm(0.5, 0, 1))  # so that a tenth is seen beside 1
        axes.set_title(f"layer {layer + 1}, head {head + 1}\n{place}{share}", fontsize=7.5)
    counts = collections.Counter(place for place, _ in found.values()).most_common()
    said = ", ".join(f"{place} ({count})" for place, count in counts)
    title(figure, f"{len(found)} heads look at: {said}", subtitle)
    return figure


def write_heads(run: LoggedRun, text: str, out: str | None) -> pathlib.Path:
    """Draw the attention of the run's best checkpoint in `text`, and return the figure's path.

    Raises UserError if there is no checkpoint, or if the text does not fit its vocabulary or its context.
    """
    import torch

    from fusedgpt.data import dataset, tokenizer
    from fusedgpt.runs import run_folder
    from model import GPT

    saved, _ = run_folder.load_best(run.folder)
    ids = tokenizer.Tokenizer(dataset.meta_of_checkpoint(saved)).encode(text)
    weights = GPT.from_checkpoint(saved).eval().attention_weights(torch.tensor([ids])).numpy()
    path = pathlib.Path(out or run.folder / "attention.png")
    with atomic(path) as file:
        draw_heads(weights, [repr(text), MAPS, *captions([run])]).savefig(file, format=path.suffix[1:], dpi=DPI)
    return path


def joined(runs: list[LoggedRun]) -> str:
    """The name of a file about several runs: their paths, because runs in two folders may have the same name."""
    paths = [os.path.relpath(run.folder).replace(f"..{os.sep}", "") for run in runs]
    names = [re.sub(r"[:/\\]+", "-", path).lstrip("-") for path in paths]
    name = "+".join(names)
    if len(os.fsencode(name)) <= LONGEST_NAME:
        return name
    return f"{len(runs)} runs {hashlib.sha256(os.fsencode(name)).hexdigest()[:8]}"  # other runs get another file


def targets(runs: list[LoggedRun], y: str | None, out: str | None) -> dict[pathlib.Path, str | None]:
    """{file of a figure: its `y`}."""
    if out:
        return {pathlib.Path(out): y}
    if len(runs) == 1:
        folder = runs[0].folder
        return {folder / f"{y}.png": y} if y else {folder / "curves.png": None, folder / "loss.png": "loss"}
    return {pathlib.Path(f"{joined(runs)}-{y or 'curves'}.png"): y}


def write_page(runs: list[LoggedRun], out: str | None) -> pathlib.Path:
    """Write the page of the runs, and return its path: report.html of one run, or a comparison of several."""
    if len(runs) == 1:
        return report_page.write(runs[0].folder)
    path = pathlib.Path(out or f"{joined(runs)}.html")
    report_page.compare(runs, path)
    return path


def arguments(args: list[str]) -> tuple[list[LoggedRun], dict[str, str]]:
    """The runs and the options on the command line. Raises UserError if one is invalid."""
    page = "--html" in args
    folders, flags = separate([arg for arg in args if arg != "--html"])
    pairs = [flag.removeprefix("--").partition("=")[::2] for flag in flags]
    named = [*folders, *(value for name, value in pairs if name == "out_dir")]
    runs, options = [LoggedRun(folder) for folder in named], {}
    allowed = {"y": (*MEANING, *(n for run in runs for n in run.others)), "x": AXES, "out": None, "attention": None}
    for name, value in pairs:
        if name not in (*allowed, "out_dir") or not value:
            there = "--y=NAME, --x=NAME, --out=PATH, --attention=TEXT, and --html alone"
            raise UserError(f"--{name} is unknown or has no value: there are {there}")
        if allowed.get(name) and value not in allowed[name]:
            raise UserError(f"--{name}={value} is unknown: it can be {', '.join(allowed[name])}")
        options[name] = value
    suffixes = (".html",) if page else SUFFIXES
    if "out" in options and pathlib.Path(options["out"]).suffix not in suffixes:
        raise UserError(f"--out={options['out']} must end in {', '.join(suffixes)}{' with --html' * page}")
    if page and ({"x", "y"} & options.keys() or (len(runs) == 1 and "out" in options)):
        raise UserError("--html takes no --x and no --y, and --out=PATH.html only for several runs: leave them out")
    if "attention" in options and (page or {"x", "y"} & options.keys() or len(runs) > 1):
        raise UserError("--attention takes one run, no --x, no --y and no --html: leave them out")
    if not runs:
        raise UserError("name the folder of a run: python plot.py RUN [RUN ...]")
    return runs, options | ({"html": "True"} if page else {})


if __name__ == "__main__":
    with one_sentence():
        if "-h" in sys.argv or "--help" in sys.argv:
            sys.exit(print(as_called(__doc__)))
        runs, options = arguments(sys.argv[1:])
        if "html" in options:
            sys.exit(print(f"wrote {write_page(runs, options.get('out'))}"))
        if "attention" in options:
            sys.exit(print(f"drew {write_heads(runs[0], options['attention'], options.get('out'))}"))
        for path, y in targets(runs, options.get("y"), options.get("out")).items():
            draw(runs, path, y, options.get("x", "iterations"))
            print(f"drew {path}")
