import types

import pytest

from fusedgpt.errors import UserError
from fusedgpt.machine.timing import in_words
from fusedgpt.studies import progress, runner
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.test_runner import plan, run


@pytest.mark.parametrize("seconds", [0.25, 5, 40, 720, 12000, 4.2 * 86400])
def test_durations_in_words_are_read_back(seconds):
    assert progress.seconds_in(in_words(seconds)) == pytest.approx(seconds, rel=0.03)


def test_an_outlook_says_how_many_runs_there_are_and_what_they_take(tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: 0))  # how long a process starts
    one, code = plan(), fakes.code(tmp_path / "code")
    left = runner.order(one)[1:]
    said = progress.outlook(one, tmp_path / "study", dict.fromkeys(one.variants, code), left, at_once=1)
    assert said.startswith("2 variants × 2 seeds: 3 runs are left, of 12 s each: about ")
    assert "0.5 GB of disk at most (3 checkpoints of 50 MB a run)" in said  # the two latest, and the best
    assert not (tmp_path / "study").exists()


def test_an_outlook_names_the_variant_that_cannot_run(tmp_path):
    one, code = plan({"config": {}}), tmp_path
    (code / "train.py").write_text("raise SystemExit('error: there are no data')")
    with pytest.raises(UserError, match="config cannot run: there are no data"):
        progress.outlook(one, tmp_path / "study", {"config": code}, runner.order(one), at_once=1)


def test_each_run_and_each_complete_seed_get_a_line(tmp_path, capsys):
    one = plan(seeds=[1, 2, 3, 4])
    told = progress.Progress(one, tmp_path / "study", done=0)
    for job in runner.order(one):
        run(tmp_path, one, jobs=[job])
        told.ended(job)
    told.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("learning_rate=0.01 with seed 1: val_loss 1.1")
    assert [n for n, line in enumerate(lines) if line.startswith("so far: learning_rate=0.1 ")] == [4, 7]
