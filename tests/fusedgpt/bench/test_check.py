"""Claims of published rows against rows measured here: what holds, what does not, and what cannot be known."""

import json
import shutil
import types

import numpy as np
import pytest
import torch

import bench
from fusedgpt.bench import check, kinds, ladder, numerics, report, sweep
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run
from tests.launch import ROOT

CPU = torch.device("cpu")


def rung(name, ms, loss=4.0, dtype="float32", **more):
    times = dict(median_ms=ms, p10_ms=0.98 * ms, p90_ms=1.02 * ms, samples_ms=[ms])
    return dict(kind="row", rung=name, status="measured", **times, final_loss=loss, ran={"dtype": dtype}) | more


def refused(name, reason="GPUs only"):
    return dict(kind="row", rung=name, status="refused", reason=reason)


def verdicts(published, here, obstacles=None):
    """{claim: (published, here, verdict)} of two sets of rows of a ladder."""
    found = check.compare(ladder.claims(published), ladder.claims(here), here, obstacles or {})
    return {name: (there, mine, verdict) for name, there, mine, verdict in found}


PUBLISHED = [rung("manual", 100.0), rung("flash", 50.0), rung("math", 100.0), refused("efficient")]
SPEED, LOSS = "flash: speed over manual", "flash: last loss beside manual"


@pytest.mark.parametrize(
    ("ms", "value", "verdict"),
    [
        (50.0, "2.00x (1.92-2.08)", "holds"),
        (54.0, "1.85x (1.78-1.93)", "holds"),  # within ten per cent
        (60.0, "1.67x (1.60-1.73)", "does not hold: the published value is 1.2 times this"),
        (20.0, "5.00x (4.80-5.20)", "does not hold: 2.5 times the published value"),
        # it read "0.80x (0.77-0.83)"
        (125.0, "1.25x as long (1.20-1.30)", "does not hold: the published value is 2.5 times this"),
    ],
)
def test_a_gain_holds_if_it_is_about_as_large_here(ms, value, verdict):
    found = verdicts(PUBLISHED, [rung("manual", 100.0), rung("flash", ms)])
    assert found[SPEED] == ("2.00x (1.92-2.08)", value, verdict)


def test_a_wide_spread_that_meets_the_published_one_is_noise():
    # it used to hold: a flash that was no faster than manual "held" a published 1.75x (0.97-1.83)
    wide = rung("flash", 70.0, p10_ms=45.0)
    found = verdicts(PUBLISHED, [rung("manual", 100.0), wide])
    assert found[SPEED][2] == "within noise: the published value is 1.4 times this"
    assert "1 holds, 1 within noise," in check.summary([("", *verdict) for verdict in found.values()])


def test_losses_and_refusals():
    here = [rung("manual", 100.0), rung("flash", 50.0, loss=4.5), rung("efficient", 40.0)]
    found = verdicts(PUBLISHED, here)
    assert found[LOSS] == ("the same", "another", "does not hold")
    assert found["efficient"] == ("refused", "runs", "does not hold")
    assert verdicts(PUBLISHED, [refused("efficient")])["efficient"][2] == "holds"
    other = verdicts(PUBLISHED, [refused("efficient", "out of shared memory")])["efficient"]
    assert other == ("refused", "refused", "holds: refused here because out of shared memory")


def test_what_is_not_known_here_says_why():
    slow = rung("flash", 50.0, disturbed=True, reason="it was slow")
    manual = rung("manual", 100.0)
    for here, verdict in (
        ([manual], "not measured yet"),
        ([manual, slow], "disturbed: it was slow"),
        ([manual, refused("flash", "no kernel")], "cannot be measured here: refused: no kernel"),
        ([manual, rung("flash", 50.0, dtype="float16")], "cannot be measured here: it runs in float16 here, in fl"),
        ([manual, refused("flash") | {"status": "parity failed", "reason": "1e-1"}], "does not hold: it fails parity"),
    ):
        assert verdicts(PUBLISHED, here)[SPEED][2].startswith(verdict)
    assert verdicts(PUBLISHED, [manual, slow])[LOSS][2] == "holds"  # a loss takes no time
    obstacle = {check.key_of(PUBLISHED[1]): "no GPU"}
    assert verdicts(PUBLISHED, [], obstacle)[SPEED][2] == "cannot be measured here: no GPU"
    assert check.measurable(ladder.claims(PUBLISHED), obstacle) == [PUBLISHED[0], PUBLISHED[2], PUBLISHED[3]]


