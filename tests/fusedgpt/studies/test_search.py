"""The space of a search, and searches with a train.py that learns nothing, in this process."""

import math
import re
import time

import pytest

from fusedgpt.errors import UserError
from fusedgpt.runs.metrics import record_of
from fusedgpt.settings import Settings
from fusedgpt.studies import command, outcomes, runner, search
from fusedgpt.studies.search import Axis
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.fakes import work

optuna = pytest.importorskip("optuna")
pytest.importorskip("tyro")

RATE = "--search=learning_rate=1e-6..1:log"  # the fake's loss is best at 0.01


def test_a_name_tells_a_suggestion_whole_and_the_baseline_is_the_config_moved_into_the_space():
    text = "learning_rate=3e-3..1e-2,n_layer=2..4,beta1=0.1..1"
    request = search.prepared(command.read([f"--search={text}", "--learning_rate=2e-3"], "a search"))
    assert list(request.variants.values()) == [{"learning_rate": 0.003, "n_layer": 4, "beta1": 0.9}]
    assert math.isclose(Axis(low=0.0, high=1.0).nearest(1 / 3), 0.3333)
    assert Axis(low=1e-3, high=0.01234567).nearest(1.0) == 0.01234567  # rounding must not leave the range
    assert Axis(low=0.5, high=2.0).nearest(None) == 0.5
    trial = optuna.trial.FixedTrial({"learning_rate": 0.00123456, "n_layer": 6, "optimizer": "muon"})
    space = search.space_of("learning_rate=1e-3..0.0123,n_layer=2..6,optimizer=adamw|muon", Settings())
    found = [axis.suggested(trial, name) for name, axis in space.items()]
    assert found == [0.001235, 6, "muon"]


@pytest.fixture
def code(tmp_path, monkeypatch):
    monkeypatch.setattr(search, "NAP_S", 0.1)
    return fakes.code(tmp_path / "code")


@pytest.fixture
def here():
    with fakes.in_this_process():
        yield


def in_file(folder):
    """The trials of a study that have a value, by Optuna itself."""
    trials = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'study.db'}").trials
    return [each for each in trials if each.state.name == "COMPLETE"]


def test_a_search_ends_with_its_trials_a_best_one_and_the_flags_that_confirm_it(tmp_path, code, here, capfd):
    results = work(tmp_path / "study", code, RATE, "--trials=5", "--seed=1,2", "--n_layer=3")
    assert [each.status for each in results.outcomes] == ["finished"] * 10
    assert results.design.baseline == next(iter(results.design.variants)) == "learning_rate=0.001"
    told = {each.user_attrs["variant"]: each.value for each in in_file(tmp_path / "study")}
    values = {name: sum(each.values()) / 2 for name, each in results.values().items()}
    assert values == pytest.approx(told) and len(told) == 5
    said = capfd.readouterr().out
    assert len(re.findall(r"^trial \d of 5, learning_rate=", said, re.M)) == 5 and "the best so far" in said
    best = min(values, key=values.get)
    found = search.sentences(results)
    assert found[0].startswith(f"the best of 5 trials that have a value is {best}: val_loss ")
    confirm = f"--learning_rate=0.001,{best.partition('=')[2]} --seed=3..7 --study_dir=out-confirm"
    assert f" give {confirm} in place of --search" in found[-1]
    assert command.read(confirm.split(), "").seeds == [3, 4, 5, 6, 7]
    assert (tmp_path / "study" / "table.csv").read_text().count("learning_rate=") == 5


