"""The ladder: each rung is a real run of train.py, changes one thing, and earns its time by parity."""

import json
import sys

import pytest
import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import child, ladder, proof, report
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.machine.device import why_no_compiler
from fusedgpt.runs.metrics import read_metrics, record_of
from tests.conftest import flags, small
from tests.fusedgpt.bench.small import rows_of, run, settings
from tests.launch import process

CPU = torch.device("cpu")


def test_the_ladder_from_the_command_line_and_again(tmp_path, data, capsys):
    only = f"manual,efficient,{ladder.PADDED}"
    got = {row["rung"]: row for row in run("ladder", tmp_path, data, only=only)}
    assert got.keys() == {"manual", "efficient", ladder.PADDED}  # "manual" was seven rungs
    assert {name for name, row in got.items() if row["status"] == "refused"} == {"efficient"}
    base, flash = got["manual"], got["flash + padded vocabulary"]
    assert base["kernel"]["forward"] == ["unfused"] and flash["kernel"]["forward"] == ["flash"]
    assert base["samples"] == len(base["samples_ms"]) == 3  # 8 steps, 5 of them warm-up
    assert flash["ran"]["padded_vocab_size"] == 128 and base["ran"]["padded_vocab_size"] == 65
    assert flash["final_loss"] == pytest.approx(base["final_loss"], rel=1e-4)  # same weights, same batches
    assert base["tokens_per_s"] == pytest.approx(1e3 * 64 / base["median_ms"])
    assert base["errors"].keys() == {"y", "dq", "dk", "dv", "rms"}
    text = (tmp_path / "results" / "ladder" / "report.md").read_text()
    assert "| efficient | refused: PyTorch has it on GPUs only |" in text
    assert not list((tmp_path / "results").rglob("*.pt"))
    before = rows_of("ladder", tmp_path)
    capsys.readouterr()
    assert run("ladder", tmp_path, data, only=only) == before
    assert f"{len(before)} of {len(before)} rows are there already" in capsys.readouterr().out


@pytest.mark.slow  # to compile a step takes seconds
def test_manual_stays_manual_under_compile(tmp_path, data):
    # K5: Inductor may rewrite hand-written attention into SDPA
    if reason := why_no_compiler(CPU):
        pytest.skip(reason)
    s = settings("ladder", tmp_path, data, compile=True)
    row = ladder.measure({"rung": "manual"}, s, CPU, tmp_path)
    assert row["ran"]["compile"] is True
    assert row["kernel"]["forward"] == row["kernel"]["backward"] == ["unfused"]
    assert row["kernel"]["logits"] == [[65, 65]]  # the compiler pads on GPUs only
    assert not [op for op in row["kernel"]["ops"] if "flash" in op or "efficient" in op or "cudnn" in op]


def test_each_rung_changes_one_thing():
    changed = dict.fromkeys(("math", "efficient", "flash", "masked", "manual, eager"), "manual")
    changed |= {ladder.FLOAT32: "manual, eager", ladder.PADDED: "flash"}
    variables = {ladder.TF32: ladder.FLOAT32, ladder.UNPADDED: "flash", ladder.GRAPHED: ladder.PADDED}
    changed |= variables
    changed |= dict.fromkeys(ladder.RUNGS.keys() - {"manual", *changed}, ladder.PADDED)
    for name, other in changed.items():
        different = len(ladder.RUNGS[name].items() ^ ladder.RUNGS[other].items())
        assert different in ((0,) if name in variables else (1, 2)), name  # one key
    assert ladder.VARIABLES.keys() == variables.keys()


SAYS_WHAT_PYTORCH_READ = """
import json, pathlib, sys, torch, torch._inductor.config as inductor
out_dir = pathlib.Path(next(arg for arg in sys.argv if arg.startswith("--out_dir=")).partition("=")[2])
out_dir.mkdir()
found = [torch.backends.cuda.matmul.allow_tf32, inductor.shape_padding, inductor.comprehensive_padding]
found.append(inductor.triton.cudagraphs)
(out_dir / "run.json").write_text(json.dumps({"found": found}))
(out_dir / "metrics.jsonl").touch()
"""


