"""study.json: the plan, what continues it, and what makes a comparison exploratory."""

import re

import pytest

from fusedgpt.errors import UserError
from fusedgpt.settings import Settings
from fusedgpt.studies import design
from fusedgpt.studies.command import Request, StudySettings

VARIANTS = {"learning_rate=0.001": {"learning_rate": 1e-3}, "learning_rate=0.002": {"learning_rate": 2e-3}}
ADDED = {"learning_rate=0.004": {"learning_rate": 4e-3}}


def begun(folder):
    """Make `folder` that of a study with a run."""
    (folder / "outcomes.jsonl").write_text("{}\n")
    return folder


def plan(seeds=(1, 2), variants=VARIANTS, code="a", data="d", version="working tree", study=None, cores=None, **shared):
    request = Request(StudySettings(**study or {}), Settings(**shared), dict(variants), list(seeds), [])
    return design.of(request, "grid", "python study.py", {version: code}, {"text/train": data}, cores)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (dict(seeds=[1, 2, 3]), "seed 3 was added"),
        (dict(study=dict(metric="bits_per_byte")), "metric was 'val_loss', and is 'bits_per_byte' now"),
        (dict(study=dict(baseline="learning_rate=0.002")), "baseline was 'learning_rate=0.001', and is"),
    ],
)
def test_what_changes_after_the_first_run_makes_all_of_it_exploratory(tmp_path, asked, said):
    # the best of four metrics was a false finding in 13 to 16 % of studies, a moved baseline in 7 to 9 %; a look that
    # was planned when three of five seeds were in was one more
    plan().save(begun(tmp_path))
    now = design.continued(plan(**asked), tmp_path, asked.get("study", {}).get("baseline"))
    assert now.changes[0].startswith(said) and now.planned == [] and design.load(tmp_path).changes == []
    assert now.command == "python study.py\npython study.py"


def test_variants_that_are_added_leave_the_planned_ones_and_the_looks_alone(tmp_path):
    plan(seeds=[1, 2, 3], study=dict(metric="bits_per_byte", looks="2")).save(begun(tmp_path))
    now = design.continued(plan(variants=ADDED, seeds=[2]), tmp_path)  # KeyError: 'learning_rate=0.001'
    assert now.planned == ["learning_rate=0.002"] and now.baseline == "learning_rate=0.001"
    assert now.metric == "bits_per_byte" and now.looks == [2, 3] and list(now.variants) == [*VARIANTS, *ADDED]
    assert now.changes == ["the variant learning_rate=0.004 was added"]
    # the baseline of the study is none of these
    design.continued(plan(variants=ADDED, study=dict(baseline="learning_rate=0.002")), tmp_path, "learning_rate=0.002")
    again = design.continued(plan(cores=8), tmp_path)  # the same command changes nothing, with other cores too
    assert again.planned == ["learning_rate=0.002"] and again.changes == [] and again.threads is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(n_layer=2), "n_layer was 12, and is 2 now"),
        # after a commit, --against=HEAD named a third version, and runs of the old name were made with its code
        (dict(version="bbbbbbb"), "compared code was ['working tree'], and is ['bbbbbbb'] now"),
        (dict(code="abd"), "the code of working tree changed"),
        (dict(variants={"learning_rate=0.001": {"learning_rate": 1.1e-3}}), "the variant learning_rate=0.001 was"),
    ],
)
def test_another_study_is_refused_by_name(tmp_path, change, said):
    plan().save(begun(tmp_path))
    with pytest.raises(UserError, match=re.escape(said)):
        design.continued(plan(**change), tmp_path)


def test_a_folder_without_a_run_is_begun_anew_and_runs_need_their_design(tmp_path):
    # a mistake in the first command, such as a seed that is refused, used to stay in the folder for ever
    plan(seeds=[-1, 2]).save(tmp_path)
    assert design.continued(plan(n_layer=2), tmp_path).seeds == [1, 2]
    (begun(tmp_path) / "study.json").unlink()
    # the losses of other settings used to be its verdict
    with pytest.raises(UserError, match=r"study\.json, which says what the runs in .* are, is gone"):
        design.continued(plan(), tmp_path)
