"""Searches with a train.py that learns nothing, in this process, and workers that share them, in a SQLite file."""

import collections
import json
import math
import re
import signal
import threading
import time
import types

import pytest

from fusedgpt.errors import UserError
from fusedgpt.machine import files
from fusedgpt.runs.metrics import read_metrics
from fusedgpt.studies import command, database, design, outcomes, runner, search
from fusedgpt.studies.runner import Stopped
from tests.conftest import TINY
from tests.fusedgpt.studies import fakes, workers
from tests.fusedgpt.studies.workers import work
from tests.launch import FORKS, script

optuna = pytest.importorskip("optuna")
pytest.importorskip("tyro")

RATE = "--search=learning_rate=1e-6..1:log"  # the fake's loss is best at 0.01


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "NAP_S", 0.1)
    monkeypatch.setattr(search, "LOOK_S", 0)
    return fakes.code(tmp_path / "code")


@pytest.fixture
def here():
    with fakes.in_this_process(), fakes.blank_figures():
        yield


def trials(url, name="study"):
    """The trials of a study that count, by Optuna itself."""
    loaded = optuna.load_study(study_name=name, storage=str(url)).trials
    return [each for each in loaded if each.state.name != "FAIL"]


def in_file(folder):
    return trials(f"sqlite:///{folder / 'study.db'}", folder.name)


def names(found):
    return sorted(each.user_attrs["variant"] for each in found)


def test_a_search_ends_with_its_trials_a_best_one_and_the_command_that_confirms_it(
    tmp_path, code, here, monkeypatch, capfd
):
    asked, tpe = [], optuna.samplers.TPESampler
    monkeypatch.setattr(optuna.samplers, "TPESampler", lambda **how: asked.append(how) or tpe(**how))
    results = work(tmp_path / "study", code, RATE, "--trials=5", "--seed=1,2", "--n_layer=3")
    assert [each.status for each in results.outcomes] == ["finished"] * 10
    assert results.design.baseline == next(iter(results.design.variants)) == "learning_rate=0.001"
    assert asked[-1] == {"seed": 1} and results.differences == []
    told = {each.user_attrs["variant"]: each.value for each in in_file(tmp_path / "study")}
    values = {name: sum(each.values()) / 2 for name, each in results.values().items()}
    assert values == pytest.approx(told) and len(told) == 5
    for name, changes in results.design.variants.items():
        assert name == f"learning_rate={changes['learning_rate']}" == f"learning_rate={changes['learning_rate']:.4g}"
    said = capfd.readouterr().out
    assert len(re.findall(r"^trial \d of 5, learning_rate=", said, re.M)) == 5 and "the best so far" in said

    best = min(values, key=values.get)
    found = search.sentences(results)
    assert found[0].startswith(f"the best of 5 trials that ran to their end is {best}: val_loss ")
    confirm = f"python study.py config/a.py --n_layer=3 --learning_rate=0.001,{best.partition('=')[2]} --seed=3..7"
    assert found[-1].strip() == f"{confirm} --study_dir=out-confirm"
    assert command.read(confirm.split()[3:], "").seeds == [3, 4, 5, 6, 7]


def test_a_best_variant_that_no_flag_can_name_is_confirmed_by_a_config_file():
    variants = {"a": {"attention": "flash"}, "b": {"attention": "mine.py:attend"}}
    plan = design.Design(
        "", "search", "val_loss", None, "t", "a", ["attention"], variants, [1], {}, "", {}, space="attention="
    )
    assert "`variants` in a config file" in search.confirmation(plan, "b")


@pytest.mark.slow  # 20 trials, which are those of Optuna's sampler
def test_tpe_comes_near_the_optimum(tmp_path, code, here):
    found = work(tmp_path / "study", code, RATE, "--trials=20", "--max_iters=3")
    far = [abs(math.log10(each["learning_rate"]) + 2) for each in found.design.variants.values()]
    first, last = far[1:10], far[-8:]  # after the baseline, those at random, and those that follow from others
    assert sum(last) / len(last) < 0.8 < 1.5 < sum(first) / len(first), far


def test_a_search_with_a_seed_is_made_again(tmp_path, code, here):
    flags = (RATE, "--trials=4", "--max_iters=3", "--sampler=random")
    first, again = (list(work(tmp_path / name / "study", code, *flags).design.variants) for name in "ab")
    assert first == again and len(set(first)) == 4


