"""The largest micro-batch: found by trials that really run out of memory."""

import sys
from unittest.mock import Mock

import pytest
import torch

from fusedgpt.bench import max_batch
from fusedgpt.bench.rows import Ended
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run, settings

CPU = torch.device("cpu")
linux = pytest.mark.skipif(sys.platform != "linux", reason="limits memory by RLIMIT_DATA")


@pytest.mark.parametrize("most", [0, 1, 2, 7, 24, 39, 100])
@pytest.mark.parametrize("guess", [0, 1, 23, 24, 200])
def test_the_search_finds_the_largest_that_fits(most, guess):
    tried = []

    def fits(n):
        assert n not in tried  # no trial is made twice: each takes a minute
        tried.append(n)
        return n <= most

    assert max_batch.largest(fits, guess) == most
    assert most + 1 in tried and (not most or most in tried)


@linux
def test_a_process_that_holds_more_than_it_may_ends(tmp_path, data, monkeypatch):
    s = settings("max_batch", tmp_path, data, attention="manual", block_size=256, compile=False, n_embd=64, n_head=4)
    with pytest.raises(Ended) as ended:
        max_batch._trial(max_batch.dataclasses.replace(s, batch_size=100), 2**26)
    assert ended.value.args[0] == "out of memory"
    monkeypatch.setattr(max_batch, "TIMED_S", 0.2)
    found = max_batch._trial(s, 2**28)
    assert found["samples"] >= 1 and found["tokens"] == 4 * 256 and found["peak_memory"] > 0


def test_the_search_to_its_report(tmp_path, data, monkeypatch):
    # without processes: 5 sequences fit, with flash 8
    def trial(s, free):
        if s.batch_size > {"manual": 5, "flash": 8}[s.attention]:
            raise Ended("out of memory", "no room")
        ran = {"attention": s.attention, "dtype": "float32", "compile": False, "padded_vocab_size": 128}
        times = {"median_ms": 100.0, "p10_ms": 90.0, "p90_ms": 110.0, "samples": 9}
        flops = {"flops_per_token": 1e6, "peak_flops": 1e12, "tokens": s.batch_size * 16, "peak_memory": 2**30}
        flops |= {"steps": 5, "loss": 4.0}
        return times | flops | {"ran": ran, "kernel": {"forward": [s.attention], "backward": [s.attention]}}

    monkeypatch.setattr(max_batch, "_trial", trial)
    monkeypatch.setattr(max_batch, "estimated", lambda *_: 4)
    (found,) = run("max_batch", tmp_path, data, only="manual,flash,cudnn")
    assert {name: line["largest"] for name, line in found.measured.items()} == {"manual": 5, "flash": 8}
    assert found.contenders["cudnn"]["status"] == "refused"
    text = (tmp_path / "results" / "max_batch" / "report.md").read_text()
    assert "| flash | 8 | 39 | 4 | out of memory | 100 (90 to 110) |" in text


def test_no_sequence_that_fits_is_out_of_memory(tmp_path, data, monkeypatch):
    monkeypatch.setattr(max_batch, "_trial", Mock(side_effect=Ended("out of memory", "no room: 3 GiB")))
    monkeypatch.setattr(max_batch, "estimated", lambda *_: 4)
    with pytest.raises(Ended) as ended:
        max_batch.build({}, "manual", settings("max_batch", tmp_path, data), CPU)
    assert ended.value.args == ("out of memory", "no room: 3 GiB")


def test_the_search_begins_at_the_formulas(tmp_path, data):
    s = {name: settings("max_batch", tmp_path, data, attention=name, block_size=256) for name in ("manual", "flash")}
    guess = {name: max_batch.estimated(s[name], CPU, 2**30) for name in s}
    assert guess["flash"] > guess["manual"] > 1
    assert max_batch.estimated(s["flash"], CPU, 2**31) == pytest.approx(2 * guess["flash"], rel=0.1)


def test_a_device_without_a_known_limit_is_refused(tmp_path, data):
    with pytest.raises(UserError, match="cannot limit the memory of mps here"):
        max_batch.comparisons(settings("max_batch", tmp_path, data), torch.device("mps"))