@pytest.mark.slow  # each is a process that imports PyTorch
@pytest.mark.parametrize(
    ("rungs", "found"),
    [([ladder.TF32, ladder.UNPADDED, ladder.GRAPHED], [True, False, False, True]), ([], [False, True, True, False])],
    ids=["changed", "usual"],
)
def test_pytorch_reads_the_variables_of_a_rung(rungs, found, tmp_path, monkeypatch, processes):
    # NVIDIA's containers turn TF32 on, and the rung in float32 would have used it
    variables = dict(ladder.USUAL)
    for name, usual in variables.items():
        monkeypatch.setenv(name, "0" if usual == "1" else "1")
    for rung in rungs:
        variables |= ladder.VARIABLES[rung]
    (tmp_path / "train.py").write_text(SAYS_WHAT_PYTORCH_READ)
    monkeypatch.setattr(child, "TRAIN", tmp_path / "train.py")
    assert child.run({"profile": False}, tmp_path / "run", variables=variables)[0] == {"found": found}


def test_a_rung_that_would_show_nothing_is_refused(tmp_path, data, monkeypatch):
    monkeypatch.setattr(child, "run", lambda *_, **__: pytest.fail("it was timed"))
    s = settings("ladder", tmp_path, data, compile=True)
    for rung, reason in (
        (ladder.TF32, "from compute capability 8.0 on"),
        (ladder.UNPADDED, "a compiled model on a GPU"),
        (ladder.GRAPHED, "replayed as CUDA graphs"),
    ):
        with pytest.raises(UserError, match=reason):
            ladder.measure({"rung": rung}, s, CPU, tmp_path)
    gpu = torch.device("cuda")
    for has in (True, False):
        monkeypatch.setattr(torch.cuda, "is_tf32_supported", lambda has=has: has)
        assert (ladder._refusal(ladder.TF32, s, gpu) is None) is has
    s.compile = False
    assert ladder._refusal(ladder.UNPADDED, s, gpu) and ladder._refusal(ladder.GRAPHED, s, gpu)


@pytest.mark.parametrize("rung", [ladder.TF32, ladder.FLOAT32])
def test_a_rung_is_proven_in_its_own_precision_and_refused_if_it_ran_in_another(rung, tmp_path, data, monkeypatch):
    # its products are rounded to 11 bits, and would fail the tolerance of float32
    proven, told, wanted = [], [], rung == ladder.TF32

    def prove(name, case, exact_as):
        proven.append((torch.backends.cuda.matmul.allow_tf32, exact_as))
        return {}

    monkeypatch.setattr(ladder, "prove_kernel", prove)
    monkeypatch.setattr(ladder, "_refusal", lambda *_: None)
    monkeypatch.setattr(child, "measured", lambda *_: {"median_ms": 1.0})
    s = settings("ladder", tmp_path, data)
    for ran in (True, False):
        record = {"tf32": ran, "cuda_graphs": False, "attention_trials": {}}

        def runs(*_, variables, record=record, **__):
            told.append(variables["TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"])
            return record, []

        monkeypatch.setattr(child, "run", runs)
        if ran is wanted:
            assert ladder.measure({"rung": rung}, s, CPU, tmp_path) == {"median_ms": 1.0}
        else:
            with pytest.raises(UserError, match=f"TF32 was {'on' if ran else 'off'} in this run"):
                ladder.measure({"rung": rung}, s, CPU, tmp_path)
    assert proven == [(wanted, torch.float16 if wanted else None)] * 2 and told == [str(int(wanted))] * 2


