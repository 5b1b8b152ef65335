"""The report of a study: its files, for people and for programs."""

import json
import math
import pathlib
import shutil

import pytest

from fusedgpt.errors import UserError
from fusedgpt.runs.metrics import record_of
from fusedgpt.studies import outcomes, report
from tests.conftest import small
from tests.fusedgpt.runs.test_report_page import page_of
from tests.fusedgpt.studies import fakes
from tests.fusedgpt.studies.by_hand import study, three

ADAMW, MUON = "learning_rate=0.01,optimizer=adamw", "learning_rate=0.01,optimizer=muon"


@pytest.fixture(autouse=True)
def cheap():
    with fakes.blank_figures():
        yield


def strict(text):
    """JSON without NaN or infinity, which other languages refuse."""

    def refuse(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def test_a_report_is_complete_and_leaves_nothing_half_written(tmp_path):
    paths = report.write(three(tmp_path))
    names = [path.name for path in paths]
    assert names[:4] == ["verdict.json", "table.csv", "table.md", "table.tex"] and names[-1] == "study.html"
    assert len(names) == len({*names}) and all(path.stat().st_size > 100 for path in paths)
    assert {path.name for path in tmp_path.iterdir()} == {*names, "study.json", "outcomes.jsonl", "runs"}


def test_the_verdict_is_strict_json(tmp_path):
    verdict = strict(report.write(three(tmp_path))[0].read_text())
    results = outcomes.read(tmp_path)
    assert (verdict["baseline"], verdict["metric"], verdict["missing"]) == (ADAMW, "val_loss", 1)
    muon, fast = verdict["comparisons"]
    assert (muon["variant"], muon["n"], muon["word"]) == (MUON, 3, "better")
    assert muon["mean"] == pytest.approx(-0.2) and muon["low"] < -0.2 < muon["high"]
    assert (fast["n"], fast["word"]) == (2, "no difference found")
    assert [each["stand_ins"] for each in verdict["summaries"]] == [0, 0, 1]
    assert verdict["sentences"] == results.sentences() and verdict["differences"] == []
    assert any("diverged" in each for each in verdict["warnings"])


def test_what_cannot_be_known_is_null(tmp_path):
    losses = {"a": {1: [4.0, 2.0]}, "b": {1: [4.0, 2.5]}}
    verdict = strict(report.write(study(tmp_path, {"a": {"n_layer": 1}, "b": {"n_layer": 2}}, losses))[0].read_text())
    (b,) = verdict["comparisons"]
    assert (b["mean"], b["low"], b["p"], b["smallest"]) == (0.5, None, None, None)
    assert verdict["summaries"][0]["sd"] is None


@pytest.mark.parametrize("missing", ["baseline", "variant", "all"])
def test_a_study_that_is_partly_done_gives_what_there_is(missing, tmp_path):
    fall = {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)}
    nothing = dict.fromkeys((1, 2))
    losses = {"a": nothing if missing in ("baseline", "all") else fall, "b": fall if missing == "baseline" else nothing}
    paths = report.write(study(tmp_path, {"a": {"n_layer": 1}, "b": {"n_layer": 2}}, losses))
    content, gone = page_of(paths[-1]), 4 if missing == "all" else 2
    assert f"{gone} of 4 runs are missing: the verdict is not final" in content["warnings"]
    assert content["headline"].startswith("No verdict yet") and (content["curves"] is None) == (missing == "all")
    assert strict(paths[0].read_text())["missing"] == gone


def test_a_report_can_be_written_again(tmp_path):
    first = {path.name: path.read_bytes() for path in report.write(three(tmp_path))}
    again = {path.name: path.read_bytes() for path in report.write(tmp_path)}
    texts = [name for name in first if name.endswith((".json", ".csv", ".md", ".tex"))]
    assert len(texts) == 4 and [first[name] for name in texts] == [again[name] for name in texts]
    assert first.keys() == again.keys()


def test_runs_of_train_py_are_reported(tmp_path, small_run, data):
    # what train.py writes, rather than what the other tests think that it writes
    losses = {"a": {1: None, 2: None}, "b": {1: None, 2: None}}
    variants = {"a": {"n_layer": 2}, "b": {"n_layer": 2}}
    settings = {"dataset": str(data), "batch_size": small(tmp_path, data).batch_size}
    folder, lines = study(tmp_path / "study", variants, losses, settings=settings), []
    for variant in variants:
        for seed in (1, 2):
            out_dir = pathlib.Path(shutil.copytree(small_run, outcomes.folder_of(folder, variant, seed)))
            record = record_of(out_dir)
            record["settings"]["seed"] = seed
            (out_dir / "run.json").write_text(json.dumps(record))
            lines.append({"variant": variant, "seed": seed, "status": "finished"})
    (folder / "outcomes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = page_of(report.write(folder)[-1])
    ends = [each.value for each in outcomes.read(folder).outcomes]
    assert len({*ends}) == 1 and math.isfinite(ends[0])
    assert content["curves"]["lines"][0]["mean"][-1] == pytest.approx(ends[0], rel=1e-5)
    assert content["curves"]["lines"][0]["x"]["tokens"] == [0, 5 * 64, 10 * 64]
    assert [each["link"] is not None for each in content["variants"][0]["runs"]] == [True, True]
    assert content["warnings"] == []


def test_what_cannot_be_reported_is_said(tmp_path):
    with pytest.raises(UserError, match=r"study.json does not exist"):
        report.write(tmp_path)
    fall = {seed: [4.0, 3.0, 2.0 + seed] for seed in (1, 2)}
    few = study(tmp_path, {"a": {"n_layer": 1}, "b": {"n_layer": 2}}, {"a": fall, "b": fall}, interval="bootstrap")
    content = page_of(report.write(few)[-1])
    assert any("too few pairs for the bootstrap" in each for each in content["warnings"])
