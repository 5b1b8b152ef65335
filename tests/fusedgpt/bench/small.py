"""Benchmarks of a tiny model, for the tests of every kind."""

import dataclasses
from unittest import mock

import bench
from fusedgpt.attention.table import is_own
from fusedgpt.bench import disturbance, kinds
from fusedgpt.machine import timing
from fusedgpt.machine.files import read_jsonl
from tests.conftest import flags, small
from tests.launch import ROOT

CPU_RESULTS = ROOT / "results" / "cpu_amx"

TINY = dict(steps=8, eval_interval=100, eval_iters=1, vocab_size=65, repeats=2, warmup=1)
TINY |= dict(lengths="32,64", heads="2x16", memory_gb=0.5, rounds=1)


def settings(kind, tmp_path, data, **changes):
    """Settings of a kind of benchmark, with a tiny model if it trains."""
    chosen = kinds.settings_class(kinds.KINDS[kind])
    given = {**vars(small(tmp_path / "out", data)), **TINY, **changes}
    return chosen(**{field.name: given[field.name] for field in dataclasses.fields(chosen) if field.name in given})


# to draw a figure takes longer than to measure its rows
UNDRAWN = {
    "matplotlib.figure.Figure.savefig": lambda *_, **__: None,
    "fusedgpt.bench.drawing._compress": lambda path: None,
}


def run(kind, tmp_path, data, **changes):
    """Run a kind of benchmark from its command line, as on a machine that nothing else uses; its rows."""
    unused = kinds.unused_settings(kind)
    asked = flags(settings(kind, tmp_path, data, **changes, results=str(tmp_path / "results")))
    idle = mock.patch.object(timing, "reference", lambda device: 1.0)
    wide = mock.patch.object(disturbance, "WIDE", float("inf"))  # samples of tiny models lie far apart
    undrawn, uncompressed = (mock.patch(*each) for each in UNDRAWN.items())
    with idle, wide, undrawn, uncompressed, mock.patch.object(disturbance, "usage", lambda: (0, 0.0)):
        bench.main(kind, [flag for flag in asked if is_own(flag) or flag[2:].partition("=")[0] not in unused])
    return rows_of(kind, tmp_path)


def rows_of(kind, tmp_path):
    """The rows that `run` left."""
    return [row for row in read_jsonl(tmp_path / "results" / kind / "rows.jsonl") if row["kind"] == "row"]


def published(folder):
    """(settings, rows) of a benchmark in results/."""
    header, *lines = read_jsonl(CPU_RESULTS / folder / "rows.jsonl")
    return header["settings"], [line for line in lines if line["kind"] == "row"]
