"""The order of a campaign, and that it goes on where it stopped."""

import json
import math
import os
import pathlib
import runpy
import types

import pytest
import torch

from fusedgpt.bench import campaign, kinds, ladder, options
from fusedgpt.errors import UserError
from tests.launch import ROOT

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Intel(R) Xeon(R) Processor", "xeon-processor"),
    ],
)
def test_results_go_to_a_folder_named_after_the_device(monkeypatch, name, short):
    monkeypatch.setattr(campaign, "environment", lambda device: {"device": name})
    assert campaign.folder(campaign.Settings(), torch.device("cuda")) == ROOT / "results" / short


def test_without_a_gpu_it_says_so():
    with pytest.raises(UserError, match=r"there is no GPU to measure: .* --rehearse=True"):
        campaign.folder(campaign.Settings(), CPU)


class Machine:
    """A stand-in for the processes that a campaign starts: each brings as many rows as it is told to."""

    def __init__(self, monkeypatch, folder, rows_a_step):
        self.rows = {step.name: 0 for step in campaign.STEPS}
        self.rows_a_step, self.ran, self.failing, self.ends = rows_a_step, [], (), {}
        self.asked, self.folder, self.wrong = [], folder, {}
        monkeypatch.setattr(campaign, "_step", self.step)
        monkeypatch.setattr(campaign, "folder", lambda *_: folder)  # as if there were a GPU
        monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)

    def step(self, name, command, limit, guess, deadline):
        """What campaign._step does; `ends` has {part of a name: (status, seconds)} of steps that do not end well."""
        self.ran.append(name)
        self.asked.append(command)
        status, took = next((end for part, end in self.ends.items() if part in name), (0, 1.0))
        if command[0] == "bench.py":
            self.rows[self.named(*command[1:])] += self.rows_a_step if status == 0 else 0
        else:
            path = next(word.removeprefix("--outcomes=") for word in command if word.startswith("--outcomes="))
            outcomes = ["passed"] * 7 + ["skipped"] * 2
            if name in self.failing:
                outcomes[0], status = "failed", 1
            if status != 1 and status != 0:
                outcomes = outcomes[:3] if status is None else []
            lines = [json.dumps({"test": f"{name}::{n}", "outcome": its}) for n, its in enumerate(outcomes)]
            pathlib.Path(path).write_text("\n".join(lines))
        return status, took

    def named(self, kind, *args):
        """The name of the step that has these arguments: its rows are in a folder of their own."""
        return f"{kind} small" if f"--results={self.folder / 'small'}" in args else kind

    def left(self, kind, args):
        total = 2 if {campaign.FIRST_RUNGS, campaign.COARSE, campaign.ARTICLES} & set(args) else 10
        wrong = {"disturbed": 1} if kind == "sweep" else self.wrong if kind == "numerics" else {}
        return max(total - self.rows[self.named(kind, *args)], 0), wrong, total

    def run(self, **settings):
        """What a campaign says, and which steps it ran."""
        self.ran.clear()
        return campaign.run(campaign.Settings(**settings), CPU, self.left), [*self.ran]


TESTS = [f"test_{name}.py" for name in campaign.TESTS]
BEFORE_TESTS = ["ladder, 2 rows", "numerics, 2 rows", "sweep, 2 rows", "prefill, 10 rows"]


def test_the_most_useful_comes_first_and_the_next_call_goes_on(tmp_path, monkeypatch):
    # 18 test files used to come before the first figure, and a lent machine has half an hour
    machine = Machine(monkeypatch, tmp_path, rows_a_step=5)
    said, ran = machine.run()
    assert ran == [
        *BEFORE_TESTS,
        *TESTS,
        *("ladder, 5 rows", "numerics, 5 rows"),
        *("ladder small, 10 rows", "peers, 10 rows", "max_batch, 10 rows", "sweep, 5 rows"),
    ]
    assert f"{7 * len(TESTS)} tests ran ({2 * len(TESTS)} skipped); rows: ladder 10 of 10, " in said
    later = ("prefill", "ladder small", "peers", "max_batch")
    missing = ", ".join(f"{name} (5 rows)" for name in later)
    assert said.endswith(f"missing: {missing}. The same command goes on")
    said, ran = machine.run()
    assert ran == [f"{name}, 5 rows" for name in later]
    assert "sweep 10 of 10 (1 disturbed)" in said and said.endswith("; nothing is missing")
    assert machine.run()[1] == []


def test_what_the_first_rungs_and_those_of_the_small_model_are():
    # 'flash + padded*' also was CUDA graphs and eager, and a GPU that refuses flash had no padded rung
    def rungs(flags):
        only = next(flag.removeprefix("--only=") for flag in flags if flag.startswith("--only="))
        return [spec["rung"] for spec in options.admitted([{"rung": name} for name in ladder.RUNGS], only)]

    first = ["manual", "efficient", "flash", ladder.PADDED, ladder.EFFICIENT_PADDED, "cudnn + padded vocabulary"]
    assert rungs(campaign.STEPS[0].flags) == first
    assert rungs(campaign.SMALL) == [ladder.PADDED, ladder.GRAPHED, f"{ladder.PADDED}, eager"]
    s, _ = kinds.read_settings("ladder", ["--device=cpu", *campaign.SMALL])
    kinds.validate(ladder, s)
    char = runpy.run_path(str(ROOT / "config" / "train_shakespeare_char.py"))
    for name in ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dropout", "gradient_accumulation_steps"):
        assert getattr(s, name) == char[name], name


