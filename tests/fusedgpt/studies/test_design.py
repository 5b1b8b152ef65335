import dataclasses
import json

import pytest

from fusedgpt.errors import UserError
from fusedgpt.settings import Settings
from fusedgpt.studies import design
from fusedgpt.studies.command import Request, StudySettings, completed

VARIANTS = {"learning_rate=0.001": {"learning_rate": 1e-3}, "learning_rate=0.002": {"learning_rate": 2e-3}}


def begun(folder):
    """Make `folder` that of a study with a run."""
    folder.mkdir(exist_ok=True)
    (folder / "outcomes.jsonl").write_text("{}\n")
    return folder


def plan(seeds=(1, 2), variants=VARIANTS, code="abc", data="def", threads=None, **shared):
    request = Request(StudySettings(), Settings(**shared), dict(variants), list(seeds))
    return design.of(request, "grid", "python study.py", code, {"text/train": data}, threads)


def test_a_design_comes_back_from_the_disk(tmp_path):
    one = plan()
    assert one.baseline == "learning_rate=0.001"
    assert one.varied == ["learning_rate"]
    assert not {"learning_rate", "seed", "out_dir"} & one.settings.keys()
    assert one.settings["n_layer"] == 12
    one.save(tmp_path)
    assert design.load(tmp_path) == one
    assert design.load(tmp_path / "empty") is None


def test_a_study_takes_more_seeds_and_variants_and_keeps_what_auto_became(tmp_path):
    dataclasses.replace(plan(), settled={"attention": "flash"}).save(begun(tmp_path))
    more = {"learning_rate=0.002": {"learning_rate": 2e-3}, "learning_rate=0.004": {"learning_rate": 4e-3}}
    now = design.continued(plan(seeds=[2, 3], variants=more), tmp_path, looked=False)
    assert now.seeds == [1, 2, 3]
    assert list(now.variants) == ["learning_rate=0.001", "learning_rate=0.002", "learning_rate=0.004"]
    assert now.settled == {"attention": "flash"}
    assert now.looks == 0


def test_seeds_added_after_a_verdict_are_counted(tmp_path):
    # whoever adds seeds until a difference shows finds one too often
    plan().save(begun(tmp_path))
    again = design.continued(plan(), tmp_path, looked=True)
    assert again.looks == 0
    more = design.continued(plan(seeds=[1, 2, 3]), tmp_path, looked=True)
    assert more.looks == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(n_layer=2), "n_layer was 12, and is 2 now"),
        (dict(threads=1), "threads of a run .* was None, and is 1 now"),
        (dict(code="abd"), "the code changed"),
        (dict(data="deg"), "text/train changed since"),
        (dict(variants={"small": {"n_layer": 2}}), "varied was"),
        (dict(variants={"learning_rate=0.001": {"learning_rate": 1.1e-3}}), "the variant learning_rate=0.001 was"),
    ],
)
def test_another_study_is_refused_by_name(tmp_path, change, said):
    plan().save(begun(tmp_path))
    with pytest.raises(UserError, match=said):
        design.continued(plan(**change), tmp_path, looked=False)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "more": 1}'])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "study.json").write_text(content)
    with pytest.raises(UserError, match=r"study\.json is damaged"):
        design.load(tmp_path)


def test_the_file_is_strict_json(tmp_path):
    plan().save(tmp_path)
    assert json.loads((tmp_path / "study.json").read_text())["seeds"] == [1, 2]


def test_the_baseline_stays_when_variants_are_added(tmp_path):
    # all verdicts used to flip, without a word
    plan().save(begun(tmp_path))
    new = plan(variants={"learning_rate=0.004": {"learning_rate": 4e-3}})
    assert design.continued(new, tmp_path, looked=True).baseline == "learning_rate=0.001"
    earlier = dataclasses.replace(new, baseline="learning_rate=0.002")  # a variant that the command line does not name
    assert design.continued(earlier, tmp_path, looked=True, named=True).baseline == "learning_rate=0.002"
    with pytest.raises(UserError, match=r"baseline='x' is no variant: it can be learning_rate=0\.001, "):
        design.continued(dataclasses.replace(new, baseline="x"), tmp_path, looked=True, named=True)


def test_batches_that_are_added_are_evaluated_on_the_same_windows(tmp_path):
    def of(args):
        request = Request(StudySettings(), Settings(**args), {}, [1])
        sizes = {f"batch_size={n}": {"batch_size": n} for n in (12, args.get("batch_size", 24))}
        request.variants = {name: completed(request, changes) for name, changes in sizes.items()}
        return design.of(request, "grid", "python study.py", "", {}, None)

    first = of({})
    assert first.varied == ["batch_size"] and not {"batch_size", "eval_iters"} & first.settings.keys()
    first.save(begun(tmp_path))
    assert len(design.continued(of({"batch_size": 48, "eval_iters": 50}), tmp_path, looked=False).variants) == 3
    # eval_iters is no longer among what all runs share, so another number of windows would be no other study
    new = of({"batch_size": 48})
    del new.variants["batch_size=12"]
    with pytest.raises(UserError, match="an evaluation had 2400 windows, and has 9600 now"):
        design.continued(dataclasses.replace(new, baseline="batch_size=48"), tmp_path, looked=False)


def test_a_study_without_a_run_is_begun_anew(tmp_path):
    # a mistake in the first command, such as a seed that is refused, used to stay in the folder for ever
    plan(seeds=[-1, 2]).save(tmp_path)
    assert design.continued(plan(n_layer=2), tmp_path, looked=False).seeds == [1, 2]


def test_runs_without_their_design_are_no_part_of_a_new_study(tmp_path):
    # the losses of other settings used to be its verdict
    with pytest.raises(UserError, match=r"study\.json, which says what they are, is gone"):
        design.continued(plan(), begun(tmp_path), looked=False)


def test_another_commit_is_another_study(tmp_path):
    was, now = ({"ref": "HEAD~1", "commit": each * 40, "initial_weights": "equal"} for each in "ab")
    dataclasses.replace(plan(), against=was).save(begun(tmp_path))
    with pytest.raises(UserError, match="HEAD~1 was commit aaaaaaa, and HEAD~1 is bbbbbbb now: give --against=aaaaaaa"):
        design.continued(dataclasses.replace(plan(), against=now), tmp_path, looked=False)


@pytest.mark.parametrize(
    "edit",
    [
        dict(baseline="gone"),
        dict(metric="speed"),
        dict(interval="z"),
        dict(metric="tokens_to_loss"),
        dict(settings=None),
        dict(against="HEAD"),
        dict(variants=[]),
        dict(variants={}),
        dict(variants={"../../x": {}}, baseline="../../x"),
        dict(seeds="abc"),
        dict(seeds=[1, 1, 2]),
    ],
    ids=str,
)
def test_an_edited_file_is_refused(tmp_path, edit):
    (tmp_path / "study.json").write_text(json.dumps(dataclasses.asdict(plan()) | edit))
    with pytest.raises(UserError, match=r"study\.json is damaged: its "):
        design.load(tmp_path)