def test_trials_that_begin_badly_are_ended_early_before_their_other_seeds_run(tmp_path, code):
    flags = (RATE, "--trials=9", "--pruner=hyperband", "--sampler=random", "--seed=1..3", "--jobs=3")
    with fakes.in_this_process(fakes.Stepwise):
        results = work(tmp_path / "study", code, *flags)
    statuses = {name: {o.status for o in results.outcomes if o.variant == name} for name in results.design.variants}
    ended = [name for name, each in statuses.items() if each == {"pruned"}]
    assert len(statuses) == 9 and len(ended) >= 2
    assert all(statuses[name] == {"finished"} for name in statuses.keys() - set(ended))
    runs = [each for each in results.outcomes if each.status == "pruned" and each.run]
    assert {each.seed for each in runs} == {1}
    assert all(len(each.run.train["iter"]) < 27 and math.isnan(each.value) for each in runs)
    far = {name: abs(math.log10(each["learning_rate"]) + 2) for name, each in results.design.variants.items()}
    assert sum(map(far.get, ended)) / len(ended) > sum(far.values()) / len(far)  # those far from the optimum
    states = collections.Counter(each.state.name for each in in_file(tmp_path / "study"))
    assert states == {"COMPLETE": 9 - len(ended), "PRUNED": len(ended)}


def test_diverged_trials_count_as_the_worst_and_failed_ones_are_avoided(tmp_path, code, here, capfd):
    rates = "--search=learning_rate=0.01|0.1|100.0"
    results = work(tmp_path / "study", code, rates, "--trials=8", "--learning_rate=0.01")
    found = in_file(tmp_path / "study")
    diverged = next(each for each in found if each.user_attrs["variant"] == "learning_rate=100.0")
    before = [each.value for each in found if each.number < diverged.number]
    assert diverged.state.name == "COMPLETE" and diverged.value >= max(before)
    assert "1 of 1 diverged" in capfd.readouterr().out
    assert len(found) == 8 and len(results.outcomes) == 3  # settings that come again are not run again

    failing = work(tmp_path / "fails", code, "--search=n_layer=12|13", "--trials=4", "--n_layer=12")
    by_name = {each.variant: each for each in failing.outcomes}
    assert by_name["n_layer=13"].status == "failed" and "unlucky" in by_name["n_layer=13"].why
    assert {each.state.name for each in in_file(tmp_path / "fails")} == {"COMPLETE", "PRUNED"}


def test_a_worker_whose_trials_all_fail_gives_up(tmp_path, code, here):
    work(tmp_path / "study", code, "--search=learning_rate=1e-6..1", "--trials=1")
    (code / "train.py").write_text("import sys\nsys.exit('error: the disk has gone bad')")
    with pytest.raises(UserError, match="5 trials in a row failed"):
        work(tmp_path / "study", code, "--search=learning_rate=1e-6..1", "--trials=20")


def test_settings_that_do_not_fit_together_are_not_tried(tmp_path, code, here, monkeypatch):
    flags = ("--n_embd=64", "--n_head=4", "--max_iters=3", "--trials=4", "--sampler=random")
    results = work(tmp_path / "study", code, "--search=n_head=2..8,learning_rate=1e-3..1", *flags)
    assert {each["n_head"] for each in results.design.variants.values()} <= {2, 4, 8}
    assert [each.status for each in results.outcomes] == ["finished"] * 4
    monkeypatch.setattr(search, "UNFIT", 5)
    flags = ("--n_embd=61", "--n_head=1", "--max_iters=3", "--trials=9")
    with pytest.raises(UserError, match=r"5 suggestions in a row do not fit together: .*n_embd=61"):
        work(tmp_path / "other", code, "--search=n_head=1..999", *flags)