def test_tests_that_do_not_pass_hold_no_measurement_up(tmp_path, monkeypatch):
    # they used to run first in each call, and a call with a budget came no further
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.failing, machine.ends = (TESTS[3],), {TESTS[0]: (None, 540.0)}
    said, ran = machine.run()
    assert TESTS[0] in ran and ran[-1] == "max_batch, 10 rows"
    assert f"{TESTS[0]} was killed at its limit after 9 min, 3 passed; {TESTS[3]} failed 1 of 7; " in said
    machine.failing, machine.ends = (), {}
    said, ran = machine.run()
    assert ran == [TESTS[0], TESTS[3]] and "failed" not in said and "killed" not in said


def test_a_step_that_dies_at_once_is_not_said_to_have_taken_its_limit(tmp_path, monkeypatch):
    # with a package hidden, pytest died at once; tests.json said "ended_after": 540.0, and nothing was missing
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.ends = {TESTS[1]: (4, 1.2), "numerics": (1, 2.0), "peers": (None, 540.0)}
    said, _ = machine.run()
    found = json.loads((tmp_path / "tests.json").read_text())["files"][campaign.TESTS[1]]
    assert found == {"status": 4, "seconds": 1.2, "passed": 0, "failed": [], "skipped": [], "began": []}
    assert f"{TESTS[1]} ended with status 4 after 1.2 s, 0 passed" in said
    assert (
        "numerics (10 rows, ended with status 1 after 2 s), peers (10 rows, was killed at its limit after 9 min)"
        in said
    )


