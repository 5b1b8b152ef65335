"""How far verdicts can be trusted: how often a study of equal variants finds a difference, and how often a real one.

    python tests/calibration.py [--real=True] [--name=value ...]

Writes rows.jsonl and calibration.png to --out_dir. Each row is about many studies of the same kind:

equal     no variant differs from the baseline. `share` of the studies find a difference; 5 % may
looks     the same, with a verdict at each of the planned looks
added     the same, where a variant is added after a verdict: `share` find a difference of a planned one
intervals half of the variants differ. `share` of the studies have only intervals that hold the true difference; 95 %
range     `share` of the printed ranges hold the smallest difference that the seeds really find in 80 %; 95 %
planted   one variant is better by `of_smallest` times the smallest difference that the verdict promises to find in 80 %
          of studies. `share` of the studies find it; `promised` is what the noncentral t distribution says
unpaired  what a t test finds that takes the runs of a `planted` row, but not as pairs
pairing   what shared seeds are worth: the standard error of the difference of two variants, paired and unpaired

`low` to `high` is the 95 % interval of a share. Simulated values are an effect of the seed, which a pair shares, and
noise. Real ones are losses of tiny GPTs, whose trainings share the initial weights of a seed. Equal ones differ in the
batches that they draw. A difference is subtracted from their losses, or comes from the learning rate.
"""

import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch
from scipy import stats

from configurator import configure
from fusedgpt import settings
from fusedgpt.bench import figures as drawing
from fusedgpt.data import dataset
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import one_sentence
from fusedgpt.machine import determinism, files
from fusedgpt.machine.environment import environment
from fusedgpt.parallel.distributed import gradient_norm
from fusedgpt.runs.style import COLOURS
from fusedgpt.studies import verdict
from fusedgpt.training.optimizer import build_optimizer, learning_rate, update_weights
from model import GPT, GPTConfig

Values = dict[str, dict[int, float]]  # {variant: {seed: value}}; the baseline is the first
CPU = torch.device("cpu")
COMMON, NOISE = 0.03, 0.01  # standard deviations of a seed's effect and of the noise
SPREAD = math.sqrt(2) * NOISE  # of a difference
SEEDS = 5  # of a study, unless a row is about their number
NOISES = {
    "normal": lambda rng, n: rng.normal(0, NOISE, n),
    "heavy tails": lambda rng, n: NOISE * rng.standard_t(2, n),  # of infinite variance: some runs end far from the rest
    "counts": lambda rng, n: rng.integers(2, size=n),  # such as the evaluation at which a loss is reached, this or next
}
# (seeds, comparisons, noise)
EQUAL = [(SEEDS, 1, "normal"), (SEEDS, 5, "normal"), (2, 1, "normal"), (2, 5, "normal"), (10, 1, "normal")]
EQUAL += [(SEEDS, 1, "heavy tails"), (SEEDS, 5, "heavy tails")]
EQUAL += [(seeds, comparisons, "counts") for seeds in (2, 3, SEEDS) for comparisons in (1, 5)]
LOOKS = [((5, 10), 1), ((5, 10), 5), ((5, 10, 15, 20), 1)]  # (looks, comparisons)
OF_SMALLEST = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
# a training takes a tenth of a second on one core
MODEL = dict(block_size=32, n_layer=1, n_head=2, n_embd=32, activation="gelu", bias=False)
HOW = settings.Settings(learning_rate=7e-3, warmup_iters=5, max_iters=30, lr_decay_iters=30, min_lr=0.0, batch_size=16)
WINDOWS = 64  # of the validation split
HIGHER = 1.1  # times the learning rate: a small step of a search
LONGER = {300: 60, 1000: 30}  # {iterations: pairs}, to see how much of what pairs share is left after longer trainings
# (rows, (colour, mark, label))
MARKS = [
    (dict(data="simulated", comparisons=1), (COLOURS[0], "o", "1 comparison")),
    (dict(data="simulated", comparisons=5), (COLOURS[1], "s", "5 comparisons")),
    (dict(data="real"), (COLOURS[2], "D", "real runs")),
]


