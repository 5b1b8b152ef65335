"""study.py as its users call it, and train.py's runs in it, which are in this process."""

import shutil

import pytest

from fusedgpt.runs.metrics import LoggedRun, record_of
from fusedgpt.studies import outcomes
from tests.conftest import TINY, assert_same_bytes, weights
from tests.fusedgpt.studies import fakes
from tests.launch import copied, fails, script

SMALL = TINY | dict(gradient_accumulation_steps=1, max_iters=12, eval_interval=6, eval_iters=2, warmup_iters=1)
SMALL |= dict(lr_decay_iters=12, min_lr=0.0, log_interval=1, device="cpu", dtype="float32", compile=False)
RATES = ("--learning_rate=1e-2,1e-9", "--seed=1..3")


@pytest.fixture(scope="module", autouse=True)
def cheap():
    with fakes.in_this_process():
        yield


def study(folder, data, *args, check=True):
    shared = {"study_dir": folder, "dataset": data, **SMALL}
    return script("study.py", *(f"--{name}={value}" for name, value in shared.items()), *args, check=check)


@pytest.fixture(scope="module")
def done(tmp_path_factory, data):
    """A study of two rates, one of which learns nothing, with three seeds, and what it said."""
    folder = tmp_path_factory.mktemp("studies") / "rates"
    return folder, study(folder, data, *RATES).stdout


def test_a_study_ends_with_a_verdict(done):
    _, said = done
    assert "learning_rate=1e-09 is worse than learning_rate=0.01: val_loss " in said
    assert "| `learning_rate=0.01` " in said  # the table


def test_runs_differ_in_what_varies_and_in_nothing_else(done):
    results = outcomes.read(done[0])
    assert results.warnings() == []
    runs = {(o.variant, o.seed): LoggedRun(outcomes.folder_of(done[0], o.variant, o.seed)) for o in results.outcomes}
    settings = [each.record["settings"] for each in runs.values()]
    varied = {name for name in settings[0] if len({str(each[name]) for each in settings}) > 1}
    assert varied == {"learning_rate", "seed", "out_dir", "attention"}  # auto in the first run, settled in the others
    assert len({each.record["attention"] for each in runs.values()}) == 1
    # pairs share the batches and the initial weights: the first loss is equal to the bit
    first = {job: each.train["loss"][0] for job, each in runs.items()}
    for seed in (1, 2, 3):
        assert first["learning_rate=0.01", seed] == first["learning_rate=1e-09", seed]


def test_a_run_of_a_study_is_the_run_that_its_settings_make(done, tmp_path):
    out_dir = outcomes.folder_of(done[0], "learning_rate=1e-09", 2)
    settings = record_of(out_dir)["settings"] | {"out_dir": tmp_path, "init_from": "scratch"}
    script("train.py", *(f"--{name}={value}" for name, value in settings.items() if value is not None))
    assert_same_bytes(weights(tmp_path), weights(out_dir))


def test_the_same_command_again_makes_no_run_and_other_settings_are_refused(done, data):
    folder, _ = done
    before = (folder / "outcomes.jsonl").read_bytes()
    study(folder, data, *RATES)
    assert (folder / "outcomes.jsonl").read_bytes() == before
    said = study(folder, data, *RATES, "--weight_decay=0.3", check=False)
    assert "weight_decay was 0.1, and is 0.3 now" in said.stderr and said.returncode == 1


def test_a_study_takes_turns_in_planned_looks_and_ends_when_it_is_decided(tmp_path, data):
    flags = ("--learning_rate=1e-2,1e-9", "--seed=1..4", "--looks=2,3")
    said = study(tmp_path / "study", data, *flags).stdout
    results = outcomes.read(tmp_path / "study")
    assert ("decided after" in said) == (results.counted < 4) and results.comparisons[0].word == "worse"
    assert results.warnings() == [] and results.comparisons[0].n == results.counted


def test_two_versions_are_compared(tmp_path, data):
    copy = tmp_path / "copy"
    copied(copy)
    said = study(tmp_path / "study", data, f"--against={copy}", "--seed=1,2").stdout
    assert "no difference found between working tree and copy: val_loss +0 (95 % interval unknown" in said
    assert outcomes.read(tmp_path / "study").warnings() == []


def test_a_report_without_runs_or_outcomes_replaces_nothing(done, tmp_path):
    folder = shutil.copytree(done[0], tmp_path / "study", ignore=shutil.ignore_patterns("runs"))
    verdict = (folder / "verdict.json").read_bytes()
    assert "is worse than" in script("study.py", "report", folder).stdout
    assert (folder / "verdict.json").read_bytes() == verdict
    (folder / "outcomes.jsonl").unlink()
    assert "nothing to report" in fails("study.py", "report", folder)
    assert (folder / "verdict.json").read_bytes() == verdict


def test_bad_input_ends_in_one_sentence(tmp_path, data):
    folder, its = f"--study_dir={tmp_path / 'study'}", f"--dataset={data}"
    for args, said in [
        ((folder, "--dataset=nowhere", "--seed=1,2"), "dataset='nowhere' is no folder"),
        ((folder, its, "--against=HEAD", "--seed=1", "--n_layer=1,2"), "leave the settings the same"),
        (("report", "--help"), "name the folder of a study"),
    ]:
        assert said in fails("study.py", *args)
    assert not (tmp_path / "study" / "runs").exists()
