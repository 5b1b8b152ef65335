"""Names of other tools lead to settings that exist."""

import dataclasses

import pytest

import sample
import train
from fusedgpt.aliases import NAMES, PROCESSES, VALUES, settings_called

SETTINGS = {field.name: field for kind in (train.Settings, sample.Settings) for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("setting", NAMES)
def test_every_setting_exists_and_no_alias_is_one(setting):
    assert setting.partition("=")[0] in SETTINGS
    assert not set(NAMES[setting].split()) & SETTINGS.keys()


def test_the_number_of_processes_is_no_setting_and_no_alias():
    assert not {*PROCESSES.split()} & {*SETTINGS, *" ".join(NAMES.values()).split()}


def test_values_are_values_of_a_setting():
    taken = {choice for field in SETTINGS.values() for choice in getattr(field.type, "__args__", ())}
    assert set(VALUES.values()) - {"True", "False"} <= taken


def test_a_name_may_mean_a_setting_of_each_script():
    assert settings_called("LR", SETTINGS) == ["learning_rate"]
    assert settings_called("max_length", {"block_size"}) == ["block_size"]
    assert settings_called("fp16", {"dtype"}) == ["dtype=float16"]
    assert settings_called("no_compile", {"compile"}) == ["compile=False"]
    assert settings_called("lr", {"block_size"}) == settings_called("learning_rte", SETTINGS) == []
