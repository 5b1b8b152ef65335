"""The tables of a study against numbers that were computed by hand."""

import csv
import math
import re
import shutil
import subprocess

import pytest

from fusedgpt.studies import outcomes, tables
from tests.fusedgpt.studies.by_hand import renamed, study, three

ADAMW, MUON = "learning_rate=0.01,optimizer=adamw", "learning_rate=0.01,optimizer=muon"
FAST = "learning_rate=0.1,optimizer=muon"
T_2 = 4.302652729911275  # 97.5 % of Student's t with 2 degrees of freedom
ODD = r"</script><b>_%&#${}~^\x|"


@pytest.fixture
def results(tmp_path):
    return outcomes.read(three(tmp_path))


def small(folder, names):
    """Two seeds of a variant for each name, whose losses fall from 2 in steps of 0.1."""
    variants = {f"v{n}": {"n_layer": n} for n in range(len(names))}
    losses = {name: {seed: [4.0, 2.0 - n / 10 + seed / 100] for seed in (1, 2)} for n, name in enumerate(variants)}
    return renamed(outcomes.read(study(folder, variants, losses)), dict(zip(variants, names)))


def test_the_numbers_are_those_computed_by_hand(results):
    baseline, muon, fast = tables.rows(results)
    assert (baseline.variant, baseline.n, baseline.stand_ins, baseline.verdict) == (ADAMW, 3, 0, "baseline")
    assert (baseline.mean, baseline.sd) == pytest.approx((2.1, 0.1)) and math.isnan(baseline.difference)

    # differences -0.20, -0.19 and -0.21: mean -0.2, standard deviation 0.01
    margin = T_2 * 0.01 / math.sqrt(3)
    assert (muon.difference, muon.low, muon.high) == pytest.approx((-0.2, -0.2 - margin, -0.2 + margin))
    # t = -0.2 / (0.01 / √3); with 2 degrees of freedom p = 1 - t / √(2 + t²). Holm doubles the smaller of two
    t = 0.2 / (0.01 / math.sqrt(3))
    assert muon.p == pytest.approx(2 * (1 - t / math.sqrt(2 + t * t))) and muon.verdict == "better"

    # its second run diverged and counts as the worst loss of the study, 4.2; its third is missing
    assert (fast.n, fast.stand_ins, fast.mean) == (2, 1, pytest.approx((2.3 + 4.2) / 2))
    assert fast.sd == pytest.approx((4.2 - 2.3) / math.sqrt(2))
    # differences 0.3 and 2.1: mean 1.2, standard error 0.9. With one degree of freedom p = 1 - 2/π · arctan(t)
    assert fast.difference == pytest.approx(1.2) and fast.p == pytest.approx(1 - 2 / math.pi * math.atan(1.2 / 0.9))
    assert math.isnan(fast.low) and math.isnan(fast.high) and fast.verdict == "no difference found"


def test_csv_has_all_digits_and_nothing_for_what_there_is_not(results):
    first, second, _ = csv.DictReader(tables.as_csv(results).splitlines())
    assert first["variant"] == ADAMW and [first[name] for name in ("difference", "low", "p")] == ["", "", ""]
    assert float(second["mean"]) == pytest.approx((1.80 + 1.91 + 1.99) / 3, rel=1e-15)
    assert "nan" not in tables.as_csv(results).lower()


