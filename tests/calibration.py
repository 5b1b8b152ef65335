"""How far verdicts can be trusted: how often a study of equal variants finds a difference, and how often a real one.

    python tests/calibration.py [--name=value ...]

Writes rows.jsonl to --out_dir. Each row is about many simulated studies of the same kind:

equal     no variant differs from the baseline. `share` of the studies find a difference; 5 % may
looks     the same, with a verdict at each of the planned looks
added     the same, where a variant is added after a verdict: `share` find a difference of a planned one
intervals half of the variants differ. `share` of the studies have only intervals that hold the true difference; 95 %
range     `share` of the printed ranges hold the smallest difference that the seeds really find in 80 %; 95 %
planted   one variant is better by `of_smallest` times the smallest difference that the verdict promises to find in 80 %
          of studies. `share` of the studies find it; `promised` is what the noncentral t distribution says

`low` to `high` is the 95 % interval of a share. Values are an effect of the seed, which a pair shares, and noise. Rows
of real runs are published too: unpaired and pairing are what a t test finds that does not know the pairs, and what
shared seeds are worth. They are those of an earlier commit, see results/study_calibration/README.md.
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
from fusedgpt.errors import one_sentence
from fusedgpt.machine import files
from fusedgpt.machine.environment import environment
from fusedgpt.studies import verdict

Values = dict[str, dict[int, float]]  # {variant: {seed: value}}; the baseline is the first
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


@dataclasses.dataclass
class Settings:
    out_dir: str = "out-calibration"  # folder for rows.jsonl
    studies: int = 2000  # for each row


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


def main(s: Settings, say: Callable[[str], None] = print) -> None:
    """Measure every row, say it, and write rows.jsonl."""
    where = environment(torch.device("cpu")) | {"date": time.strftime("%Y-%m-%d")}
    lines = [files.json_line(dict(what="header", command=" ".join(sys.argv), environment=where))]
    for row in rows(s):
        lines.append(files.json_line(row))
        say(lines[-1].rstrip())
    with files.atomic(pathlib.Path(s.out_dir) / "rows.jsonl", "w") as file:
        file.writelines(lines)


if __name__ == "__main__":
    with one_sentence():
        main(configure(Settings(), sys.argv[1:], __doc__))
