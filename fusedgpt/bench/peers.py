"""Our GPT beside others, in turn: transformers' GPT-2 and Llama, ours held to nanoGPT's arithmetic, and nanoGPT.

There are four parts: a training step, greedy generation, a training step of a Llama with the FLOPs of that GPT-2 (and
of our GPT-2 again, in the same rounds), and nanoGPT's recipe for cheap computers. A row is one visit to a contender in
a process of its own. The visits go round (A B C, A B C). A round counts for all contenders or for none, and ratios are
taken within rounds. On a CPU every contender keeps the memory that it frees, as train.py does.
"""

import dataclasses
import pathlib
import textwrap
from collections.abc import Iterator

import torch

from fusedgpt.bench import check, child, contenders, drawing, options, recipe, report, rounds, visit
from fusedgpt.bench.disturbance import comparable, speedup
from fusedgpt.errors import UserError
from fusedgpt.machine.device import cpu_multiplies_bfloat16
from fusedgpt.machine.timing import summary

TRAINS = True
UNUSED = {
    **child.UNUSED,
    "profile": "peers writes no trace; bench.py ladder does",
    "gradient_accumulation_steps": "a step is one micro-batch",
    "activation": "each contender has the form of GELU of its project",
    "optimizer": "every contender trains with AdamW",
    "mask": "every contender has attention over the whole window",
    "loss": "every contender computes all logits at once",
    "recompute": "every contender keeps all that its backward needs",
    **dict.fromkeys(("dropout", "grad_clip"), "every contender trains without dropout and clips gradients to 1"),
    **dict.fromkeys(("eval_iters", "keep_checkpoints", "check_interval", "timeout"), "contenders only make steps"),
    **dict.fromkeys(("max_bad_steps", "deterministic"), "contenders only make steps"),
    **dict.fromkeys(("decay_lr", "schedule", "warmup_iters"), "the learning rate is constant"),
    **dict.fromkeys(("lr_decay_iters", "min_lr"), "the learning rate is constant"),
}
GROUP = ("part", "round")
PROGRAMS = dict.fromkeys(("recipe", "command"), ("ours", "nanoGPT"))  # parts in which whole programs run
COLORS = dict(zip(("ours", "Hugging Face", "nanoGPT"), drawing.FILLS))  # by project
# {part: (its name in a sentence, what is timed, a phrase with the number of tokens or the model)}
TITLES = {
    "training": ("A training step", "ms per training step", ""),
    "generation": ("Generation", "ms per sample", " of {new_tokens} tokens after {prompt_tokens}"),
    "llama": ("A training step of a Llama", "ms per training step", ""),
    "recipe": ("An iteration of nanoGPT's recipe", "ms per iteration", recipe.CASE),
    "command": ("A whole command", "ms from start to end", f" (ours: {recipe.OURS.stem}; nanoGPT: its recipe)"),
}
# columns that only some parts have
RAN = "kernel seen forward / backward (as it ran)"
PEAK = "peak memory"  # not of contenders on a CPU: a process there keeps what the proof before the steps freed
FIRST_TOKENS = ("first token, ms", "share of the bandwidth", "first ids equal to ours in float32")
COLUMNS = {
    "training": (PEAK, "loss at the first step", "after the last", RAN),
    "generation": (*FIRST_TOKENS, PEAK, "as it ran"),
    "llama": (PEAK, "loss at the first step", "after the last", RAN, "GFLOP a token", "TFLOP/s"),
    "recipe": ("validation loss", "whole run, s", PEAK, "as it ran"),
    "command": ("validation loss", "CPU time, s", PEAK, "as it ran"),
}


@dataclasses.dataclass
class Settings(options.Trained):
    nanogpt: str = ""  # folder of a clone of nanoGPT, to measure its model.py and train.py too; empty: leave it out
    rounds: int = 3  # visits to each contender
    prompt_tokens: int = 32  # tokens of the prompt, in generation
    new_tokens: int = 128  # tokens generated after the prompt
    repeats: int = 3  # timed samples of each visit, in generation
    iterations: int = 500  # iterations of each visit, in nanoGPT's recipe (which has 2000)