def test_whole_rounds_here_are_enough_and_without_one_it_is_no_crossover_that_fails():
    # a claim whose own rows were calm "did not hold, at no length", if others were disturbed in each round
    def rounds_of(*each):
        return [row | {"round": n} for n, rows in enumerate(each, start=1) for row in rows]

    loud, calm = rung("math", 100.0, disturbed=True, reason="loud"), rung("math", 100.0)
    both = [rung("manual", 100.0), rung("flash", 50.0)]
    published = rounds_of([*both, calm], [*both, calm])
    one_whole = verdicts(published, rounds_of([*both, loud], [*both, calm]))
    assert one_whole[SPEED][2] == "holds"
    none_whole = verdicts(published, rounds_of([*both, loud], [*both, loud]))
    assert none_whole[SPEED][1:] == ("", "disturbed: no round here is whole")


def test_a_claim_about_other_rows_does_not_calm_a_disturbed_one():
    # "speed over transformers' fastest": flash there, and eager here because flash was disturbed
    slow, fast, ours = rung("eager", 100.0), rung("flash", 50.0), rung("ours", 40.0)
    loud = fast | {"disturbed": True, "reason": "loud"}
    there, mine = (check.Claim("fastest", [base, ours], 2.0, speed=True) for base in (fast, slow))
    ((*_, verdict),) = check.compare([there], [mine], [slow, loud, ours], {})
    assert verdict == "disturbed: loud"


def test_a_disturbed_row_claims_no_speed():
    rows = [rung("manual", 100.0), rung("flash", 50.0, disturbed=True, reason="loud")]
    assert [claim.name for claim in ladder.claims(rows)] == [LOSS]


def swept(name, *ms, spread=1.0):
    """Rows of a sweep over lengths 1, 2, 4, …: the times of a kernel, and their p90 as a multiple of them."""
    times = [dict(T=2**n, median_ms=t, p10_ms=t / spread, p90_ms=t * spread) for n, t in enumerate(ms)]
    ran = dict(status="measured", ran={"dtype": "float32"}, samples_ms=[1.0])
    return [dict(part="attention", attention=name, T=each.pop("T"), **ran, **each) for each in times]


@pytest.mark.parametrize(
    ("flash", "spread", "here", "verdict"),
    [
        ((2, 3, 4), 1.0, "from T = 2 on", "holds"),
        ((2, 5, 6), 1.0, "from T = 4 on", "does not hold"),
        ((2, 4.1, 6), 1.2, "from T = 4 on", "within noise"),  # at T = 2 the times overlap
        ((2, 4.1, 15), 1.2, "at no length", "within noise"),
        ((2, 4, 32), 1.0, "at no length", "does not hold"),
    ],
)
def test_a_crossover_is_a_claim(flash, spread, here, verdict):
    # noise at one length used to be another crossover, and that did not hold
    there, mine = swept("manual", 1, 4, 16) + swept("flash", 2, 3, 4), swept("manual", 1, 4, 16)
    mine += swept("flash", *flash, spread=spread)
    found = check.compare(check.published(sweep, there, ""), sweep.claims(mine), mine, {})
    (line,) = (line for line in found if "flash is faster than manual" in line[0])
    assert line[1:] == ("from T = 2 on", here, verdict)


def test_only_names_what_a_claim_is_about():
    # --only=2 on a sweep used to measure every length, for the sake of the crossovers
    there = swept("manual", 1, 4, 16) + swept("flash", 2, 3, 4)

    def asked(only):
        claims = check.published(sweep, there, only)
        lengths = sorted({row["T"] for row in check.measurable(claims, {})})
        return [claim.name for claim in claims], lengths

    assert asked("2") == (["attention, T = 2, flash: speed over manual"], [2])
    assert asked("flash")[0] == [f"attention, T = {T}, flash: speed over manual" for T in (1, 2, 4)]
    assert asked("flash,manual") == asked("") and "attention: flash is faster than manual" in asked("")[0]
    with pytest.raises(UserError, match="only='manual' names no row that a claim is about, only baselines"):
        asked("manual")


@pytest.mark.parametrize("folder", ["ladder", "ladder_124M", "sweep", "prefill", "numerics", "max_batch"])
def test_claims_of_published_rows_are_what_their_samples_say_and_hold_against_themselves(folder):
    header, lines = report.read(ROOT / "results" / "cpu_amx" / folder)
    kind, rows = kinds.kind_of(header), report.rows_in(lines)
    claims = check.published(kind, rows, "")
    assert claims and len({claim.name for claim in claims}) == len(claims)
    for claim in claims:
        # max_batch has a ratio of tokens/s, and the ladder two baselines (test_ladder.py)
        if claim.low is not None and not claim.whole and not folder.startswith(("max_batch", "ladder")):
            base, row = (np.percentile(row["samples_ms"], [10, 50, 90]) for row in claim.rows)
            spread = base[1] / row[1], base[0] / row[2], base[2] / row[0]
            assert (claim.value, claim.low, claim.high) == pytest.approx(spread)
    assert {verdict for *_, verdict in check.compare(claims, kind.claims(rows), rows, {})} == {"holds"}
    s, device, assumed = kinds.published_settings(header, rows)
    assert device.type == "cpu" and s.max_seconds is None and "max_iters" not in assumed
    assert getattr(s, "dtype", "bfloat16") == "bfloat16"  # what auto was there


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, data):
    """The folder of a small benchmark. Tests only read it."""
    run("numerics", folder := tmp_path_factory.mktemp("pairs"), data, only="* = math")
    return folder / "results" / "numerics"