def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path, code):
    first = outcomes.folder_of(tmp_path / "study", "learning_rate=0.001", 1)
    fakes.send(-signal.SIGTERM, first)
    with pytest.raises(Stopped):
        work(tmp_path / "study", code, RATE, "--trials=2")
    assert 0 < len(read_metrics(first, "train")) < 27
    with fakes.in_this_process():
        results = work(tmp_path / "study", code, RATE, "--trials=2")
        assert [each.status for each in results.outcomes] == ["finished"] * 2
        assert results.outcomes[0].run.record["settings"]["init_from"] == "resume"
        assert len(in_file(tmp_path / "study")) == 2
        # with more trials, it goes on; with as many, nothing is left
        assert len(work(tmp_path / "study", code, RATE, "--trials=3").outcomes) == 3
        before = (tmp_path / "study" / "outcomes.jsonl").read_bytes()
        work(tmp_path / "study", code, RATE, "--trials=3")
        assert (tmp_path / "study" / "outcomes.jsonl").read_bytes() == before


def test_a_trial_begun_before_the_time_is_over_is_continued_later(tmp_path, code, here, monkeypatch):
    begun, popen = [], runner.subprocess.Popen
    clock = types.SimpleNamespace(monotonic=lambda: len(begun), sleep=time.sleep)  # a run takes a second
    flags = (RATE, "--trials=2", "--seed=1..3", "--max_iters=3")
    with monkeypatch.context() as changed:
        changed.setattr(runner.subprocess, "Popen", lambda *args, **how: begun.append(1) or popen(*args, **how))
        changed.setattr(runner, "time", clock)
        changed.setattr(search, "time", clock)
        results = work(tmp_path / "study", code, *flags, deadline=2)
    assert [each.status for each in results.outcomes] == ["finished", "finished", "missing"]
    results = work(tmp_path / "study", code, *flags)
    assert [each.status for each in results.outcomes] == ["finished"] * 6
    assert len(in_file(tmp_path / "study")) == 2


OTHERS = [
    (["--search=learning_rate=1e-6..2:log"], "space was 'learning_rate=1e-6..1:log', and is"),
    (["--search=n_layer=2..3"], "space was"),
    ([RATE, "--seed=1,2"], "seeds was [1], and is [1, 2] now"),
    ([RATE, "--metric=bits_per_byte"], "metric was 'val_loss'"),
    ([RATE, "--n_layer=3"], "n_layer was 12, and is 3 now"),
    (["--learning_rate=1e-3,2e-3"], "kind was 'search', and is 'grid' now"),
]


def test_another_study_is_refused_by_name(tmp_path, code, here):
    storage = f"--storage=sqlite:///{tmp_path / 'shared.db'}"
    work(tmp_path / "study", code, RATE, "--trials=1", storage, "--max_iters=3")
    for flags, said in OTHERS:
        for folder in (tmp_path / "study", tmp_path / "elsewhere" / "study"):  # by study.json, and by the storage
            with pytest.raises(UserError, match=re.escape(said)):
                work(folder, code, *flags, "--trials=1", storage, "--max_iters=3")
    work(tmp_path / "study", code, RATE.replace("=1e", " = 1e"), "--trials=2", storage, "--max_iters=3")
    assert len(outcomes.statuses(tmp_path / "study")) == 2  # the space may be written with other spaces


def test_a_study_of_somebody_else_is_left_alone(tmp_path, code):
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    optuna.create_study(study_name="study", storage=url).enqueue_trial({"x": 1})
    with pytest.raises(UserError, match=r"is not one of study.py, or of another version: name another --study_dir"):
        work(tmp_path / "study", code, RATE, f"--storage={url}")


def test_workers_share_the_trials_of_a_search(tmp_path, code):
    flags = (RATE, "--trials=5", "--max_iters=6", f"--storage=sqlite:///{tmp_path / 'shared.db'}")
    both = [FORKS.Process(target=workers.main, args=(tmp_path / "study", code, *flags)) for _ in range(2)]
    for each in both:
        each.start()
    for each in both:
        each.join(90)
        assert each.exitcode == 0
    found = trials(f"sqlite:///{tmp_path / 'shared.db'}")
    assert len(found) == 5 and {each.state.name for each in found} == {"COMPLETE"}
    results = outcomes.read(tmp_path / "study")
    assert [each.status for each in results.outcomes] == ["finished"] * 5
    assert names(found) == sorted(results.design.variants)
    assert len((tmp_path / "study" / "outcomes.jsonl").read_text().splitlines()) == 5
    # what `auto` means was settled once
    asked = [each.run.record["settings"].get("attention", "auto") for each in results.outcomes]
    assert collections.Counter(asked) == {"auto": 1, "settled": 4}