def test_markdown_is_a_table_with_aligned_columns(results):
    lines = [line for line in tables.as_markdown(results).splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1  # it is printed to the console too
    head, rule, _, muon, fast = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert head == list(tables.HEAD) and all(re.fullmatch("-+:?", cell) for cell in rule)
    assert muon == [f"`{MUON}`", "3", "1.9000", "0.0954", "0", "-0.2000", "[-0.2248, -0.1752]", "0.00166", "better"]
    assert fast[:7] == [f"`{FAST}`", "2", "3.2500", "1.3435", "1", "+1.2000", ""]
    assert "Stand-ins are the values of runs that diverged: they count as the worst" in tables.note(results)
    results.design.metric, results.design.target_loss, results.design.interval = "tokens_to_loss", 2.0, "bootstrap"
    assert "diverged or did not reach the loss" in tables.note(results)
    assert "by the bootstrap, or Student's t for fewer than 10 pairs" in tables.note(results)


def test_a_variant_without_a_run_keeps_its_row(tmp_path):
    losses = {"a": {1: [4.0, 2.0], 2: [4.0, 2.1]}, "b": {1: None, 2: None}}
    results = outcomes.read(study(tmp_path, {"a": {"n_layer": 1}, "b": {"n_layer": 2}}, losses))
    assert tables.cells(results)[1] == ["b", "0", "", "", "0", "", "", "", "no verdict"]


def test_numbers_have_the_digits_that_they_need(tmp_path):
    # tokens to a loss were 1228800.0000, and a difference of 3e-6 was -0.0000
    variants = {"a": {"n_layer": 1}, "b": {"n_layer": 2}}
    close = {"a": {1: [4.0, 2.0], 2: [4.0, 2.000004]}, "b": {1: [4.0, 2.000003], 2: [4.0, 2.000001]}}
    same = {"a": {1: [4.0, 2.0], 2: [4.0, 2.1]}, "b": {1: [4.0, 2.0], 2: [4.0, 2.1]}}
    how = dict(metric="tokens_to_loss", target_loss=2.2)
    texts = {
        name: tables.cells(outcomes.read(study(tmp_path / name, variants, losses, **design)))[1]
        for name, losses, design in (("close", close, {}), ("same", same, {}), ("tokens", same, how))
    }
    assert texts["close"][2] == "2.0000020" and texts["close"][5] == "0.0000000"
    assert texts["same"][5] == "0.0000"
    assert texts["tokens"][2] == "46,184"  # of 50,000 to the evaluation, 0.9 and 1.8 / 1.9


def test_names_are_escaped(tmp_path):
    results = small(tmp_path, [ODD, "a|b", "c`d"])
    latex = tables.as_latex(results)
    row = next(line for line in latex.splitlines() if "script" in line and not line.startswith("%"))
    assert row.startswith(
        r"\textless{}/script\textgreater{}\textless{}b\textgreater{}"
        r"\_\%\&\#\$\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}x\textbar{} & 2 & "
    )
    assert tables.escaped("a_b %&#${}~^\\") == (r"a\_b \%\&\#\$\{\}\textasciitilde{}\textasciicircum{}\textbackslash{}")
    assert tables.escaped("[a]--b") == "{[}a{]}-{-}b"
    markdown = tables.as_markdown(results)
    assert "`a\\|b`" in markdown and "`` c`d ``" in markdown
    assert [row["variant"] for row in csv.DictReader(tables.as_csv(results).splitlines())] == [ODD, "a|b", "c`d"]


def test_latex_has_a_cell_for_each_column(results):
    lines = tables.as_latex(results).splitlines()
    assert lines[0].startswith(r"% needs \usepackage{booktabs}") and lines[1].startswith("% Values are validation loss")
    rows = [line for line in lines if line.endswith(r"\\")]
    assert len(rows) == 4 and all(line.count(" & ") == len(tables.HEAD) - 1 for line in rows)
    assert rows[0].startswith(r"learning\_rate, optimizer & $n$ &") and rows[1].startswith("0.01, adamw & 3 & 2.1000")
    assert "$-$0.2000 & {[}$-$0.2248, $-$0.1752{]}" in rows[2]


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="needs pdflatex")
def test_latex_compiles(tmp_path):
    (tmp_path / "table.tex").write_text(tables.as_latex(small(tmp_path / "study", [ODD, "[x]", "< & >"])))
    (tmp_path / "doc.tex").write_text(
        r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table}\end{document}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "doc.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