@pytest.mark.parametrize(("rung", "ran", "why"), [(ladder.GRAPHED, False, "no"), (ladder.PADDED, True, "replayed")])
def test_a_rung_is_refused_if_cuda_graphs_ran_or_not(rung, ran, why, tmp_path, data, monkeypatch):
    # PyTorch leaves out a graph that it cannot replay, with a warning that nobody reads
    monkeypatch.setattr(ladder, "prove_kernel", lambda *_, **__: {})
    monkeypatch.setattr(ladder, "_refusal", lambda *_: None)
    record = {"tf32": False, "cuda_graphs": ran, "attention_trials": {}}
    monkeypatch.setattr(child, "run", lambda *_, **__: (record, []))
    with pytest.raises(UserError, match=why):
        ladder.measure({"rung": rung}, settings("ladder", tmp_path, data), CPU, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_cuda_graphs_change_no_bit(tmp_path, data, dropout):
    losses = {}
    for graphs in ("0", "1"):
        out_dir = tmp_path / graphs
        of_all = dict(device="cuda", compile=True, attention="flash", dtype="bfloat16", max_iters=30, dropout=dropout)
        s = small(out_dir, data, **of_all)
        # Inductor reads the variable when it is imported
        process("train.py", *flags(s), prefix=(sys.executable,), TORCHINDUCTOR_CUDAGRAPHS=graphs)
        assert record_of(out_dir)["cuda_graphs"] == (graphs == "1")
        losses[graphs] = [row["loss"] for row in read_metrics(out_dir, "train")]
    assert losses["0"] == losses["1"]


def test_ratios_are_quoted_over_tf32_and_over_logits_that_nobody_padded():
    # over float32 alone, an A100 would gain several times what it does: nanoGPT lets it multiply in TF32
    times = {"manual": 100.0, ladder.FLOAT32: 900.0, ladder.TF32: 300.0, "flash": 70.0, ladder.UNPADDED: 90.0}
    rows = [rung(name, n, ms) for name, ms in times.items() for n in (1, 2)]
    padded, efficient = ([rung(name, n, 60.0) for n in (1, 2)] for name in (ladder.PADDED, ladder.EFFICIENT_PADDED))
    text = "\n".join(ladder.table(rows + padded + efficient))
    assert f"`{ladder.PADDED}` is 15.00 times as fast as `manual, float32, eager`." in text
    assert f"`{ladder.PADDED}` is 5.00 times as fast as `manual, TF32, eager`, which multiplies as nanoGPT does" in text
    assert f"`{ladder.PADDED}` is 1.50 times as fast as `flash, no padding`, which is what our padding gains" in text
    claims = {claim.name: claim for claim in ladder.claims(rows + padded)}
    claim = claims[f"{ladder.PADDED}: speed over {ladder.TF32}"]
    assert claim.value == 5.0 and len(claim.rows) == 4
    # a T4 refuses flash
    text = "\n".join(ladder.table([row for row in rows if "flash" not in row["rung"]] + efficient))
    assert f"`{ladder.EFFICIENT_PADDED}` is 5.00 times as fast as `manual, TF32, eager`" in text


def test_the_peak_of_tf32_is_not_that_of_float32():
    ran = dict(attention="manual", dtype="float32", compile=False, padded_vocab_size=50257, device="cuda:0")
    rows = [rung(ladder.BASELINE, 1, 1.0, peak_flops=9e14, ran=ran | {"dtype": "bfloat16"})]
    rows += [rung(ladder.FLOAT32, 1, 1.0, peak_flops=6e13, ran=ran | {"tf32": False})]
    rows += [rung(ladder.TF32, 1, 1.0, peak_flops=4e14, ran=ran | {"tf32": True})]
    lines = ladder.table(rows)
    assert all(line.split(" | ")[6] == "50.0 %" for line in lines[2:5])
    assert "(manual, TF32, eager, 50257)" in lines[3]
    assert "60 TFLOP/s in float32, 400 TFLOP/s in TF32, 900 TFLOP/s in bfloat16" in "\n".join(lines)


def test_a_row_says_if_the_compiler_padded_the_logits():
    ran = dict(attention="flash", dtype="bfloat16", compile=True, padded_vocab_size=50257, tf32=False)
    for logits, text in (
        ([[50257, 50257]], "50257)"),
        ([[50257, 50304]], "50257, padded by the compiler to 50304)"),
        ([[50257, 50304], [50264, 50304]], "50257, padded by the compiler to 50264 and 50304)"),
    ):
        kernel = {"forward": ["flash"], "backward": ["flash"], "logits": logits}
        assert (
            f"(flash, bfloat16, compiled, {text} |" in ladder.table([rung("flash", 1, 1.0, ran=ran, kernel=kernel)])[2]
        )


FAMILY = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_kv_head=1, head_size=24, window=8, window_pattern="SL")