def test_workers_with_folders_of_their_own_have_all_values(tmp_path, code, here):
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    folders = [tmp_path / where / "study" for where in ("here", "there")]
    flags = (RATE, "--seed=1,2", "--max_iters=3", f"--storage={url}")
    work(folders[0], code, *flags, "--trials=1")
    both = [work(folder, code, *flags, "--trials=3") for folder in folders[::-1]]
    assert both[0].values() == both[1].values() and [len(each.outcomes) for each in both] == [6, 6]
    assert {each.status for results in both for each in results.outcomes} == {"finished"}
    assert [sum(each.run is not None for each in results.outcomes) for results in both] == [4, 2]  # nothing ran twice
    assert len(trials(url)) == 3


def test_a_trial_that_a_dead_worker_only_took_is_not_lost(tmp_path, code, here, monkeypatch):
    monkeypatch.setattr(database, "GRACE_S", 0.1)
    url = f"sqlite:///{tmp_path / 'shared.db'}"
    flags = ("--learning_rate=1e-3,2e-3", f"--storage={url}", "--max_iters=3")
    work(tmp_path / "study", code, *flags, deadline=0)
    ours = optuna.load_study(study_name="study", storage=url)
    ours.enqueue_trial({"learning_rate": 1e-3}, user_attrs={"variant": "learning_rate=0.001"})
    ours.ask()  # and dies
    results = work(tmp_path / "study", code, *flags)
    assert [each.status for each in results.outcomes] == ["finished"] * 2
    assert names(trials(url)) == ["learning_rate=0.001", "learning_rate=0.002"]
    with pytest.raises(UserError, match="variants was"):
        work(tmp_path / "study", code, "--learning_rate=1e-3,2e-3,3e-3", *flags[1:])


def lock(folder, shared):
    files.lock(folder, shared=shared)


def write_a_report(folder, begun, may_end):
    with search.turn(folder):
        begun.set()
        may_end.wait(60)


def test_a_folder_has_one_study_unless_they_share_a_storage(tmp_path):
    with files.lock(tmp_path, shared=True):
        for shared in (True, False):  # in another process, because one does not lock out itself
            other = FORKS.Process(target=lock, args=(tmp_path, shared))
            other.start()
            other.join(60)
            assert (other.exitcode == 0) == shared


def test_reports_are_written_in_turn(tmp_path):
    begun, may_end = FORKS.Event(), FORKS.Event()
    other = FORKS.Process(target=write_a_report, args=(tmp_path, begun, may_end))
    other.start()
    assert begun.wait(60)
    threading.Timer(0.5, may_end.set).start()
    with search.turn(tmp_path):
        assert may_end.is_set()
    other.join(60)


def test_the_outlook_counts_the_runs_that_are_left(tmp_path, code, here):
    results = work(tmp_path / "study", code, RATE, "--trials=2", "--seed=1,2", "--max_iters=3")
    assert search.left(results.design, tmp_path / "study", 5) == [("learning_rate=0.001", 1)] * 6
    assert json.loads((tmp_path / "study" / "study.json").read_text())["space"] == "learning_rate=1e-6..1:log"


def test_study_py_searches_and_reports_without_the_storage(tmp_path, data, here):
    folder = tmp_path / "study"
    settings = TINY | dict(gradient_accumulation_steps=1, max_iters=6, lr_decay_iters=6, eval_interval=3, eval_iters=2)
    settings |= dict(warmup_iters=1, device="cpu", dtype="float32", compile=False, dataset=data, study_dir=folder)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    asked = (*flags, "--search=learning_rate=1e-3..1e-1:log, n_head=1|2", "--trials=2", "--seed=1,2", "--yes=True")
    outlook = script("study.py", *asked, "--dry_run=True").stdout
    assert "4 runs are left" in outlook and not folder.exists()
    said = script("study.py", *asked).stdout
    assert "the baseline" in said and "trial 2 of 2" in said
    (folder / "study.db").unlink()
    (folder / "table.csv").unlink()
    again = script("study.py", "report", folder).stdout
    assert (folder / "table.csv").read_text().count("learning_rate=") >= 2
    confirm = [line.strip() for line in again.splitlines() if line.startswith("    python study.py")]
    assert len(confirm) == ("no trial is better" not in again)
    for line in confirm:
        assert "--yes" not in line and "--search" not in line and "--seed=3..7" in line