@dataclasses.dataclass
class Settings:
    out_dir: str = "out-calibration"  # folder for rows.jsonl and calibration.png
    studies: int = 2000  # simulated studies for each row
    real: bool = False  # train too, on one core for some fifteen minutes
    real_studies: int = 200  # studies of real runs, of 5 seeds each
    dataset: str = "python_stdlib"  # data of the real runs: a folder in data/, or a path


def simulated(rng: np.random.Generator, seeds: int, comparisons: int, noise: str = "normal", gain: float = 0) -> Values:
    """A study with `comparisons` variants beside the baseline "0". Variant "1" is better than the others by `gain`."""
    common = np.zeros(seeds) if noise == "counts" else rng.normal(3, COMMON, seeds)
    samples = [common - gain * (i == 1) + NOISES[noise](rng, seeds) for i in range(1 + comparisons)]
    return {str(i): dict(enumerate(map(float, sample))) for i, sample in enumerate(samples)}


def share(found: Iterable[bool]) -> dict:
    """How many of the studies, their share, and its interval (Clopper and Pearson)."""
    found = list(found)
    low, high = stats.binomtest(sum(found), len(found)).proportion_ci()
    return dict(studies=len(found), share=sum(found) / len(found), low=float(low), high=float(high))


def compared(values: Values, **how) -> list[verdict.Comparison]:
    """The verdict on each variant but the first, which is the baseline."""
    (_, base), *others = ((name, np.array(list(each.values()))) for name, each in values.items())
    return verdict.compare({name: each - base for name, each in others}, largest=10.0, **how)


def differ(values: Values, **how) -> bool:
    """Whether a verdict on any planned variant is better or worse."""
    return any(c.word in ("better", "worse") and c.planned for c in compared(values, **how))


def first(values: Values, n: int) -> Values:
    """The first `n` seeds of a study."""
    return {name: {seed: each[seed] for seed in range(n)} for name, each in values.items()}


def equal(studies: int, seeds: int, comparisons: int, noise: str) -> dict:
    """The row of simulated studies whose variants are all equal."""
    rng = np.random.default_rng((seeds, comparisons))
    found = (differ(simulated(rng, seeds, comparisons, noise)) for _ in range(studies))
    return dict(what="equal", data="simulated", seeds=seeds, comparisons=comparisons, noise=noise) | share(found)


def at_looks(studies: int, looks: tuple[int, ...], comparisons: int) -> dict:
    """The row of simulated studies of equal variants that end as soon as a look finds a difference."""
    rng = np.random.default_rng((*looks, comparisons))
    drawn = (simulated(rng, looks[-1], comparisons) for _ in range(studies))
    found = (any(differ(first(values, n), looks=looks) for n in looks) for values in drawn)
    return dict(what="looks", data="simulated", looks=list(looks), comparisons=comparisons) | share(found)


def added(studies: int) -> dict:
    """The row of simulated studies of equal variants, to which a variant is added after the verdict on the first."""
    rng = np.random.default_rng(11)
    drawn = (simulated(rng, SEEDS, 2) for _ in range(studies))
    return dict(what="added", data="simulated") | share(differ(each, planned=frozenset("1")) for each in drawn)


def intervals(studies: int, comparisons: int) -> dict:
    """The row of simulated studies whose variants 1, 3, … are better by three standard errors of the mean."""
    rng, gain = np.random.default_rng(comparisons), 3 * SPREAD / math.sqrt(SEEDS)

    def hold():
        values = simulated(rng, SEEDS, comparisons)
        for name in list(values)[1::2]:
            values[name] = {seed: value - gain for seed, value in values[name].items()}
        return all(c.low <= -gain * (int(c.variant) % 2) <= c.high for c in compared(values))

    return dict(what="intervals", data="simulated", comparisons=comparisons) | share(hold() for _ in range(studies))


