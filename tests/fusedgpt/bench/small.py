"""Benchmarks of a tiny model, for the tests of every kind, and rows that were made up."""

import dataclasses

import bench
from fusedgpt.attention.table import is_own
from fusedgpt.bench import kinds, rows
from tests.conftest import flags, small

TINY = dict(vocab_size=65, seconds=0.01, lengths="32,64", heads="2x16", memory_gb=0.5, prompt_tokens=8, new_tokens=8)


def settings(kind, tmp_path, data, **changes):
    """Settings of a kind of benchmark, with a tiny model if it trains."""
    chosen = kinds.settings_class(kinds.KINDS[kind])
    given = {**vars(small(tmp_path / "out", data)), **TINY, **changes}
    return chosen(**{field.name: given[field.name] for field in dataclasses.fields(chosen) if field.name in given})


def run(kind, tmp_path, data, **changes):
    """Run a kind of benchmark from its command line; its results."""
    unused = kinds.unused_settings(kind)
    asked = flags(settings(kind, tmp_path, data, **changes, results=str(tmp_path / "results")))
    bench.main(kind, [flag for flag in asked if is_own(flag) or flag[2:].partition("=")[0] not in unused])
    return results_of(kind, tmp_path)


def results_of(kind, tmp_path):
    """The results that `run` left."""
    return rows.results(rows.read(tmp_path / "results" / kind / "rows.jsonl")[1])


def result(ms, workload=None, baseline="manual", **lines):
    """A result with contenders that took ms[name], a list with the milliseconds of each lap.

    lines: what more is known of a contender, by its name.
    """
    names = dict.fromkeys((*ms, *lines))
    known = {"status": "measured", "errors": {"y": 1e-6}, "commit": "abc", "date": "2026-11-27"}
    contenders = {name: {"name": name, **known, **lines.get(name, {})} for name in names}
    laps = [dict(zip(ms, lap)) for lap in zip(*ms.values())]
    return rows.Result(workload or {}, baseline, contenders, laps)
