"""bench.py as users run it: small, on the CPU, each kind to its report and its figures."""

import json
import types

import pytest
import torch

import bench
from parts import kernels, machine
from parts.attention import ATTENTION
from parts.bench import child, ladder, max_batch, numerics, report, sweep
from parts.bench.rows import ParityError
from parts.errors import UserError
from parts.files import read_jsonl
from tests.conftest import fails, flags, script, small

CPU = torch.device("cpu")
TINY = dict(max_iters=8, eval_interval=100, eval_iters=1)


def settings(tmp_path, data, **changes):
    """Settings of bench.py with a tiny model."""
    own = dict(vocab_size=65, repeats=2, warmup=1, lengths="32,64", heads="2x16", memory_gb=0.5)
    return bench.Settings(**{**vars(small(tmp_path / "out", data, **TINY)), **own, **changes})


def bench_flags(tmp_path, data, **changes):
    given = flags(settings(tmp_path, data, **changes, results=str(tmp_path / "results")))
    return [flag for flag in given if not flag.startswith(("--out_dir", "--attention", "--vocab_multiple"))]


def rows_of(tmp_path, kind):
    return [row for row in read_jsonl(tmp_path / "results" / kind / "rows.jsonl") if row["kind"] == "row"]


def test_the_ladder_from_the_command_line_and_again(tmp_path, data, capsys):
    args = bench_flags(tmp_path, data, only="manual,flash,efficient")
    bench.main("ladder", args)
    got = {row["rung"]: row for row in rows_of(tmp_path, "ladder")}
    assert {name for name, row in got.items() if row["status"] == "refused"} == {"efficient"}
    base, flash = got["manual"], got["flash + padded vocabulary"]
    assert base["kernel"]["forward"] == ["unfused"] and flash["kernel"]["forward"] == ["flash"]
    assert base["samples"] == len(base["samples_ms"]) == 3  # 8 steps, 5 of them warm-up
    assert flash["ran"]["padded_vocab_size"] == 128 and base["ran"]["padded_vocab_size"] == 65
    assert flash["final_loss"] == pytest.approx(base["final_loss"], rel=1e-4)  # same weights, same batches
    assert base["tokens_per_s"] == pytest.approx(1e3 * 64 / base["median_ms"])
    assert base["errors"].keys() == {"y", "dq", "dk", "dv"}
    text = (tmp_path / "results" / "ladder" / "report.md").read_text()
    assert (
        "| efficient | refused: PyTorch has this kernel on GPUs only |  | 119 ms, 20.17 % |" in text
        and "64.37 %" in text
    )
    assert not list((tmp_path / "results").rglob("*.pt"))
    before = rows_of(tmp_path, "ladder")
    capsys.readouterr()
    bench.main("ladder", args)
    assert f"{len(before)} of {len(before)} rows are there already" in capsys.readouterr().out
    assert rows_of(tmp_path, "ladder") == before


def test_manual_stays_manual_under_compile(tmp_path, data):
    # K5: Inductor may rewrite hand-written attention into SDPA
    if reason := machine.can_compile(CPU):
        pytest.skip(reason)
    s = settings(tmp_path, data, compile=True)
    row = ladder.measure({"rung": "manual"}, s, CPU, tmp_path)
    assert row["ran"]["compile"] is True
    assert row["kernel"]["forward"] == row["kernel"]["backward"] == ["unfused"]
    assert not [op for op in row["kernel"]["ops"] if "flash" in op or "efficient" in op or "cudnn" in op]


def test_each_rung_changes_one_thing():
    changed = {
        "manual, eager": "manual",
        "math": "manual",
        "efficient": "manual",
        "flash": "manual",
        "flash + padded vocabulary": "flash",
        "cudnn + padded vocabulary": "flash + padded vocabulary",
        "flex + padded vocabulary": "flash + padded vocabulary",
        "auto + padded vocabulary": "flash + padded vocabulary",
        "flash + padded vocabulary, eager": "flash + padded vocabulary",
        "manual, float32, eager": "manual, eager",
    }
    for name, other in changed.items():
        assert len(ladder.RUNGS[name].items() ^ ladder.RUNGS[other].items()) in (1, 2), name  # one key
    assert ladder.RUNGS["manual, again"] == ladder.RUNGS["manual"]
    assert changed.keys() | {"manual", "manual, again"} == ladder.RUNGS.keys()


def test_per_cent_are_counted_as_the_article_counts():
    # its own table: 6.71 (rounded from other digits), 20.16, 26.54, 64.37
    a = ladder.ARTICLE
    got = [ladder.faster(a["manual"], a[name]) for name in ("math", "efficient", "flash", ladder.PADDED)]
    assert got == pytest.approx([6.71, 20.16, 26.54, 64.37], abs=0.02)
    assert ladder.faster(100, 200) == -50