def test_a_model_that_is_no_gpt2_is_climbed_and_its_rows_say_so(tmp_path, data):
    # rows of a Llama would count for the GPT-2 that was measured in another call
    s = settings("ladder", tmp_path, data, tie_embeddings=False, **FAMILY)
    model = "position=rotary, norm=rmsnorm, mlp=swiglu, n_kv_head=1, head_size=24, window=8, window_pattern=SL"
    model += ", tie_embeddings=False"
    specs = ladder.plan(s, CPU)
    assert {spec["model"] for spec in specs} == {model}
    assert all("model" not in spec for spec in ladder.plan(settings("ladder", tmp_path, data), CPU))
    row = ladder.measure({"rung": "math", "model": model}, s, CPU, tmp_path)
    assert row["kernel"]["expanded"] and row["median_ms"] > 0
    assert report.kernel(row).endswith("keys and values copied for each head of queries")
    assert f"channels, {model}," in child.subject(vars(s))


def test_a_figure_names_what_changes_the_work_of_a_step(tmp_path, data):
    # with these, and with campaign's dropout of 0.2, it said no more than "Training a GPT of 2 layers, …"
    work = dict(mask="document", dropout=0.2, optimizer="muon", loss="chunked", recompute="block")
    said = child.subject(vars(settings("ladder", tmp_path, data, **work)))
    assert "channels, mask=document, dropout=0.2, optimizer=muon, loss=chunked, recompute=block, " in said
    older = {"n_layer": 2, "n_head": 2, "n_embd": 32, "batch_size": 1, "block_size": 8}  # a header without them
    assert child.subject(older) == "a GPT of 2 layers, 2 heads, 32 channels, 1 × 8 tokens a step"


def test_both_attentions_of_a_model_with_windows_are_proven(tmp_path, data, monkeypatch):
    # the first layer has a window, the second has none
    proven = []
    monkeypatch.setattr(proof.permitted, "refusal", lambda name, case: None)
    monkeypatch.setattr(proof, "prove", lambda attend, case, exact_as: proven.append(case.window) or {})
    monkeypatch.setattr(child, "run", lambda *_, **__: (dict(tf32=False, cuda_graphs=False, attention_trials={}), []))
    monkeypatch.setattr(child, "measured", lambda *_: {})
    ladder.measure({"rung": "manual"}, settings("ladder", tmp_path, data, **FAMILY), CPU, tmp_path)
    assert proven == [8, None]


def test_the_baseline_is_climbed_again_in_each_round(tmp_path, data):
    # per cent stood against the slower of two measurements of the baseline: +27 % or +21 %
    plan = ladder.plan(settings("ladder", tmp_path, data, rounds=2), CPU)
    names = [spec["rung"] for spec in plan]
    half = len(plan) // 2
    assert names[:half] == names[half:] == list(ladder.RUNGS) and {spec["round"] for spec in plan[half:]} == {2}
    assert ladder.plan(settings("ladder", tmp_path, data, rounds=1), CPU) == [{"rung": name} for name in ladder.RUNGS]