def test_a_folder_is_not_checked_against_itself(tmp_path, pairs):
    # its own rows "held", or were moved aside as rows of another machine
    published = shutil.copytree(pairs, tmp_path / "results" / "numerics")
    before = {path.name: path.read_bytes() for path in published.iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "results")
    for results in (tmp_path / "results", tmp_path / "link"):
        with pytest.raises(UserError, match="is the published folder itself: name another for the new rows"):
            bench.check_folder([str(published), f"--results={results}"])
    assert {path.name: path.read_bytes() for path in published.iterdir()} == before


def test_a_cpu_without_bfloat16_is_an_obstacle_and_so_is_a_row_that_is_no_more(monkeypatch):
    monkeypatch.setattr(check, "cpu_multiplies_bfloat16", lambda: False)
    rows = [rung("manual", 1.0, dtype="bfloat16"), rung("math", 1.0), rung("gone", 1.0)]
    wanted = {check.key_of(row): row for row in rows}
    s = types.SimpleNamespace(dtype="bfloat16")
    found = check.obstacles(wanted, s, CPU, [{"rung": "manual"}, {"rung": "math"}])
    assert [row["rung"] for key, row in wanted.items() if key in found] == ["manual", "gone"]


def test_from_the_command_line_and_again(tmp_path, pairs, capsys):
    args = [str(pairs), f"--results={tmp_path / 'check'}", "--only=manual = math"]
    capsys.readouterr()
    bench.check_folder(args)
    out = capsys.readouterr().out
    assert "manual = math, float32: allclose" in out and "3 claims: 3 holds." in out and "scaled before" not in out
    text = (tmp_path / "check" / "numerics" / "check.md").read_text()
    assert "| manual = math, float32: allclose | no | no | holds |" in text and "**3 claims: 3 holds.**" in text
    bench.check_folder(args)
    assert "3 of 3 rows are there already" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"environment": {"device": "NVIDIA H200", "torch": "2.13.0", "cuda": "13.0", "commit": "1"}}, "is not here"),
        ({"settings": {"repeats": "many", "device": "auto"}}, "the header: repeats='many' is not allowed"),
    ],
)
def test_settings_that_cannot_run_here_end_no_check(tmp_path, pairs, capsys, change, reason):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    path = tmp_path / "numerics" / "rows.jsonl"
    path.parent.mkdir()
    header, *lines = map(json.loads, (pairs / "rows.jsonl").read_text().splitlines())
    settings = header["settings"] | {"device": "auto"} | change.get("settings", {})
    lines = [{k: v for k, v in line.items() if k != "machine"} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in [header | change | {"settings": settings}, *lines]))
    bench.check_folder([str(path.parent), f"--results={tmp_path / 'check'}"])
    out = capsys.readouterr().out
    assert "none can be measured here" in out and "6 cannot be measured here" in out and reason in out


def test_rows_that_are_none_of_this_version_end_in_a_sentence(tmp_path):
    with pytest.raises(UserError, match="of another version: KeyError: 'final_loss'"):
        old = [{k: v for k, v in row.items() if k != "final_loss"} for row in PUBLISHED]
        check.published(ladder, old, "")
    with pytest.raises(UserError, match="of another version: KeyError: 'errors'"):
        check.published(numerics, [dict(path="flash", status="measured", overflows=False)], "")
    (tmp_path / "rows.jsonl").write_text('{"run": "study"}\n')
    with pytest.raises(UserError, match="does not begin with the header of a benchmark"):
        bench.check_folder([str(tmp_path)])
    with pytest.raises(UserError, match="name one published folder"):
        bench.check_folder([])


@pytest.mark.parametrize("header", [{"environment": "a laptop"}, {"settings": None}])
def test_a_damaged_header_is_one_sentence(tmp_path, header):
    # KeyError: 'threads', TypeError: unhashable type; test_rows.py has damaged rows
    whole = {"benchmark": "ladder", "command": "", "set": [], "settings": {}, "environment": {}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(whole | header) + "\n")
    with pytest.raises(UserError, match="does not begin with the header"):
        report.read(tmp_path)
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(whole), "garbage", json.dumps(PUBLISHED[0]), ""]))
    with pytest.raises(UserError, match="1 lines hold no JSON object"):  # claims were missing without a word
        report.read(tmp_path)
    assert report.machine(whole, [], ladder) == "an unknown device, no date recorded"
    for threads, said in ((1, "1 thread, "), (2, "2 threads, ")):  # it said "1 threads"
        assert said in report.machine({"settings": {}, "environment": {"threads": threads}}, [], ladder)