def test_parity_comes_before_the_run(tmp_path, data, monkeypatch):
    def wrong(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * 1.5

    def never(*_):
        raise AssertionError("a kernel that fails parity was timed")

    monkeypatch.setattr(kernels, "ATTENTION", {**ATTENTION, "manual": wrong})
    monkeypatch.setattr(sweep, "ATTENTION", {**ATTENTION, "manual": wrong})
    monkeypatch.setattr(child, "train", never)
    monkeypatch.setattr(sweep, "timed", never)
    s = settings(tmp_path, data)
    with pytest.raises(ParityError):
        ladder.measure({"rung": "manual"}, s, CPU, tmp_path)
    for spec in ({"part": "attention", "heads": "2x16", "pass": "forward"}, {"part": "training"}):
        with pytest.raises(ParityError):
            sweep.measure({**spec, "T": 32, "attention": "manual"}, s, CPU, tmp_path)


# sweep


def test_the_sweep_alone_and_end_to_end(tmp_path, data):
    bench.main("sweep", bench_flags(tmp_path, data, only="manual,flash"))
    got = rows_of(tmp_path, "sweep")
    assert all(row["status"] == "measured" for row in got), got
    alone = [row for row in got if row["part"] == "attention"]
    assert len(alone) == 2 * 2 * 2 and len(got) == len(alone) + 4  # lengths, directions, kernels; and training
    for row in alone:
        assert row["kernel"]["forward"] == [{"manual": "unfused"}.get(row["attention"], "flash")]
        shape, backward = (1, 2, row["T"], 16), row["pass"] != "forward"
        count = 2 * shape[1] * row["T"] ** 2 * 16 * (3.5 if backward else 1)
        assert row["tflops"] == pytest.approx(count / row["median_ms"] / 1e9)
        assert set(row["errors"]) == ({"y", "dq", "dk", "dv"} if backward else {"y"})
    for name in ("report.md", "speedup.png", "memory.png", "training.png"):
        assert (tmp_path / "results" / "sweep" / name).stat().st_size > 300
    assert "end to end" in (tmp_path / "results" / "sweep" / "report.md").read_text()


def test_memory_is_counted_above_what_was_held(tmp_path, data):
    s = settings(tmp_path, data)
    spec = {"part": "attention", "heads": "2x64", "pass": "forward", "T": 2048}
    manual, flash = (sweep.measure({**spec, "attention": n}, s, CPU, tmp_path) for n in ("manual", "flash"))
    scores = 2 * 2048 * 2048 * 4
    assert 2 * scores < manual["peak_memory"] < 4 * scores  # before and after the mask, at least
    assert 2 * 2048 * 64 * 4 < flash["peak_memory"] < scores / 4


def test_where_one_kernel_overtakes_another():
    def timed(name, *ms):
        return [{"attention": name, "T": 2**n, "median_ms": t, "status": "measured"} for n, t in enumerate(ms)]

    rows = timed("manual", 1, 2, 8, 16) + timed("flash", 2, 3, 4, 5) + timed("math", 3, 1, 9, 17)
    found = sweep.crossovers([*rows, {"attention": "cudnn", "T": 1, "status": "refused"}])
    assert found["manual", "flash"] == 4 and ("flash", "manual") not in found
    assert found["math", "manual"] == 4  # it was ahead at 1 already, but not to stay
    assert found["math", "flash"] == 4


def test_flex_is_swept_at_few_lengths():
    # it compiles anew for each length, and PyTorch stops at the eighth
    s = types.SimpleNamespace(heads="2x16", lengths="256-512-64")
    lengths = {spec["T"] for spec in sweep.plan(s, CPU) if spec["attention"] == "flex"}
    assert lengths == {256, 512}


# numerics


def test_scaled_before_is_attention():
    from parts import parity

    for dtype in (torch.float32, torch.float16):
        errors = parity.errors(numerics.scaled_before, (1, 2, 33, 16), CPU, dtype)
        assert parity.passes(errors, dtype)


def test_float16_overflows_where_the_scale_comes_after_the_product(tmp_path, data):
    # K12
    s, spec = settings(tmp_path, data), {"inputs": "large", "dtype": "float16"}
    found = {
        path: numerics.measure({**spec, "path": path}, s, CPU, tmp_path)["overflows"]
        for path in ("manual", "scaled before", "math", "flash")
    }
    assert found == {"manual": True, "scaled before": False, "math": False, "flash": False}


def test_the_articles_appendix(tmp_path, data):
    s = settings(tmp_path, data)
    for pair, close in (("scaled before = math", True), ("manual = math", False)):
        row = numerics.measure({"pair": pair, "dtype": "float32"}, s, CPU, tmp_path)
        assert row["allclose"] is close and row["reproduced"]


def test_numerics_to_its_report(tmp_path, data):
    bench.main("numerics", bench_flags(tmp_path, data, only="float32"))
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    assert "| efficient | refused |" in text
    assert "| scaled before = math | float32 | yes | yes | yes | 0.0e+00 |" in text
    assert (tmp_path / "results" / "numerics" / "errors.png").exists()
    row = rows_of(tmp_path, "numerics")[0]
    assert row["samples"] == 2 and row["peak_memory"] >= 0 and row["kernel"]["forward"] == ["unfused"]


# max_batch


@pytest.mark.parametrize("guess", [0, 1, 10, 39, 100])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8, 24, 39])
def test_the_largest_is_found_by_doubling_and_bisection(most, guess):
    tried = []

    def fits(n):
        tried.append(n)
        return n <= most

    assert max_batch.largest(fits, guess) == most
    assert len(tried) == len(set(tried)) <= 2 * max(most, guess).bit_length() + 1