def rung(name, n, ms, **more):
    found = {"rung": name, "round": n, "status": "measured", "samples_ms": [ms], "median_ms": ms, "p10_ms": ms}
    found |= {"p90_ms": ms, "steps": 9, "final_loss": 2.0, "errors": {"y": 0.0}, "peak_flops": 1, "peak_source": ""}
    found |= {"mfu": 0.5, "tokens_per_s": 1.0, "peak_memory": 1, "kernel": {"forward": ["math"], "backward": ["math"]}}
    ran = dict(attention="math", dtype="float32", compile=True, padded_vocab_size=65)
    return found | {"ran": ran} | more


def test_per_cent_are_of_rounds_with_their_range_and_what_noise_hides_is_said():
    # padding was said to be worth 3 %, in a ladder whose baseline drifted by 5 %
    times = {"manual": (120, 240), "math": (100, 200), "flash": (80, 150), ladder.PADDED: (79, 152)}
    rows = [rung(name, n, float(ms)) for name, each in times.items() for n, ms in enumerate(each, start=1)]
    found = ladder.pooled(rows)
    assert ladder.faster_than(found["manual"], found["flash"]) == pytest.approx((55, 50, 60))
    text = "\n".join(ladder.table(rows))
    assert "| flash | 115.0 (87.0-143.0) | 80.0, 150.0 | +55.0 % (+50.0 to +60.0) |" in text
    # 51.9 to 57.9 % and 50 to 60 %: ratios repeat within 6.7 %
    assert (
        "differs by up to 6.7 %" in text
        and "Not told apart: `flash` and `flash + padded vocabulary` (1.00x as long)." in text
    )
    claim = next(c for c in ladder.claims(rows) if c.name.startswith("flash:") and c.timed)
    assert (claim.low, claim.high) == pytest.approx((1.5, 1.6)) and len(claim.rows) == 4


def test_no_noise_is_claimed_of_rounds_that_several_calls_measured():
    # make gpu measures some rungs first and the others in a later call, perhaps on another machine: "Ratios repeat"
    # within what the rounds showed was said of both
    times = {"manual": (120, 240), "math": (100, 200), "flash": (80, 150)}
    rows = [rung(name, n, float(ms), call=1) for name, each in times.items() for n, ms in enumerate(each, start=1)]

    def said(rows):
        ((_, _, subject, _),) = ladder.figures(rows, CHILD)
        return subject, "\n".join(ladder.table(rows))

    for text, repeat in zip(said(rows), ("Ratios repeat within 6.7 %", "differs by up to 6.7 %")):
        assert repeat in text and "calls" not in text
    rows[2]["call"] = 2
    for text in said(rows):
        assert (
            "Round 1 was measured in 2 calls, not in one." in text
            and "within 6.7" not in text
            and "up to 6.7" not in text
        )


FAILED = dict(status="parity failed", reason="y is off")
REFUSED = dict(status="refused", reason="on GPUs only")
BY_HAND = "hand-written attention"


