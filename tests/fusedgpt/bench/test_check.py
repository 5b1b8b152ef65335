"""Two folders agree if their intervals meet."""

import pytest

from fusedgpt.bench import report
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import result
from tests.fusedgpt.bench.test_report import FASTER, REFUSED, write
from tests.launch import ROOT, fails, script


def slower(by):
    """`manual` as in FASTER, and `flash` that takes so many times as long as there."""
    return {"manual": FASTER["manual"], "flash": [by * ms for ms in FASTER["flash"]]}


@pytest.mark.parametrize(("by", "verdict"), [(1.0, "agrees"), (1.009, "agrees"), (1.03, "differs"), (0.97, "differs")])
def test_a_ratio_agrees_within_its_interval_and_one_per_cent(by, verdict):
    ((name, *_, found),) = report.compare([result(FASTER, {"T": 8})], [result(slower(by), {"T": 8})])
    assert (name, found) == ("8, flash", verdict)


def test_what_was_not_measured_is_compared_by_status():
    one, other = result({}, b=REFUSED, c=REFUSED, e={}), result({}, b=REFUSED, c={}, e={})
    found = {name: verdict for name, *_, verdict in report.compare([one], [other])}
    assert found == {"b": "agrees", "c": "differs"}


def test_too_few_laps_agree_with_nothing():
    few = {name: ms[:3] for name, ms in slower(2.0).items()}
    ((*_, verdict),) = report.compare([result(FASTER)], [result(few)])
    assert verdict == "too few laps"


def test_the_command(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder, by in zip(folders, (1.0, 2.0)):
        folder.mkdir()
        write(folder, result(slower(by)))
    text = script("bench.py", "check", *folders).stdout
    assert "| flash | 2 (2 to 2) | 1 (1 to 1) | differs |" in text and text.endswith("0 of 1 agree\n")
    assert text.count("a CPU, PyTorch 2.13") == 2
    assert "name two folders of one kind" in fails("bench.py", "check", folders[0])
    write(folders[1], result(FASTER, {"T": 8}))
    with pytest.raises(UserError, match="have no ratio in common"):
        report.agreement(folders)
    with pytest.raises(UserError, match="have no ratio in common"):  # it compared refusals alone, and said "agree"
        report.agreement([ROOT / "results" / "cpu_avx2" / "numerics"] * 2)
    text = (folders[1] / "rows.jsonl").read_text().replace('"benchmark": "ladder"', '"benchmark": "sweep"')
    (folders[1] / "rows.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"is of ladder, .* of sweep: name two of one"):
        report.agreement(folders)