def ranges(studies: int, seeds: int) -> dict:
    """The row of the ranges that verdicts print for what their seeds find."""
    rng, true = np.random.default_rng(seeds), verdict.smallest(SPREAD, seeds)
    found = (compared(simulated(rng, seeds, 1))[0].found for _ in range(studies))
    return dict(what="range", data="simulated", seeds=seeds) | share(low <= true <= high for low, high in found)


def power(difference: float, spread: float, seeds: int, comparisons: int) -> float:
    """The share of studies that find a true difference, by the noncentral t distribution at Bonferroni's level."""
    beyond = stats.t.isf(verdict.LEVEL / comparisons / 2, seeds - 1)
    return float(stats.nct.sf(beyond, seeds - 1, difference / spread * math.sqrt(seeds)))


def planted(studies: int, comparisons: int, of_smallest: float) -> dict:
    """The row of simulated studies in which one variant is better by `of_smallest` times the smallest difference."""
    rng = np.random.default_rng((comparisons, round(100 * of_smallest)))
    gain = of_smallest * verdict.smallest(SPREAD, SEEDS, verdict.LEVEL / comparisons)
    drawn = (simulated(rng, SEEDS, comparisons, gain=gain) for _ in range(studies))
    found = (compared(values)[0].word == "better" for values in drawn)
    spec = dict(seeds=SEEDS, comparisons=comparisons, of_smallest=of_smallest)
    promised = power(gain, SPREAD, SEEDS, comparisons)
    return dict(what="planted", data="simulated") | spec | share(found) | dict(promised=promised)


class Trainer:
    """Trains tiny GPTs, all on the data of one folder."""

    def __init__(self, name: str):
        self.folder = dataset.find_folder(ROOT, name)
        self.meta = dataset.read_meta(self.folder)

    def loss(self, seed: int, stream: int = 0, times: float = 1, iterations: int = HOW.max_iters) -> float:
        """The validation loss after a training. seed, stream: that of the weights, and which of its batches.

        times: multiplies the learning rate.
        """
        rate = times * HOW.learning_rate
        s = dataclasses.replace(HOW, learning_rate=rate, max_iters=iterations, lr_decay_iters=iterations)
        determinism.seed(seed, "init")
        model = GPT(GPTConfig(**MODEL, vocab_size=self.meta["vocab_size"]))
        optimizer = build_optimizer(model, s, "cpu", torch.float32)
        loader = DataLoader(self.folder, self.meta, MODEL["block_size"], s.batch_size, 2 * seed + stream, CPU)
        for iteration, (x, y) in zip(range(iterations), loader.batches(0, range(1))):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(iteration, s)
            model(x, y, logits=False)[1].backward()
            update_weights(optimizer, gradient_norm(model), s.grad_clip)
            optimizer.zero_grad()
        with torch.no_grad():
            losses = [model(x, y, logits=False)[1].item() for x, y in loader.evaluation("val", WINDOWS)]
        return sum(losses) / len(losses)

    def losses(self, seeds: int, **how) -> np.ndarray:
        """The losses of as many runs."""
        return np.array([self.loss(seed, **how) for seed in range(seeds)])


def real_rows(s: Settings) -> Iterator[dict]:
    """The rows of real runs. Runs of a pair have the same initial weights."""
    trainer, seeds = Trainer(s.dataset), s.real_studies * SEEDS
    base, same, higher = (trainer.losses(seeds, **how) for how in ({}, dict(stream=1), dict(times=HIGHER)))
    spec = dict(data="real", seeds=SEEDS, comparisons=1)
    yield dict(what="equal") | spec | share(map(differ, studies(base, same)))
    spread = float((same - base).std(ddof=1))
    for of_smallest in OF_SMALLEST:
        gain = of_smallest * verdict.smallest(spread, SEEDS)
        yield planted_in_runs(base, same - gain, -gain, spread, spec)
    spread, difference = float((higher - base).std(ddof=1)), float((higher - base).mean())
    spec |= dict(differs="learning rate")
    yield planted_in_runs(base, higher, difference, spread, spec)
    yield unpaired(base, higher, spec)
    yield pairing(base, same, HOW.max_iters, "other batches")
    yield pairing(base, higher, HOW.max_iters, "learning rate")
    for iterations, pairs in LONGER.items():
        both = (trainer.losses(pairs, times=times, iterations=iterations) for times in (1, HIGHER))
        yield pairing(*both, iterations, "learning rate")


