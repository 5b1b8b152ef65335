"""make gpu: breadth before depth, within its time; each step runs, and what is missing is said."""

import contextlib
import pathlib
import time
import types

import pytest
import torch

from fusedgpt.bench import campaign, kinds
from fusedgpt.bench.options import admitted
from tests.launch import fails

CPU = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch):
    """A campaign whose processes only say what they were asked: their commands."""
    asked = []

    @contextlib.contextmanager
    def running(name, command, log=None):
        asked.append(command)
        print("= 3 passed in 1.0s =", file=log)
        yield types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(campaign, "_running", running)
    monkeypatch.setattr(campaign, "_wait", lambda process, name, seconds: None)
    return asked


def run(tmp_path, **changes):
    return campaign.run(campaign.Settings(results=str(tmp_path / "results"), rehearse=True, **changes), CPU)


def test_tests_come_first_then_breadth_then_depth(steps, tmp_path, capsys):
    said = run(tmp_path, nanogpt="../nanoGPT")
    names = ["tests" if "pytest" in command else command[1] for command in steps]
    assert names[:3] == ["tests", "ladder", "peers"]  # compiled beside the tests
    assert names[3:] == [step.kind for step in campaign.BREADTH]  # a rehearsal ends with it
    assert (f"--nanogpt={pathlib.Path('../nanoGPT').absolute()}" in steps[4]) and "-n" in steps[0]
    assert "tests.txt: 3 passed in 1.0s" in said and "The same command adds what is missing" in said
    assert capsys.readouterr().out.startswith("== tests 240 s, then ladder 120 s, peers 140 s")


def test_it_keeps_within_its_time(steps, tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(campaign.time, "monotonic", lambda: clock[0])

    def measure(step, s, results, seconds):
        assert seconds > campaign.START and clock[0] + seconds <= 300
        clock[0] += seconds

    monkeypatch.setattr(campaign, "BREADTH", campaign.BREADTH + campaign.DEPTH)
    monkeypatch.setattr(campaign, "_measure", measure)
    monkeypatch.setattr(campaign, "_tests", lambda *_: "no tests")
    run(tmp_path, max_seconds=300.0)
    assert clock[0] > 270


def test_outcomes_of_tests_are_kept_for_the_same_code(steps, tmp_path):
    run(tmp_path)
    steps.clear()
    run(tmp_path)
    assert not [command for command in steps if "pytest" in command]
    path = tmp_path / "results" / "tests.txt"
    for text in (path.read_text().replace('"commit": ', '"commit": 0, "was": '), "began, and was killed"):
        path.write_text(text)
        steps.clear()
        run(tmp_path)
        assert [command for command in steps if "pytest" in command]


def test_a_step_that_takes_too_long_is_ended_with_its_children(tmp_path, capsys):
    alive, said = (str(tmp_path / name) for name in ("alive", "said"))
    grandchild = "import time, pathlib, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(4)"
    grandchild += f"; pathlib.Path({alive!r}).touch()"
    child = "import pathlib, signal, subprocess, sys, time; "
    child += f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path({said!r}).touch())); "
    child += f"subprocess.Popen([sys.executable, '-c', {grandchild!r}]); time.sleep(60)"
    began = time.monotonic()
    with campaign._running("slow", ["-c", child]) as process:
        campaign._wait(process, "slow", 2.0)
    assert time.monotonic() - began < 30
    assert "slow is ended at its limit after 2" in capsys.readouterr().out
    time.sleep(max(0.0, began + 5 - time.monotonic()))
    assert not (tmp_path / "alive").exists() and (tmp_path / "said").exists()  # without SIGTERM there was no report


def test_without_a_gpu_there_is_one_sentence(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "there is no GPU to measure" in fails("bench.py", "gpu", f"--results={tmp_path}")


def test_each_step_is_a_command_that_its_kind_takes(tmp_path):
    for step in (*campaign.BREADTH, *campaign.DEPTH, *campaign.COMPILED):
        s, _ = kinds.read_settings(step.kind, [*step.flags, "--device=cpu"])
        assert admitted(kinds.KINDS[step.kind].comparisons(s, torch.device("cuda")), s.only), step.kind
        rehearsed = campaign._arguments(step, campaign.Settings(rehearse=True), tmp_path)
        s, _ = kinds.read_settings(step.kind, rehearsed)
        assert admitted(kinds.KINDS[step.kind].comparisons(s, CPU), s.only), step.kind
        assert s.device == "cpu"  # on a Mac, a rehearsal took its GPU
