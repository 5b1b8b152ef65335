import dataclasses
import math
import re

import pytest

from fusedgpt.errors import UserError
from fusedgpt.settings import Settings
from fusedgpt.studies import command, space
from fusedgpt.studies.space import Choices, Range


def read(*args):
    pytest.importorskip("tyro")
    return command.read(list(args), "a search")


def parse(text, **shared):
    pytest.importorskip("tyro")
    return space.parse(text, dataclasses.replace(Settings(), **shared))


def test_a_space_has_ranges_and_choices():
    assert parse("learning_rate=1e-3..2e-2:log, beta2 = 0.9..0.99,n_layer=2..6:log, optimizer=adamw|muon") == {
        "learning_rate": Range(1e-3, 2e-2, log=True),
        "beta2": Range(0.9, 0.99, log=False),
        "n_layer": Range(2, 6, log=True),
        "optimizer": Choices(("adamw", "muon")),
    }
    assert parse("compile=True|False") == {"compile": Choices((True, False))}
    assert parse("attention=flash|mine.py:attend") == {"attention": Choices(("flash", "mine.py:attend"))}
    assert parse("n_layer=2|4|8") == {"n_layer": Choices((2, 4, 8))}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate=1e-3..fast", "learning_rate='fast' is not allowed: it takes a number"),
        ("jobs=1..3", "jobs cannot vary"),
        ("learning_rate=1e-2..1e-3", "must be numbers that go up"),
        ("learning_rate=1e-3..nan", "must be numbers that go up"),
        ("learning_rate=0..1e-3:log", "above 0 with :log"),
        ("dropout=0..1", "dropout=1.0 must be from 0 to just under 1"),
        ("n_layer=0..4", "n_layer=0 must be 1 or more"),
        ("learning_rate=1e-3", "must be different choices, a|b, or a range"),
        ("attention=a/b.py:f|a-b.py:f", "must be different choices"),  # their runs would share a folder
        ("compile=False..True", "must be numbers that go up, above 0 with :log, or choices"),
        ("learning_rate", "'learning_rate': write each setting once"),
        ("n_layer=1..2,n_layer=2..3", "write each setting once"),
        ("seed=1..3", "one for all trials"),
        ("out_dir=a|b", "each run has a folder of its own"),
        ("log_interval=1..9", "it is one for the whole study"),
        ("dataset=a|b", "one for all trials"),
    ],
)
def test_bad_input_is_refused(text, said):
    with pytest.raises(UserError, match=re.escape(said)):
        parse(text)


def test_the_baseline_is_the_config_moved_into_the_space():
    inside = read("--search=learning_rate=1e-4..1e-2,optimizer=adamw|muon", "--learning_rate=2e-3")
    assert space.prepared(inside).variants == {
        "learning_rate=0.002+optimizer=adamw": {"learning_rate": 2e-3, "optimizer": "adamw"}
    }
    outside = space.prepared(
        read("--search=learning_rate=1e-3..1e-2,optimizer=muon,n_layer=2..4".replace("=muon", "=muon|adamw"))
    )
    assert list(outside.variants) == ["learning_rate=0.001+optimizer=adamw+n_layer=4"]
    rounded = space.prepared(read("--search=learning_rate=1e-3..1e-2", "--learning_rate=0.00123456"))
    assert rounded.variants == {"learning_rate=0.001235": {"learning_rate": 0.001235}}


class Suggests:
    """A trial of Optuna's that takes the upper end, with more digits than a name shows."""

    def suggest_float(self, name, low, high, log):
        return high * (1 - 1e-9)

    def suggest_int(self, name, low, high, log):
        return high

    def suggest_categorical(self, name, choices):
        return choices[-1]


def test_a_name_tells_a_suggestion_whole():
    found = {
        name: axis.suggested(Suggests(), name)
        for name, axis in parse("learning_rate=1e-3..0.0123,n_layer=2..6").items()
    }
    assert found == {"learning_rate": 0.0123, "n_layer": 6} and type(found["n_layer"]) is int
    assert Range(1e-3, 0.01234567, False).nearest(1.0) == 0.01234567  # rounding must not leave the range
    assert math.isclose(Range(0.0, 1.0, False).nearest(1 / 3), 0.3333)
    assert Range(0.5, 2.0, False).nearest(None) == 0.5


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--search=n_layer=2..4", "--learning_rate=1e-3,2e-3"], "--search chooses the variants"),
        (["--search=n_layer=2..4", "--against=HEAD"], "--search chooses the variants"),
        (["--search=n_layer=2..4", "--jobs=2"], "jobs=2: a trial of a search runs its 1 seed"),
        (["--search=n_layer=2..4", "--trials=101", "--seed=1,2"], "this study has 202 runs"),
        (["--search=n_head=5..7"], "n_embd=768 cannot be split"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(args, said):
    with pytest.raises(UserError, match=re.escape(said)):
        space.prepared(read(*args))
