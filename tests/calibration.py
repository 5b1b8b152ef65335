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

`low` to `high` is the 95 % interval of a share. Values are an effect of the seed, which a pair shares, and noise.
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

Values = dict[str, np.ndarray]  # {variant: its values, by seed}; the baseline is the first
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
    return {str(i): np.array(sample, float) for i, sample in enumerate(samples)}


def share(what: str, found: Iterable[bool], **spec) -> dict:
    """A row: how many studies there were, the share that is `found`, and its interval (Clopper and Pearson)."""
    found = list(found)
    low, high = stats.binomtest(sum(found), len(found)).proportion_ci()
    counted = dict(studies=len(found), share=sum(found) / len(found), low=float(low), high=float(high))
    return dict(what=what, data="simulated") | spec | counted


def compared(values: Values, **how) -> list[verdict.Comparison]:
    """The verdict on each variant but the first, which is the baseline."""
    (_, base), *others = values.items()
    return verdict.compare({name: each - base for name, each in others}, largest=10.0, **how)


def differ(values: Values, **how) -> bool:
    """Whether a verdict on any planned variant is better or worse."""
    return any(c.word in ("better", "worse") and c.planned for c in compared(values, **how))


def hold(rng: np.random.Generator, comparisons: int, gain: float) -> bool:
    """Whether all intervals of a study hold the true differences; variants 1, 3, … are better by `gain`."""
    values = simulated(rng, SEEDS, comparisons)
    for name in list(values)[1::2]:
        values[name] -= gain
    return all(c.low <= -gain * (int(c.variant) % 2) <= c.high for c in compared(values))


def power(difference: float, seeds: int, comparisons: int) -> float:
    """The share of studies that find a true difference, by the noncentral t distribution at Bonferroni's level."""
    beyond = stats.t.isf(verdict.LEVEL / comparisons / 2, seeds - 1)
    return float(stats.nct.sf(beyond, seeds - 1, difference / SPREAD * math.sqrt(seeds)))


def rows(studies: int) -> Iterator[dict]:
    """Every row."""
    for seeds, comparisons, noise in EQUAL:
        rng = np.random.default_rng((seeds, comparisons))
        found = (differ(simulated(rng, seeds, comparisons, noise)) for _ in range(studies))
        yield share("equal", found, seeds=seeds, comparisons=comparisons, noise=noise)
    for looks, comparisons in LOOKS:  # which end a study as soon as one finds a difference
        rng = np.random.default_rng((*looks, comparisons))
        drawn = (simulated(rng, looks[-1], comparisons) for _ in range(studies))
        found = (any(differ({v: x[:n] for v, x in each.items()}, looks=looks) for n in looks) for each in drawn)
        yield share("looks", found, looks=list(looks), comparisons=comparisons)
    rng = np.random.default_rng(11)
    yield share("added", (differ(simulated(rng, SEEDS, 2), planned=frozenset("1")) for _ in range(studies)))
    for comparisons in (1, 4):
        rng, gain = np.random.default_rng(comparisons), 3 * SPREAD / math.sqrt(SEEDS)
        yield share("intervals", (hold(rng, comparisons, gain) for _ in range(studies)), comparisons=comparisons)
    for seeds in (3, SEEDS, 10):
        rng, true = np.random.default_rng(seeds), verdict.smallest(SPREAD, seeds)
        found = (compared(simulated(rng, seeds, 1))[0].found for _ in range(studies))
        yield share("range", (low <= true <= high for low, high in found), seeds=seeds)
    for comparisons in (1, 5):
        for of_smallest in OF_SMALLEST:
            rng = np.random.default_rng((comparisons, round(100 * of_smallest)))
            gain = of_smallest * verdict.smallest(SPREAD, SEEDS, verdict.LEVEL / comparisons)
            drawn = (simulated(rng, SEEDS, comparisons, gain=gain) for _ in range(studies))
            found = (compared(values)[0].word == "better" for values in drawn)
            row = share("planted", found, seeds=SEEDS, comparisons=comparisons, of_smallest=of_smallest)
            yield row | dict(promised=power(gain, SEEDS, comparisons))


def main(s: Settings, say: Callable[[str], None] = print) -> None:
    """Measure every row, say it, and write rows.jsonl."""
    where = environment(torch.device("cpu")) | {"date": time.strftime("%Y-%m-%d")}
    lines = [files.json_line(dict(what="header", command=" ".join(sys.argv), environment=where))]
    for row in rows(s.studies):
        lines.append(files.json_line(row))
        say(lines[-1].rstrip())
    with files.atomic(pathlib.Path(s.out_dir) / "rows.jsonl", "w") as file:
        file.writelines(lines)


if __name__ == "__main__":
    with one_sentence():
        main(configure(Settings(), sys.argv[1:], __doc__))