def defaults(gpu: bool) -> dict:
    """GPT-2 124M: at 12 x 1024 on a GPU, at 1 x 1024 on a CPU."""
    return {"dataset": "python_stdlib", "vocab_size": 50257} | ({"steps": 105} if gpu else {"batch_size": 1})


def plan(s: Settings, device: torch.device) -> list[dict]:
    """The visits, round by round: {'part', 'peer', 'round'}.

    Raises UserError if --nanogpt names no clone, or if generation needs more than block_size tokens.
    """
    for name in ("model.py", "train.py"):
        if s.nanogpt and not pathlib.Path(s.nanogpt, name).is_file():
            raise UserError(f"nanogpt={s.nanogpt!r} has no {name}: name the folder of a clone of nanoGPT")
    if min(s.prompt_tokens, s.new_tokens) < 2 or s.prompt_tokens + s.new_tokens > s.block_size:
        raise UserError(
            f"prompt_tokens={s.prompt_tokens} and new_tokens={s.new_tokens} must be 2 or more, and together at most"
            f" block_size={s.block_size}"
        )
    compiled = s.compile is True or (s.compile == "auto" and device.type == "cuda")
    left_out = ["ours, compiled" if compiled else "ours, eager"]  # `ours` is the same
    if device.type == "cpu" and not cpu_multiplies_bfloat16():
        # without instructions for bfloat16, these contenders take 46 s if others take 10 s
        left_out += [peer for peer in contenders.GENERATION if peer.startswith("Hugging Face") and "16" in peer]
    parts = {name: [peer for peer in peers if peer not in left_out] for name, peers in contenders.PARTS.items()}
    parts |= PROGRAMS
    return [
        {"part": part, "peer": peer, "round": n}
        for n in range(1, s.rounds + 1)
        for part, peers in parts.items()
        for peer in peers
        if s.nanogpt or not (part in PROGRAMS or "nanoGPT" in peer)
    ]


def measure(spec: dict, s: Settings, device: torch.device, folder: pathlib.Path) -> dict:
    """The samples of one visit. A visit first compares its loss with ours; a whole program does not."""
    if spec["part"] in PROGRAMS:
        visited = recipe.run if spec["part"] == "recipe" else recipe.command
        return visited(spec["peer"], s, folder / "runs")
    return visit.run(spec["part"], spec["peer"], s, device)