def test_tests_run_again_if_the_code_is_another_and_not_for_a_commit(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.run()
    found = campaign.environment(CPU)
    monkeypatch.setattr(campaign, "environment", lambda device: {**found, "commit": "of the results"})
    assert machine.run()[1] == []
    monkeypatch.setattr(campaign, "environment", lambda device: {**found, "cuda": "13.1"})
    assert machine.run()[1] == TESTS
    monkeypatch.setattr(campaign, "ROOT", tmp_path)
    assert campaign._tests(tmp_path, campaign._of(CPU)) == {}  # of other files


def test_the_largest_batch_trains_for_a_time_that_a_step_has(tmp_path, monkeypatch):
    # figure 3 of PyTorch's article was in no step: it takes --train_seconds, and a run of a few steps has no curve
    machine = Machine(monkeypatch, tmp_path, rows_a_step=5)
    machine.run()
    (command,) = [command for command in machine.asked if command[:2] == ["bench.py", "max_batch"]]
    assert "--train_seconds=180" in command and "--only=manual,flash" in command
    # a run that is begun in the last moment ends before the step is ended, as every other row does
    budgets = {
        command[1]: float(command[-1].removeprefix("--max_seconds=")) for command in machine.asked if "=" in command[-1]
    }
    assert budgets["max_batch"] == pytest.approx(campaign.LIMIT - campaign.LAST_ROW - 180, abs=1)
    assert budgets["max_batch"] > 180


# with 0.8 s for its rows, the sweep ended with an error before its first
@pytest.mark.parametrize("for_rows", [-2, 0.8, campaign.LEAST - 1])
def test_no_step_begins_once_the_time_is_up(tmp_path, monkeypatch, for_rows):
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    last_row = campaign.REPORT + min(campaign.ROW_SECONDS.values())  # it might still run when time is up
    said, ran = machine.run(max_seconds=last_row + for_rows)
    assert ran == [] and f"missing: {TESTS[0]}, " in said and "ladder (10 rows), numerics (10 rows)" in said


@pytest.mark.parametrize("seconds", [0, -1, math.inf, math.nan])
def test_a_limit_that_is_none_is_refused(tmp_path, monkeypatch, seconds):
    # 0 was no limit
    with pytest.raises(UserError, match=r"max_seconds=.* must be more than 0, and finite"):
        Machine(monkeypatch, tmp_path, rows_a_step=10).run(max_seconds=seconds)


class Hours:
    """A machine whose rows and tests take the seconds that the campaign expects of them, with the rows of a GPU."""

    def __init__(self, monkeypatch, folder):
        self.seconds, self.ran, self.done, self.call = 0.0, [], {}, None
        monkeypatch.setattr(campaign, "folder", lambda *_: folder)
        monkeypatch.setattr(campaign, "_step", self.step)
        monkeypatch.setattr(campaign.signal, "signal", lambda *_: None)
        monkeypatch.setattr(campaign, "time", types.SimpleNamespace(monotonic=lambda: self.seconds))

    def missing(self, kind, args):
        """The rows that a call of bench.py would measure, and those that it was asked for."""
        given = dict(flag.removeprefix("--").split("=", 1) for flag in args)
        module = kinds.KINDS[kind]
        settings = kinds.settings_class(module)(**module.defaults(True))
        plan = options.admitted(module.plan(settings, torch.device("cuda")), given.get("only", ""))
        done = self.done.setdefault(given["results"] + kind, [])
        return [spec for spec in plan if spec not in done], plan, done

    def left(self, kind, args):
        todo, plan, _ = self.missing(kind, args)
        return len(todo), {}, len(plan)

    def step(self, name, command, limit, guess, deadline):
        self.ran.append(name)
        if command[0] != "bench.py":
            self.seconds += campaign.TEST_SECONDS
            return 0, campaign.TEST_SECONDS
        kind, row = command[1], campaign.ROW_SECONDS[command[1]]
        todo, _, done = self.missing(kind, command[2:])
        began = self.seconds
        while todo and self.seconds - began < float(command[-1].removeprefix("--max_seconds=")):
            done.append(todo.pop(0))
            self.seconds += row
        assert self.seconds - began < limit, name
        return 0, self.seconds - began


def test_calls_of_nine_minutes_come_as_far_as_the_tests(tmp_path, monkeypatch):
    # each spent 150 s on the sweep again, because all of its 2341 rows counted, and 120 s a step on its last row
    machine, ran = Hours(monkeypatch, tmp_path), []
    for _ in range(4):
        machine.ran, machine.seconds = [], 0.0
        campaign.run(campaign.Settings(max_seconds=550), CPU, machine.left)
        assert machine.seconds <= 550
        ran.append([name.partition(",")[0] for name in machine.ran])
    assert {"ladder", "numerics", "sweep", "prefill", TESTS[0]} <= set().union(*ran)
    assert ran[-1][0] in TESTS and len({*ran[-1]} & {*TESTS}) >= 10  # all before the tests is complete
    coarse, plan, _ = machine.missing("sweep", [f"--results={tmp_path}", campaign.COARSE])
    assert not coarse and {(spec["part"], spec["T"]) for spec in plan} == {("attention", T) for T in (256, 1024, 4096)}


def test_the_last_line_says_what_went_wrong_though_no_row_is_missing(tmp_path, monkeypatch):
    # a row that failed parity counted as measured, and nothing was missing
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.wrong = {"parity failed": 3, "refused": 5}
    said, _ = machine.run()
    assert "numerics 10 of 10 (3 parity failed, 5 refused), " in said and said.endswith("; 3 rows failed parity")
    machine.wrong = {"refused": 5, "out of memory": 1}  # these are answers
    assert machine.run()[0].endswith("; nothing is missing")
    machine.rows["prefill"] = 9
    monkeypatch.setattr(machine, "step", machine.step)
    monkeypatch.setattr(campaign, "_step", lambda *step: (machine.step(*step), (1, 2.0))[1])  # after its last row
    assert machine.run()[0].endswith("; prefill: ended with status 1 after 2 s")


def test_a_later_step_of_a_kind_that_does_not_start_leaves_how_the_first_ended(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, rows_a_step=1)
    machine.ends = {"ladder": (None, 540.0)}
    real, steps = campaign._measure, []

    def once(step, *others):  # as if the time were up for the second
        steps.append(step.name)
        return real(step, *others) if steps.count(step.name) == 1 else None

    monkeypatch.setattr(campaign, "_measure", once)
    assert "ladder (10 rows, was killed at its limit after 9 min)" in machine.run()[0]


def test_a_report_that_a_kill_prevented_is_drawn(tmp_path, monkeypatch):
    machine = Machine(monkeypatch, tmp_path, rows_a_step=10)
    machine.run()
    for part, age in (("prefill", 1), ("small/ladder", 1), ("numerics", 0)):
        (tmp_path / part).mkdir(parents=True)
        (tmp_path / part / "rows.jsonl").touch()
        if part != "small/ladder":
            (tmp_path / part / "report.md").touch()
        os.utime(tmp_path / part / "rows.jsonl", (1000 + age, 1000 + age))
    for part in ("prefill", "numerics"):
        os.utime(tmp_path / part / "report.md", (1000, 1000))
    asked = []
    monkeypatch.setattr(campaign, "_step", lambda name, command, *_: (asked.append(command), (1, 2.0))[1])
    said, _ = machine.run()
    assert asked == [["bench.py", "report", str(tmp_path / part)] for part in ("prefill", "small/ladder")]
    assert "; prefill: its report ended with status 1 after 2 s; ladder small: its report" in said


def test_a_campaign_runs_every_test_that_needs_a_gpu(request):
    needed = {item.path.stem for item in request.session.items if item.get_closest_marker("gpu")}
    assert needed <= {f"test_{name}" for name in campaign.TESTS}


@pytest.mark.slow  # it collects all tests
def test_each_test_file_of_a_campaign_has_tests_that_need_a_gpu():
    found = types.SimpleNamespace(
        pytest_collection_finish=lambda session: files.update(i.path.stem for i in session.items)
    )
    files = set()
    pytest.main(["-m", "gpu", "--collect-only", str(ROOT / "tests")], plugins=[found])
    assert files == {f"test_{name}" for name in campaign.TESTS}