def planted_in_runs(base: np.ndarray, other: np.ndarray, difference: float, spread: float, spec: dict) -> dict:
    """The row of studies of real runs that differ by `difference` on average, with standard deviation `spread`."""
    word = "better" if difference < 0 else "worse"
    found = (compared(each)[0].word == word for each in studies(base, other))
    spec = spec | dict(of_smallest=abs(difference) / verdict.smallest(spread, SEEDS), difference=difference)
    promised = power(abs(difference), spread, SEEDS, 1)
    return dict(what="planted") | spec | share(found) | dict(promised=promised)


def unpaired(base: np.ndarray, other: np.ndarray, spec: dict) -> dict:
    """The row of a t test that takes the same runs, but not as pairs."""
    p = stats.ttest_ind(base.reshape(-1, SEEDS), other.reshape(-1, SEEDS), axis=1).pvalue
    return dict(what="unpaired") | spec | share(map(bool, p < verdict.LEVEL))


def studies(base: np.ndarray, other: np.ndarray) -> list[Values]:
    """Studies of SEEDS seeds each: a baseline "0" and another variant."""
    both = np.stack((base, other), axis=1).reshape(-1, SEEDS, 2)
    return [{str(i): dict(enumerate(each[:, i].tolist())) for i in range(2)} for each in both]


def pairing(a: np.ndarray, b: np.ndarray, iterations: int, differs: str) -> dict:
    """The standard error of the mean difference of pairs, beside that of as many runs that share no seed.

    Without pairs, the same precision takes `worth` times as many runs.
    """
    n = len(a)
    paired, unpaired = float((b - a).std(ddof=1)) / math.sqrt(n), math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / n)
    found = dict(paired_se=paired, unpaired_se=unpaired, ratio=paired / unpaired, worth=(unpaired / paired) ** 2)
    return dict(what="pairing", data="real", differs=differs, iterations=iterations, pairs=n) | found


def rows(s: Settings) -> Iterator[dict]:
    """Every row."""
    for spec in EQUAL:
        yield equal(s.studies, *spec)
    for looks, comparisons in LOOKS:
        yield at_looks(s.studies, looks, comparisons)
    yield added(s.studies)
    for comparisons in (1, 4):
        yield intervals(s.studies, comparisons)
    for seeds in (3, SEEDS, 10):
        yield ranges(s.studies, seeds)
    for comparisons in (1, 5):
        for of_smallest in OF_SMALLEST:
            yield planted(s.studies, comparisons, of_smallest)
    if s.real:
        torch.set_num_threads(1)  # more slow down models this small
        yield from real_rows(s)


def chosen(found: list[dict], **like) -> list[dict]:
    """The rows that have these values."""
    return [row for row in found if all(row.get(name) == value for name, value in like.items())]


def draw_shares(axes, shares: list[dict], at: list[float], look: tuple, upright: bool) -> None:
    """Draw shares in per cent with their intervals: against `at`, or if not upright, to the right."""
    colour, mark, label = look
    each = [100 * row["share"] for row in shares]
    bars = [
        [100 * (row["share"] - row["low"]) for row in shares],
        [100 * (row["high"] - row["share"]) for row in shares],
    ]
    where = dict(x=at, y=each, yerr=bars) if upright else dict(x=each, y=at, xerr=bars)
    axes.errorbar(**where, fmt=mark, color=colour, label=label, markersize=3.5, linewidth=1)