def pooled(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """{part: {peer: one row for its visits}}, in the order of the contenders (rounds.pooled)."""
    parts, found = contenders.PARTS | PROGRAMS, {}
    for part, peers in parts.items():
        by_peer = rounds.pooled([row for row in rows if row["part"] == part], by="peer")
        if by_peer:
            found[part] = {peer: by_peer[peer] for peer in peers if peer in by_peer}
    return found


def finding(part: str, peers: dict[str, dict]) -> str:
    """A part's finding: how the fastest contender of each other project stands beside ours.

    It is a sentence without a full stop.
    """
    ours, fastest = peers.get("ours"), {}
    for peer, row in peers.items():
        project, times = peer.split(",")[0], speedup(ours, row)
        if project != "ours" and times:
            fastest[project] = min((times, row["peer"]), fastest.get(project, (times, row["peer"])))
    if not fastest:
        return f"{TITLES[part][0]}: no undisturbed comparison"
    said = [f"{project} {report.clause([(peers[peer], ours)], 'ours')}" for project, (_, peer) in fastest.items()]
    return f"{TITLES[part][0]}: {', '.join([said[0], *(each.removesuffix(' as ours') for each in said[1:])])}"


def _range(times):
    return "{:.2f} ({:.2f} to {:.2f})".format(*times)


def table(rows: list[dict]) -> list[str]:
    """A table for each part, with a line for each contender, and what was the same for all."""
    lines = []
    for part, peers in pooled(rows).items():
        names = ["who", f"{TITLES[part][1]}, median (p10-p90)", "median of each round"]
        names += ["time, ours = 1: mean (range) of the rounds", "tokens/s", *COLUMNS[part]]
        if part not in PROGRAMS and any(row.get("ran", {}).get("device") == "cpu" for row in peers.values()):
            names.remove(PEAK)
        cells = [_cells(part, peer, row, peers.get("ours"), names) for peer, row in peers.items()]
        lines += [f"## {part}", "", *report.markdown(names, cells), ""]
        notes = [*_notes(part, peers), *rounds.calls(row for row in rows if row["part"] == part)]
        lines += [*(f"- {note}" for note in notes), ""]
    return lines[:-1]


def _cells(part, peer, row, ours, names):
    if row["status"] != "measured":
        return [peer, f"{row['status']}: {row['reason']}", *[""] * (len(names) - 2)]
    times, ran = speedup(ours, row), row["ran"]
    memory = [f"{row['peak_memory'] / report.GIB:.2f} GiB" if "peak_memory" in row else ""] * (PEAK in names)
    how = [ran["attention"], *_dtypes(row), report.compiled(row)]
    if "rows_of_embedding" in ran:
        how.append(f"{ran['rows_of_embedding']} ids")
    if ran.get("commit"):
        how.append(f"commit {ran['commit']}")
    cells = [peer, report.spread(row), rounds.medians(row), _range(times) if times and row is not ours else ""]
    cells += [f"{1e3 * row['tokens'] / row['median_ms']:,.0f}"]
    if part in contenders.STEPS:
        optimizer = "fused AdamW" if ran["fused"] else "AdamW"
        cells += [*memory, f"{row['first_loss']:.4f}", f"{row['last_loss']:.4f}"]
        cells += [f"{report.kernel(row)} ({', '.join([*how, optimizer])})"]
        if part == "llama":
            flops = ran["flops_per_token"]
            cells += [f"{flops / 1e9:.4g}", f"{flops * row['tokens'] / row['median_ms'] / 1e9:.3g}"]
        return cells
    if part == "generation":
        first = summary(row["first_token_ms"])["median_ms"]
        equal = f"{row['equal_ids']} of {row['tokens']}"
        return [*cells, f"{first:.1f}", _share(row, first), equal, *memory, ", ".join(how)]
    took = row["cpu_seconds" if part == "command" else "seconds"]
    return [*cells, f"{row['val_loss']:.4f}", f"{took:.0f}", *memory, ", ".join(how)]


def _dtypes(row):
    """The dtypes of a measured row, or TF32: the prompt's, and that of the tokens after it if it differs."""
    after = row["ran"].get("decodes_in", row["ran"]["dtype"])
    both = (row, {"ran": row["ran"] | {"dtype": after}})
    return list(dict.fromkeys(map(report.precision, both)))


def _share(row, first):
    """The share of the memory's bandwidth that reading the weights takes while tokens are decoded, in per cent.

    It is empty if the rounds decoded in different dtypes.
    """
    ran = row["ran"]
    if not hasattr(torch, ran["decodes_in"]):
        return ""
    looked_up = ran.get("looked_up", ran.get("positions"))  # earlier rows, whose embeddings were tied, have positions
    read = (ran["parameters"] - looked_up) * getattr(torch, ran["decodes_in"]).itemsize
    return f"{100 * read * (row['tokens'] - 1) / (row['median_ms'] - first) * 1e3 / row['bandwidth']:.0f} %"


def _notes(part, peers):
    """Notes on a part: what was the same for all contenders, and what was not."""
    measured = [row for row in peers.values() if row["status"] == "measured"]
    if not measured:
        return []
    if part == "command":
        ours = f"`ours` is `train.py config/{recipe.OURS.name}`, `nanoGPT` its recipe for cheap computers."
        return [ours, "The CPU time is that of all threads. Validation losses are over different windows."]
    if part == "recipe":
        same = peers.get("ours", {}).get("ran", {}).get("activation") == "gelu"
        found = [f"Two programs, each as it is, with the same flags and data{' and the exact GELU' if same else ''}."]
        return [*found, "Validation losses are over different windows."]
    found = []
    if any(row["dropped"] for row in measured):
        found.append("A round in brackets is dropped for all contenders: something in it was disturbed.")
    worst = max(row["errors"]["float32"] for row in measured)
    proved = "before its time each computed our loss in float32: largest difference"
    found.append(f"All start from the same weights, and {proved} {worst:.0e}.")
    if part == "llama":
        return found + _notes_on_llamas(peers)
    if any(peer.startswith("Hugging Face") for peer in peers):
        biases = "always has biases, which start at 0; the others have them with `--bias=True` only."
        found.append(f"`Hugging Face` {biases}")
    if part == "generation":
        if any(peer.endswith(", compiled") for peer in peers):
            static = "has a cache of a fixed size and a compiled decode step, as it advises."
            found.append(f"`Hugging Face, …, compiled` {static}")
        share = "A token reads every weight once: bytes of weights a second, after the first token, as a share of what"
        share += " PyTorch reads of memory a second, measured in the same process."
        return [*found, "Greedy, one sample. nanoGPT has no KV cache.", share]
    fewest = min(row["ran"]["ids"] for row in measured)
    losses = [row["last_loss"] for row in measured if row["ran"]["ids"] == fewest]
    within = f"losses after the last lie within {max(losses) - min(losses):.4f} of each other"
    exact = "has nanoGPT's arithmetic: float32, exact GELU, no padding, no compilation, its AdamW."
    others = "The other rows of `ours` step as `train.py` does: the gradient is clipped within the fused AdamW, and on"
    found += [
        f"Every step has the same batch; {within}, if their softmax goes over the same ids.",
        f"`ours, float32` {exact}",
        f"{others} a CPU its norm is added up in parts.",
    ]
    if "nanoGPT, patched" in peers:
        patched = "autocast, padding, torch.compile and fused AdamW around its own model.py, unchanged"
        found.append(f"`nanoGPT, patched`: {patched}. It does not tell padding from other ids.")
    return found


def _notes_on_llamas(peers):
    found = ["FLOPs of all by one rule: 6 for each weight that multiplies a token, and 12 L nh hs T for attention."]
    ours, gpt2 = peers.get("ours"), peers.get("ours, GPT-2")
    if said := report.clause([(ours, gpt2)], "our GPT-2"):
        flops = ours["ran"]["flops_per_token"] / gpt2["ran"]["flops_per_token"]
        found.append(f"Our Llama has {flops:.3f} times the FLOPs of our GPT-2, and {said}.")
    return [*found, "`eager attention` is transformers' hand-written attention."]


def claims(rows: list[dict]) -> list[check.Claim]:
    """Each contender's speed over ours; refusals."""
    found = []
    for part, peers in pooled(rows).items():
        for peer, row in peers.items():
            both = [r for name in ("ours", peer) for r in rows if (r["part"], r["peer"]) == (part, name)]
            for claim in check.ratio(f"{part}, {peer}: speed over ours", row, peers.get("ours")):
                found.append(dataclasses.replace(claim, rows=list(filter(comparable, both))))
    return found + check.refusals(rows)


def figures(rows: list[dict], s: dict) -> Iterator[tuple]:
    """peers.png: a panel for each part, titled with its finding; a bar for each contender, hollow if disturbed."""
    parts, left_out, findings = {}, "", []  # findings without a ratio come last
    for part, peers in pooled(rows).items():
        left_out += drawing.left_out(peers.values())
        measured = {peer: row for peer, row in peers.items() if row["status"] == "measured"}
        parts |= {part: measured} if measured else {}
        findings.append(finding(part, peers))
    if not parts:
        return
    heights = [len(peers) + 0.25 for peers in parts.values()]
    options = dict(nrows=len(parts), squeeze=False, gridspec_kw={"height_ratios": heights})
    figure, grid = drawing.new(0.36 * sum(heights) + 0.8 * len(parts), **options)
    for axes, (part, peers) in zip(grid[:, 0], parts.items()):
        colors = [COLORS[peer.split(",")[0]] for peer in peers]
        said = [report.time(row, peers.get("ours")) for row in peers.values()]
        drawing.times(axes, {_label(*each): each[1] for each in peers.items()}, said, colors)
        axes.set_title(TITLES[part][0], loc="left", weight="bold")
        what = TITLES[part][1] + TITLES[part][2].format(**s)
        axes.set_xlabel(textwrap.fill(f"{what}: median, p10 to p90 (less is better)", 75))
    subject = f"Training of {child.subject(s)}; times beside ours.{left_out}"
    yield "peers", ". ".join(sorted(findings, key=lambda text: "undisturbed" in text)), subject, figure


def _label(peer, row):
    """A contender's name, with its dtypes if the name has none."""
    dtypes = " / ".join(_dtypes(row))
    return peer if dtypes in peer else f"{peer}, {dtypes}"