@pytest.mark.parametrize(
    ("times", "changes", "title"),
    [
        ({"flash": 80.0, ladder.PADDED: 50.0}, {}, f"flash is 1.25 times as fast as {BY_HAND}, padding included 2"),
        ({"flash": 80.0}, {}, f"flash is 1.25 times as fast as {BY_HAND}"),
        (
            {"flash": 220.0, ladder.PADDED: 210.0},
            {},
            f"flash takes 2.2 times as long as {BY_HAND}, padding included 2.1",
        ),
        (
            {"flash": 125.0, ladder.PADDED: 80.0},
            {},
            f"flash takes 1.25 times as long as {BY_HAND}; padding included, it is 1.25 times as fast as that",
        ),
        (
            {"flash": 98.0, ladder.PADDED: 97.0, "masked": (100.0, 111.0)},  # ratios of one rung differ by 11 %
            {},
            f"flash shows no difference from {BY_HAND} beyond the noise, padding included",
        ),
        ({"flash": (98.0, 101.0)}, {}, f"flash shows no difference from {BY_HAND} beyond the noise"),
        (
            {ladder.FLOAT32: 200.0, "flash": 80.0, ladder.PADDED: 50.0},
            {},
            f"flash is 1.25 times as fast as {BY_HAND}, padding included 2; {ladder.PADDED} is 4 times as fast as"
            f" {ladder.FLOAT32}",
        ),
        ({"flash": 80.0, "efficient": 50.0}, {"flash": REFUSED}, f"efficient is 2 times as fast as {BY_HAND}"),
        ({"flash": 80.0, "math": 50.0}, {"flash": FAILED}, f"math is 2 times as fast as {BY_HAND}"),
        ({"flash": 80.0}, {"flash": FAILED}, "No ratio: flash is parity failed"),
        ({"flash": 80.0}, {"flash": REFUSED}, "No ratio: flash is refused"),
        ({}, {}, "No ratio: flash is not measured"),
        ({"flash": 80.0}, {"manual": dict(disturbed=True, reason="loud")}, "No ratio: manual is disturbed"),
        ({"flash": 80.0}, {"manual": FAILED}, "No ratio: manual is parity failed"),
    ],
    ids=lambda value: value[:50] if isinstance(value, str) else "",
)
def test_the_title_is_the_finding_and_claims_nothing_that_the_noise_hides(times, changes, title):
    # "A training step, rung by rung" stood above every ladder, whatever it had found
    each = {name: ms if isinstance(ms, tuple) else (ms, ms) for name, ms in {"manual": 100.0, **times}.items()}
    rows = [
        rung(name, n, ms, **changes.get(name, {})) for name, all_ms in each.items() for n, ms in enumerate(all_ms, 1)
    ]
    assert ladder.finding(ladder.pooled(rows)) == title
    for _, drawn, subject, _ in ladder.figures(rows, CHILD):
        assert drawn == title and ("Refused here: flash (on GPUs only)." in subject) is (REFUSED in changes.values())


CHILD = dict(n_layer=1, n_head=1, n_embd=1, batch_size=1, block_size=1)  # settings that a subject names


def test_per_cent_are_counted_as_the_article_counts_and_its_own_column_is_what_it_printed():
    # it was computed from rounded milliseconds: 6.72, 20.17 and 26.55, where the article has 6.71, 20.16 and 26.54
    found = ladder.pooled([rung(name, 1, float(ms)) for name, ms in ladder.ARTICLE.items()])
    ours = {name: ladder.faster_than(found["manual"], found[name])[0] for name in ladder.ARTICLE_FASTER}
    assert ours == pytest.approx(ladder.ARTICLE_FASTER, abs=0.02)
    cells = [line.split(" | ")[4] for line in ladder.table(list(found.values()))[2:7]]
    assert cells == ["143 ms", "134 ms, 6.71 %", "119 ms, 20.16 %", "113 ms, 26.54 %", "87 ms, 64.37 %"]


def test_parity_comes_before_the_run(tmp_path, data, monkeypatch):
    def wrong(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * 1.5

    monkeypatch.setattr(permitted, "ATTENTION", {**ATTENTION, "manual": wrong})
    monkeypatch.setattr(child, "run", lambda *_, **__: pytest.fail("a kernel that fails parity was timed"))
    with pytest.raises(ParityError):
        ladder.measure({"rung": "manual"}, settings("ladder", tmp_path, data), CPU, tmp_path)


def test_losses_that_are_no_numbers_do_not_agree():
    def notes(**losses):
        return ladder.notes(ladder.pooled([rung(name, 1, 1.0, final_loss=loss) for name, loss in losses.items()]))

    assert "**they DISAGREE**" in notes(manual=2.0, math=2.001, flash=float("nan"))[0]
    assert "they agree" in notes(manual=2.0, math=2.001)[0]
    assert not any("agree" in line.lower() for line in notes(manual=2.0))  # one loss was said to agree


def test_a_profile_opens_in_perfetto(tmp_path, data):
    run("ladder", tmp_path, data, only="math", profile=True)
    events = json.loads((tmp_path / "results" / "ladder" / "traces" / "math.json").read_text())["traceEvents"]
    assert any("scaled_dot_product" in event.get("name", "") for event in events)