def test_the_estimate_is_near_a_hand_count(tmp_path, data):
    # what the hand-written path alone keeps for backward in float32: the softmax of its scores, in every layer
    s = settings(tmp_path, data, block_size=128, n_embd=32, dtype="float32")
    each = {}
    for name in ("manual", "flash"):
        s.attention = name
        fixed, each[name] = max_batch.estimate(s, torch.float32, CPU)
        weights = 4 * 4 * (12 * 2 * 32**2 + (128 + 128) * 32)  # float32, gradient, AdamW's two; LayerNorms aside
        assert 0.75 * weights < fixed < 1.5 * weights
    kept = 2 * 2 * 128 * 128 * 4
    assert 0.9 * kept < each["manual"] - each["flash"] < 2.5 * kept


def test_a_budget_ends_an_allocation_on_a_cpu(tmp_path, data):
    s = settings(tmp_path, data, batch_size=4096, block_size=64)
    held, resident = child.held_by_pytorch()
    assert resident > 0
    with pytest.raises(MemoryError):
        child.train(s.of_train(), tmp_path / "run", held + 2**28)
    with pytest.raises(UserError, match="cannot be split over"):
        child.train({**s.of_train(), "n_head": 3}, tmp_path / "run")


def test_max_batch_searches_then_trains_for_its_time(tmp_path, data, monkeypatch):
    sizes, done = [], {}

    def train(settings, out_dir, memory=None):
        sizes.append(settings["batch_size"])
        if settings["batch_size"] > 5 or (settings["batch_size"] == 5 and settings["max_seconds"]):
            raise MemoryError("full")
        done.update(settings)
        step = {"kind": "train", "ms": 100.0, "peak_memory": 7, "loss": 1.0, "mfu": 0.5, "tokens_per_s": 10.0}
        ran = dict.fromkeys(("attention", "dtype", "compile", "padded_vocab_size", "device"))
        record = {"tokens_per_step": 64, "mfu": {"peak_flops": 1.0, "peak_source": ""}, "receipt": {}, **ran}
        return record, [*[step] * 6, {"kind": "eval", "val_loss": 2.5}]

    monkeypatch.setattr(child, "train", train)
    monkeypatch.setattr(child, "held_by_pytorch", lambda: (100, 50))
    s = settings(tmp_path, data, max_seconds=60, eval_iters=10)
    monkeypatch.setattr(max_batch, "estimate", lambda *_: (2**28, 2**28 // 6))
    row = max_batch.measure({"attention": "manual"}, s, CPU, tmp_path)
    assert sizes == [6, 3, 4, 5, 5, 4]  # from the estimate; and the longer run had no room at 5
    assert row["largest"] == 4 and row["curve"] == [[pytest.approx(0.6), 2.5]]
    assert done["max_seconds"] == 60 and done["eval_interval"] == 50 and done["eval_iters"] == 10
    assert row["estimate"]["largest"] == 6 and [t["fits"] for t in row["trials"]] == [False, True, True, True]


# the command line


def test_presets_are_the_articles_on_a_gpu_and_small_on_a_cpu():
    blog = bench.preset("ladder", gpu=True)
    assert (blog.n_layer, blog.n_head, blog.n_embd, blog.batch_size, blog.block_size) == (12, 12, 768, 12, 1024)
    assert bench.preset("prefill", gpu=True).models.startswith("mistral-7b,llama-3-8b,phi-2")
    assert bench.preset("sweep", gpu=True).repeats == 256
    for kind in bench.KINDS:
        assert bench.preset(kind, gpu=False).n_layer == 4


def test_the_articles_setting_by_config_file(tmp_path):
    from configurator import configure

    s = configure(lambda: bench.preset("ladder", gpu=False), ["config/bench_blog.py"], "")
    assert (s.n_layer, s.n_embd, s.block_size, s.batch_size, s.vocab_size) == (12, 768, 1024, 12, 50257)
    assert (s.dtype, s.compile, s.dropout, s.gradient_accumulation_steps) == ("bfloat16", True, 0.0, 1)


def test_amds_setting_by_config_file():
    from configurator import configure

    s = configure(lambda: bench.preset("sweep", gpu=False), ["config/bench_amd_sweep.py"], "")
    plan = [spec for spec in sweep.plan(s, CPU) if spec["attention"] == "manual" and spec.get("pass") == "forward"]
    assert [spec["T"] for spec in plan] == list(range(256, 4097, 64)) and {spec["heads"] for spec in plan} == {"32x128"}
    s = configure(lambda: bench.preset("prefill", gpu=False), ["config/bench_amd_prefill.py"], "")
    assert (s.models, s.lengths, s.warmup, s.repeats) == ("mistral-7b,llama-3-8b,phi-2", "512,1024,2048", 4, 256)


def test_bad_input_ends_in_one_sentence(tmp_path):
    assert "there is no setting 'lengthz': did you mean lengths?" in fails("bench.py", "sweep", "--lengthz=1")
    assert "only='fly' names no row" in fails("bench.py", "numerics", "--only=fly", f"--results={tmp_path}")
    assert "heads='12' must be like" in fails("bench.py", "sweep", "--heads=12", f"--results={tmp_path}")
    assert "config file swep does not exist" in fails("bench.py", "swep")


def test_losses_that_are_no_numbers_do_not_agree():
    def row(loss):
        ran = {"dtype": "float32"}
        return {"final_loss": loss, "steps": 9, "errors": {"y": 0}, "ran": ran, "peak_flops": 1, "peak_source": ""}

    notes = list(report._ladder_notes({"manual": row(2.0), "math": row(2.001), "flash": row(float("nan"))}))
    assert "**they DISAGREE**" in notes[0]
    assert "they agree" in next(report._ladder_notes({"manual": row(2.0), "math": row(2.001)}))


def test_a_sentence_before_other_chatter_is_still_the_reason(tmp_path, data, monkeypatch):
    said = types.SimpleNamespace(returncode=1, stderr="error: flash cannot\nsome library says goodbye\n")
    monkeypatch.setattr(child.subprocess, "run", lambda *_, **__: said)
    with pytest.raises(UserError, match="flash cannot"):
        child.train({}, tmp_path / "run")
    said.returncode, said.stderr = -9, ""  # the system's own end to a full memory
    with pytest.raises(MemoryError):
        child.train({}, tmp_path / "run")


def test_redrawn_from_rows_alone(tmp_path, data):
    bench.main("sweep", bench_flags(tmp_path, data, only="forward + backward"))
    folder = tmp_path / "results" / "sweep"
    before = (folder / "report.md").read_text()
    alone = tmp_path / "copied"
    alone.mkdir()
    (alone / "rows.jsonl").write_bytes((folder / "rows.jsonl").read_bytes())
    report.write(alone)
    assert (alone / "report.md").read_text() == before
    assert (alone / "speedup.png").read_bytes() == (folder / "speedup.png").read_bytes()


def test_a_profile_opens_in_perfetto(tmp_path, data):
    bench.main("ladder", bench_flags(tmp_path, data, only="math", profile=True))
    events = json.loads((tmp_path / "results" / "ladder" / "runs" / "math" / "trace.json").read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)


def test_bench_starts_without_what_it_does_not_use():
    heavy = "('transformers', 'wandb', 'datasets', 'matplotlib')"
    done = script("-c", f"import sys, bench; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ladder", "sweep", "prefill", "numerics"])
def test_every_kind_on_a_gpu(tmp_path, data, kind):
    given = bench_flags(tmp_path, data, device="cuda", dtype="bfloat16", models="mistral-small,gpt2", compile=True)
    bench.main(kind, [*given, "--n_embd=64", "--only=manual,flash,efficient,cudnn,flex,auto,eager"])
    got = rows_of(tmp_path, kind)
    assert not [row for row in got if row["status"] == "failed"]
    sure = ("manual", "math", "efficient", "flash", "eager")
    for row in got:
        if (row.get("rung") or row.get("path") or row.get("attention")) in sure:
            assert row["status"] == "measured", row


@pytest.mark.gpu
def test_max_batch_on_a_gpu_stops_at_real_memory(tmp_path, data):
    s = settings(tmp_path, data, device="cuda", dtype="bfloat16", n_embd=256, block_size=1024, batch_size=10**5)
    with pytest.raises(MemoryError):
        child.train(s.of_train(), tmp_path / "run")
