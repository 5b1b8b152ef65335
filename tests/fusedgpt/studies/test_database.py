"""Storages of a study: they are opened or refused, waited for and given up, and passwords are not shown."""

import sys

import pytest

from fusedgpt.errors import UserError
from fusedgpt.studies import database

optuna = pytest.importorskip("optuna")


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("nonsense", "write postgresql://user@host/db"),
        ("oracle9://me:secret@host/db", "write postgresql://user@host/db"),
        ("postgresql://me:secret@127.0.0.1:1/db", "cannot open the storage postgresql"),
        ("mysql+nodriver://me:secret@host/db", "write postgresql://user@host/db"),
        ("sqlite:////no/such/folder/x.db", "cannot open the storage sqlite:////no/such/folder/x.db"),
    ],
)
def test_a_storage_that_cannot_be_opened_is_named_without_its_password(storage, said):
    if storage.startswith("postgresql"):
        pytest.importorskip("psycopg")
    with pytest.raises(UserError) as failed:
        database.connect(storage, print)
    assert said in str(failed.value) and "secret" not in str(failed.value)


@pytest.mark.filterwarnings("ignore:.*experimental feature")
def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UserError, match=r"pip install 'optuna>=4.9'"):
        database.libraries()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "pymysql", None)
    with pytest.raises(UserError, match="pymysql for MySQL"):
        database.connect("mysql://me@host/db", print)


def test_a_trial_that_is_queued_again_keeps_its_settings_and_its_variant():
    study = optuna.create_study()
    trial = study.ask()
    rate = trial.suggest_float("learning_rate", 0, 1)
    trial.set_user_attr("variant", "a")
    database.queue_again(study, study.tell(trial, state=optuna.trial.TrialState.FAIL))
    again = study.ask()
    assert again.suggest_float("learning_rate", 0, 1) == rate and again.user_attrs == {"variant": "a"}


def test_passwords_stay_out_of_the_design():
    line = "python study.py --storage=postgresql://me:pass/word@host:5432/db --n_layer=2"
    assert database.without_password(line) == "python study.py --storage=postgresql://me:***@host:5432/db --n_layer=2"
    for same in ("--storage=postgresql://me@host/db", "--storage=sqlite:////a/b.db", "--sample_prompts=a:b@c"):
        assert database.without_password(same) == same


def test_a_database_that_is_gone_is_waited_for_and_given_up(monkeypatch):
    class Gone(Exception):
        pass

    class Dialect:
        loaded_dbapi = type("dbapi", (), {"OperationalError": Gone})
        left = 2

        def connect(self):
            self.left -= 1
            if self.left >= 0:
                raise Gone("refused")
            return "connection"

    monkeypatch.setattr(database.time, "sleep", lambda seconds: None)
    said = []
    patience = database.Patience(said.append)
    assert patience.connect(Dialect(), None, (), {}) == "connection"
    assert said == ["the database is gone (refused): waiting for it; runs go on"]
    monkeypatch.setattr(database, "PATIENCE_S", -1)
    for _ in range(2):
        with pytest.raises(UserError, match="nothing is lost: give the same command"):
            patience.connect(Dialect(), None, (), {})