def test_trials_that_diverge_or_whose_settings_do_not_fit_together_are_the_worst(tmp_path, code, here, capfd):
    results = work(tmp_path / "rates", code, "--search=learning_rate=0.01|0.1|99", "--trials=8", "--learning_rate=0.01")
    found = in_file(tmp_path / "rates")  # settings that come again are not run again
    assert len(found) == 8 and len(outcomes.statuses(tmp_path / "rates")) == len(results.outcomes) <= 3
    assert {each.value for each in found if each.params["learning_rate"] == 99.0} <= {math.inf}
    flags = ("--n_embd=64", "--n_head=4", "--max_iters=3", "--trials=6")
    results = work(tmp_path / "study", code, "--search=n_head=2..8,learning_rate=1e-3..1", *flags)
    assert {each["n_head"] for each in results.design.variants.values()} <= {2, 4, 8}
    unfit = [each for each in in_file(tmp_path / "study") if each.params["n_head"] not in (2, 4, 8)]
    assert unfit and {each.value for each in unfit} == {math.inf} and len(results.outcomes) == 6 - len(unfit)
    assert "is not tried: n_embd=64 cannot be split" in capfd.readouterr().out


def test_a_search_that_is_stopped_goes_on_where_it_was(tmp_path, code, here):
    folder = tmp_path / "study"
    with pytest.raises(UserError, match="cannot start: n_layer=13 is unlucky"):
        work(folder, code, RATE, "--n_layer=13")  # the baseline was lost
    first, stopped = outcomes.folder_of(folder, "learning_rate=0.001", 1), fakes.start(folder, code, RATE, pause=0.1)
    while runner.steps_of(first) < 3:
        time.sleep(0.01)
    stopped.terminate()
    assert "Give the same command to go on" in stopped.communicate()[0] and stopped.returncode == 143
    assert [each.status for each in work(folder, code, RATE, "--trials=2").outcomes] == ["finished"] * 2
    assert record_of(first)["settings"]["init_from"] == "resume" and len(in_file(folder)) == 2
    assert len(work(folder, code, RATE, "--trials=3").outcomes) == 3  # with more trials it goes on
    before = (folder / "outcomes.jsonl").read_bytes()
    work(folder, code, RATE, "--trials=3")
    assert (folder / "outcomes.jsonl").read_bytes() == before


def test_another_study_is_refused_by_name(tmp_path, code, here):
    storage = f"--storage=sqlite:///{tmp_path / 'shared.db'}"
    its = ("--trials=1", storage, "--max_iters=3")
    work(tmp_path / "study", code, RATE, *its)
    for folder in (tmp_path / "study", tmp_path / "elsewhere" / "study"):  # by study.json, and by the storage
        with pytest.raises(UserError, match=r"space was 'learning_rate=1e-6\.\.1:log', and is"):
            work(folder, code, "--search=learning_rate=1e-6..2:log", *its)
        with pytest.raises(UserError, match="n_layer was 12, and is 3 now"):
            work(folder, code, RATE, "--n_layer=3", *its)
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    optuna.create_study(study_name="study", storage=url).add_trial(optuna.create_trial(value=1.0))
    assert search.without_password("x postgresql://me:secret@host/db") == "x postgresql://me:***@host/db"
    with pytest.raises(UserError, match=r"has another program's study of the name study"):
        work(tmp_path / "theirs" / "study", code, RATE, f"--storage={url}")
    with pytest.raises(UserError, match=r"the storage fails: .*unable to open database file"):
        work(tmp_path / "other", code, RATE, f"--storage=sqlite:///{tmp_path / 'absent' / 'a.db'}")


def test_workers_with_folders_of_their_own_have_all_values(tmp_path, code, here):
    storage = f"--storage=sqlite:///{tmp_path / 'shared.db'}"
    folders = [tmp_path / where / "study" for where in ("here", "there")]
    flags = (RATE, "--seed=1,2", "--max_iters=3", storage)
    work(folders[0], code, *flags, "--trials=1")
    both = [work(folder, code, *flags, "--trials=3") for folder in folders[::-1]]
    assert both[0].values() == both[1].values() and [len(each.outcomes) for each in both] == [6, 6]
    assert {each.status for results in both for each in results.outcomes} == {"finished"}
    assert [len(list(folder.glob("runs/*/*/metrics.jsonl"))) for folder in folders] == [2, 4]  # nothing ran twice