def draw_power(axes, found: list[dict]) -> None:
    """The share of studies that find a planted difference, beside what was promised."""
    for like, look in MARKS:
        drawn = chosen(found, what="planted", **like)
        draw_shares(axes, drawn, [row["of_smallest"] for row in drawn], look, upright=True)
    sizes = np.linspace(0, max(OF_SMALLEST), 100)
    for comparisons, (_, (colour, *_)) in zip((1, 5), MARKS):
        smallest = verdict.smallest(SPREAD, SEEDS, verdict.LEVEL / comparisons)
        promised = [100 * power(size * smallest, SPREAD, SEEDS, comparisons) for size in sizes]
        axes.plot(sizes, promised, color=colour, linewidth=0.9)
    axes.set(xlabel="planted difference / smallest", ylabel="studies that find it (%)", ylim=(0, 102))
    axes.set_title("One better variant; lines: promised", loc="left")
    axes.legend(loc="lower right", frameon=False, fontsize=7.5)


def draw_equal(axes, found: list[dict]) -> None:
    """The share of studies of equal variants that find a difference."""
    drawn = chosen(found, what="equal")
    kinds = list(dict.fromkeys(map(kind, drawn)))[::-1]
    axes.axvline(100 * verdict.LEVEL, color="0.4", linewidth=0.9)
    for (like, look), offset in zip(MARKS, (0.15, -0.15, 0)):
        some = chosen(drawn, **like)
        draw_shares(axes, some, [kinds.index(kind(row)) + offset for row in some], look, upright=False)
    axes.set_yticks(range(len(kinds)), kinds, fontsize=7.5)
    axes.set(xlabel="studies that find a difference (%)", xlim=(0, None))
    axes.set_title("Equal variants; line: allowed", loc="left")


def kind(row: dict) -> str:
    """What distinguishes a row of equal variants, in words."""
    said = [f"{row['seeds']} seeds", "real runs" if row["data"] == "real" else row["noise"]]
    return ", ".join(word for word in said if word != "normal")


def draw(found: list[dict], folder: pathlib.Path, machine: str) -> None:
    """Draw calibration.png."""
    (equal,) = chosen(found, what="equal", **MARKS[0][0], seeds=SEEDS, noise="normal")
    (smallest,) = chosen(found, what="planted", **MARKS[0][0], of_smallest=1.0)
    shares = [f"{100 * row['share']:.1f} %" for row in (equal, smallest)]
    title = f"{shares[0]} of studies of equal variants find a difference, {shares[1]} a real one"
    subject = f"Allowed: 5 %. Promised: 80 % of the smallest ({SEEDS} seeds). Each mark: {equal['studies']:,} studies"
    subject += "".join(f", of real runs {row['studies']:,}" for row in chosen(found, what="equal", data="real"))

    def both():
        figure, (left, right) = drawing.new(5.2, nrows=2)
        draw_power(left, found)
        draw_equal(right, found)
        return figure

    drawing.save([drawing.Drawn("calibration", title, both)], folder, [subject, machine], "svg", "")


def main(s: Settings, say: Callable[[str], None] = print) -> None:
    """Measure every row, say it, and write rows.jsonl and calibration.png."""
    where = environment(CPU) | {"date": time.strftime("%Y-%m-%d")}
    lines = [files.json_line(dict(what="header", command=" ".join(sys.argv), environment=where))]
    found = []
    for row in rows(s):
        found.append(row)
        lines.append(files.json_line(row))
        say(lines[-1].rstrip())
    with files.atomic(pathlib.Path(s.out_dir) / "rows.jsonl", "w") as file:
        file.writelines(lines)
    draw(found, pathlib.Path(s.out_dir), f"{where['device']}, torch {where['torch']}, {where['date']}")


if __name__ == "__main__":
    with one_sentence():
        main(configure(Settings(), sys.argv[1:], __doc__))
