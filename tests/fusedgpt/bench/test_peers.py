"""Contenders compute one function from the same weights, are visited in turn, and a wrong one gets no time."""

import os
import pathlib

import numpy as np
import pytest
import torch

import train
from fusedgpt.bench import child, contenders, kinds, peers, visit
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.machine.device import resolve_dtype, why_no_compiler
from fusedgpt.parallel import distributed
from model import GPT, GPTConfig
from tests.fusedgpt.bench.nanogpt import MODEL
from tests.fusedgpt.bench.small import rows_of, run, settings

pytest.importorskip("transformers")
CPU = torch.device("cpu")
NANOGPT = os.environ.get("NANOGPT")
needs_nanogpt = pytest.mark.skipif(not NANOGPT, reason="NANOGPT names no clone of nanoGPT")
SIZES = dict(block_size=32, batch_size=2, prompt_tokens=8, new_tokens=8, rounds=1, iterations=8, dtype="auto")


def asked(tmp_path, data, **changes):
    """The settings of peers that a visit gets."""
    return vars(settings("peers", tmp_path, data, **SIZES | changes)) | {"device": "cpu"}


def test_all_train_alike_from_the_same_weights(tmp_path, data, clone, monkeypatch):
    # a contender with other weights, another batch or another AdamW would have another last loss
    kept = []
    monkeypatch.setattr(visit.memory, "keep_freed_memory", lambda **given: kept.append(given))
    s = asked(tmp_path, data, nanogpt=str(clone), learning_rate=1e-2)
    names = ["ours", "Hugging Face, eager", "ours, float32, sdpa", "ours, float32, manual", "nanoGPT, float32"]
    got = {peer: visit.visit("training", peer, s) for peer in names}
    assert kept == [{"keep": True}] * len(names)  # ours kept what it freed, others paid for new pages in every step
    exact = [got[peer] for peer in ("ours, float32, sdpa", "ours, float32, manual", "nanoGPT, float32")]
    want = exact[0]["last_loss"]
    assert want < exact[0]["first_loss"] - 0.5  # it has learned something
    assert [row["last_loss"] for row in exact] == pytest.approx([want] * 3, abs=1e-4)
    assert [row["last_loss"] for row in got.values()] == pytest.approx([want] * len(got), abs=0.05)  # bfloat16, biases
    for peer, row in got.items():
        assert row["samples"] == len(row["samples_ms"]) == s["steps"] - child.WARM_UP, peer
        assert row["errors"]["float32"] < 1e-6 and row["tokens"] == 64 and "peak_memory" not in row, peer
    assert got["ours, float32, manual"]["kernel"]["forward"] == ["unfused"]
    assert {peer: row["ran"]["fused"] for peer, row in got.items()} == {peer: "float32" not in peer for peer in names}
    rows_of_embedding = [got[peer]["ran"]["rows_of_embedding"] for peer in ("ours", "nanoGPT, float32")]
    assert rows_of_embedding == [128, 65]


def test_the_first_loss_is_that_of_a_model_written_out_in_float64(tmp_path, data):
    # the reference of every contender is our own model: here it is compared with transformers', in double precision
    s = contenders.settings("training", "Hugging Face, eager", asked(tmp_path, data, bias=True))
    state = contenders.initial_weights(s)
    theirs = contenders.build("Hugging Face, eager", state, s)
    x, y = torch.randint(65, (2, 2, 32), generator=torch.Generator().manual_seed(1))
    want = torch.nn.functional.cross_entropy(theirs.model.double()(x).logits.flatten(0, 1), y.flatten())
    got = contenders.reference(theirs, state, s)(x, y)[1]
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    assert theirs.loss(x, y).item() == pytest.approx(want.item(), rel=1e-6)  # all T targets, and none shifted twice


def test_llamas_train_alike_and_have_the_flops_of_our_gpt2(tmp_path, data, monkeypatch):
    # a Llama with another width inside its MLP would be timed for more or fewer FLOPs than GPT-2
    for peer, own in contenders.LLAMA.items():
        monkeypatch.setitem(contenders.LLAMA, peer, own | {"compile": False, "dtype": "float32"})
    s = asked(tmp_path, data, n_head=2, n_embd=48, learning_rate=1e-2, vocab_multiple=1, attention="flash")
    names = [peer for peer in contenders.LLAMA if "compiled" not in peer]
    got = {peer: visit.visit("llama", peer, s) for peer in names}
    llamas = [row for peer, row in got.items() if peer != "ours, GPT-2"]
    assert len(llamas) == 3 and llamas[0]["last_loss"] < llamas[0]["first_loss"] - 0.2
    assert [row["last_loss"] for row in llamas] == pytest.approx([llamas[0]["last_loss"]] * 3, abs=1e-4)
    assert abs(got["ours, GPT-2"]["last_loss"] - llamas[0]["last_loss"]) > 5e-3  # another model
    assert {row["ran"]["flops_per_token"] for row in got.values()} == {got["ours, GPT-2"]["ran"]["flops_per_token"]}
    assert [row["ran"]["attention"] for row in llamas[1:]] == ["sdpa", "eager"]
    assert {row["errors"]["float32"] < 1e-6 for row in got.values()} == {True}


@pytest.mark.parametrize(
    ("part", "peer"),
    [
        ("training", "Hugging Face, eager"),
        pytest.param("generation", "Hugging Face, float32", marks=pytest.mark.slow),
        pytest.param("llama", "Hugging Face, sdpa", marks=pytest.mark.slow),
    ],
)
def test_an_output_layer_with_weights_of_its_own(tmp_path, data, part, peer, monkeypatch):
    # ours and the reference got the output layer's weights as their embedding too, so transformers' model, which had
    # its own, "failed parity"; and the embedding counted as FLOPs
    monkeypatch.setitem(contenders.LLAMA, "ours", {"compile": False})
    s = asked(tmp_path, data, tie_embeddings=False)
    ours, theirs = (visit.visit(part, each, s) for each in ("ours", peer))
    assert ours["errors"]["float32"] < 1e-6 and theirs["errors"]["float32"] < 1e-6
    chosen = contenders.settings(part, "ours", s)
    assert ours["ran"]["looked_up"] == GPTConfig.of(chosen).looked_up >= 128 * s["n_embd"]
    assert ours["ran"]["flops_per_token"] == GPT(GPTConfig.of(chosen)).flops_per_token()
    with pytest.raises(UserError, match="nanoGPT's output layer has the weights of its embedding: leave tie"):
        contenders.build("nanoGPT, float32", {}, chosen)


@pytest.mark.parametrize(
    "peer",
    [
        *("ours", "ours, float32", "Hugging Face, float32", "nanoGPT, float32"),
        *(pytest.param(f"Hugging Face, {more}", marks=pytest.mark.slow) for more in ("bfloat16", "float16")),
        pytest.param("Hugging Face, float32, compiled", marks=pytest.mark.slow),
    ],
)
def test_generation_is_greedy_and_counts_the_ids_that_agree(tmp_path, data, clone, peer, monkeypatch):
    monkeypatch.setattr(visit.memory, "bandwidth", lambda device: 1e10)  # to measure it takes longer than the rest
    if "compiled" in peer and (reason := why_no_compiler(CPU)):
        pytest.skip(reason)
    row = visit.visit("generation", peer, asked(tmp_path, data, nanogpt=str(clone)))
    assert 0 < row["equal_ids"] <= 8
    if "float32" in peer:
        assert row["equal_ids"] == 8 and row["ran"]["dtype"] == "float32"
    assert row["tokens"] == 8 and len(row["samples_ms"]) == len(row["first_token_ms"]) == 2
    assert row["ran"]["compile"] is ("compiled" in peer)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("is_causal=True", "is_causal=False"),
        ("super().forward(idx, targets)", "super().forward(idx, targets.flip(1))"),
        ("return logits, loss", "return logits, loss and loss * float('nan')"),
    ],
)
def test_a_model_that_computes_something_else_gets_no_time(tmp_path, data, clone, right, wrong):
    (tmp_path / "model.py").write_text(MODEL.replace(right, wrong))
    for part in ("training", "generation"):
        with pytest.raises(ParityError, match=r"its loss in float32 is .*, ours with the same weights and batch"):
            visit.visit(part, "nanoGPT, float32", asked(tmp_path, data, nanogpt=str(tmp_path)))


def test_a_cache_that_is_wrong_gets_no_time(tmp_path, data, monkeypatch):
    # what is proved before generation is a prompt, which needs no cache
    new_tokens = contenders.generate.new_tokens

    def forgets(model, idx, *args, **kwargs):
        ids = list(new_tokens(model, idx, *args, **kwargs))
        return ids if not hasattr(model, "decode") else [ids[0], *((each + 1) % 65 for each in ids[1:])]

    monkeypatch.setattr(contenders.generate, "new_tokens", forgets)
    with pytest.raises(ParityError, match="in float32 only its first 1 ids equal ours, not 4"):
        visit.visit("generation", "ours, float32", asked(tmp_path, data))


@pytest.mark.parametrize(
    "source", ["", "import nowhere", MODEL.replace("=1,", "=64,"), MODEL.replace("bias: bool", "")]
)
def test_a_folder_with_another_model_is_refused(tmp_path, data, source):
    (tmp_path / "model.py").write_text(source)
    with pytest.raises(UserError, match=r"is no nanoGPT that this can build|does not take GPT-2's weights"):
        visit.visit("training", "nanoGPT, float32", asked(tmp_path, data, nanogpt=str(tmp_path)))


def test_ours_steps_as_train_py_does(tmp_path, data):
    # a contender that steps otherwise than train.py would be timed for something else
    s = contenders.settings("training", "ours", asked(tmp_path, data, learning_rate=1e-2))
    state, idx = contenders.initial_weights(s), torch.arange(33).expand(2, -1)
    by_hand, theirs = (contenders.build("ours", state, s) for _ in range(2))
    for contender, step in ((by_hand, "contenders"), (theirs, "train.py")):
        optimizer = contender.optimizer(s, CPU)
        for _ in range(3):
            (100 * contender.loss(idx[:, :-1], idx[:, 1:])).backward()  # beyond the limit of 1
            if step == "contenders":
                contender.update(optimizer, s)
            else:
                train.update_weights(optimizer, distributed.gradient_norm(contender.model), s.grad_clip)
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(by_hand.model.parameters(), theirs.model.parameters()))
    assert not torch.equal(next(theirs.model.parameters()), state["transformer.wte.weight"])


def test_visits_go_round_and_each_is_a_contender_of_its_own(tmp_path, data, monkeypatch):
    monkeypatch.setattr(peers, "cpu_multiplies_bfloat16", lambda: True)
    s = settings("peers", tmp_path, data, **SIZES | dict(rounds=2, compile="auto"))
    plan = peers.plan(s, CPU)
    names = [(spec["part"], spec["peer"]) for spec in plan]
    half = len(names) // 2
    assert names[:half] == names[half:] and len(set(names)) == half
    assert not [name for name in names if "nanoGPT" in name[1] or name[0] in peers.PROGRAMS]  # no clone was named
    assert ("training", "ours, eager") not in names  # which is ours on a CPU
    assert ("training", "ours, eager") in [(spec["part"], spec["peer"]) for spec in peers.plan(s, torch.device("cuda"))]


def test_without_products_in_bfloat16_nobody_computes_in_it(tmp_path, data, monkeypatch):
    # on a CPU a step of transformers' GPT-2 would have taken 20 minutes, and a sample took 46 s
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    for spec in peers.plan(settings("peers", tmp_path, data, **SIZES), CPU):
        s = contenders.settings(spec["part"], spec["peer"], asked(tmp_path, data))
        assert resolve_dtype(s.dtype, CPU) == torch.float32, spec
        if spec["part"] == "training":  # on a GPU auto means float16 then, which would need a scaler
            assert s.dtype == "float32"


def test_all_train_in_the_dtype_that_was_asked_for(tmp_path, data):
    # with --dtype=float32 ours computed in float32 beside transformers in bfloat16, and the title compared their times
    for dtype in ("float32", "bfloat16"):
        s = asked(tmp_path, data, dtype=dtype)
        for part in contenders.STEPS:
            peers_of_part = [peer for peer in contenders.PARTS[part] if "float32" not in peer]
            assert {contenders.settings(part, peer, s).dtype for peer in peers_of_part} == {dtype}


@pytest.mark.parametrize(
    ("changes", "message"), [({"nanogpt": "nowhere"}, "has no model.py"), ({"new_tokens": 25}, "must be 2 or more")]
)
def test_what_cannot_be_measured_is_one_sentence_before_the_first_row(tmp_path, data, changes, message):
    with pytest.raises(UserError, match=message):
        run("peers", tmp_path, data, **SIZES | changes)
    assert not (tmp_path / "results").exists()


def test_from_the_command_line_and_again(tmp_path, data, clone, capsys, short_recipe):
    changes = SIZES | dict(nanogpt=str(clone), only="*manual,recipe")
    got = run("peers", tmp_path, data, **changes)
    assert [row["peer"] for row in got] == ["ours, float32, manual", "ours", "nanoGPT"]
    assert {row["status"] for row in got} == {"measured"}, got
    assert got[1]["ran"]["activation"] == "gelu"  # nanoGPT's; ours was the tanh form, which took longer
    text = (tmp_path / "results" / "peers" / "report.md").read_text()
    assert "## training" in text and "An iteration of nanoGPT's recipe: nanoGPT " in text
    capsys.readouterr()
    assert run("peers", tmp_path, data, **changes) == got == rows_of("peers", tmp_path)
    assert "3 of 3 rows are there already" in capsys.readouterr().out


def row(peer, ms, n=1, **more):
    ran = dict(attention="sdpa", dtype="float32", compile=False, fused=True, ids=65, rows_of_embedding=65)
    found = dict(part="training", peer=peer, round=n, status="measured", samples_ms=ms, median_ms=float(np.median(ms)))
    found |= dict(p10_ms=min(ms), p90_ms=max(ms), tokens=100, peak_memory=2**30, errors={"float32": 1e-7}, ran=ran)
    found |= dict(first_loss=4.0, last_loss=3.0, kernel={"forward": ["flash"], "backward": ["flash"]})
    return found | more


def test_a_round_counts_for_all_contenders_or_for_none():
    rows = [
        row("ours", [10.0]),
        row("Hugging Face, eager", [20.0]),
        row("nanoGPT, float32", [5.0], status="parity failed", reason="its loss"),
        row("ours", [2.0], n=2),
        row("Hugging Face, eager", [90.0], n=2, disturbed=True, reason="loud"),
        row("ours", [20.0], n=3),
        row("Hugging Face, eager", [50.0], n=3),
    ]
    found = peers.pooled(rows)["training"]
    assert list(found) == list(peers.pooled(rows[::-1])["training"])  # rows measured again come last in the file
    text = "\n".join(peers.table(rows))
    assert peers.finding("training", found) == "A training step: Hugging Face takes 2.25 times as long as ours"
    assert "| 20.0, (90.0), 50.0 | 2.25 (2.00 to 2.50) | 2,857 | 1.00 GiB |" in text
    assert "| nanoGPT, float32 | parity failed: its loss |" in text
    (claim,) = (claim for claim in peers.claims(rows) if claim.timed)
    assert (claim.value, claim.low, claim.high) == pytest.approx((1 / 2.25, 0.4, 0.5), rel=0.02)


def test_a_row_that_multiplied_in_tf32_says_so(tmp_path, data, monkeypatch):
    # on a GPU nanoGPT generates in TF32, ours and transformers' in float32: all said float32
    monkeypatch.setattr(visit, "_multiplies_tf32", lambda s, device: s.tf32)
    for peer, said in (("ours, float32, sdpa", "TF32"), ("ours", "float32")):
        ran = visit.visit("training", peer, asked(tmp_path, data, dtype="float32"))["ran"]
        for more in ({}, {"decodes_in": "float32"}):
            assert peers._dtypes({"ran": ran | more}) == [said]
    rows = [row("nanoGPT, float32", [1.0], ran=row("", [1.0])["ran"] | {"tf32": True})]
    assert "(sdpa, TF32, eager, 65 ids, fused AdamW)" in "\n".join(peers.table(rows))
    assert peers._label("nanoGPT, float32", rows[0]) == "nanoGPT, float32, TF32"


def test_rows_of_another_version_of_nanogpt_do_not_count(tmp_path, data, monkeypatch):
    # after `git pull` in the clone the same command pooled old rounds with new ones, under the new commit
    commits = iter(("old", "new"))
    monkeypatch.setattr(kinds, "commit", lambda folder: next(commits))
    s = settings("peers", tmp_path, data, nanogpt="nanoGPT")
    old, new = (kinds.header("peers", [], s, {}) for _ in range(2))
    assert (old["settings"]["nanogpt_commit"], new["settings"]["nanogpt_commit"]) == ("old", "new")
    assert "nanogpt_commit" not in kinds.header("peers", [], settings("peers", tmp_path, data), {})["settings"]


def test_the_report_says_how_our_llama_stands_beside_our_gpt2():
    def llama(peer, ms, n=1):
        found = row(peer, [ms], n, part="llama")
        found["ran"] = found["ran"] | {"flops_per_token": 9e8}
        return found

    rows = [llama("ours", 9.0), llama("ours, GPT-2", 10.0), llama("Hugging Face, sdpa", 12.0)]
    rows += [llama("ours", 8.0, 2), llama("ours, GPT-2", 10.0, 2), llama("Hugging Face, sdpa", 12.0, 2)]
    found = peers.pooled(rows)["llama"]
    assert peers.finding("llama", found) == "A training step of a Llama: Hugging Face takes 1.42 times as long as ours"
    text = "\n".join(peers.table(rows))
    assert "Our Llama has 1.000 times the FLOPs of our GPT-2, and is 1.18 times as fast as our GPT-2." in text
    assert "| 0.9 | 10.6 |" in text  # GFLOP a token, and TFLOP/s: 100 tokens in 8.5 ms


def test_the_title_has_the_fastest_of_each_project_and_no_difference_that_the_spread_hides():
    def finding(*rows):
        return peers.finding("training", peers.pooled(list(rows))["training"])

    ours, slow, slower = row("ours", [10.0]), row("Hugging Face, compiled", [20.0]), row("Hugging Face, eager", [30.0])
    said = "A training step: Hugging Face takes 2 times as long as ours"
    assert finding(ours, slow, slower) == said
    assert finding(ours, slow, row("nanoGPT, float32", [8.0])) == f"{said}, nanoGPT is 1.25 times as fast"
    close = row("nanoGPT, float32", [9.0, 11.0, 12.0])
    assert finding(ours, close) == "A training step: nanoGPT shows no difference from ours beyond the noise"
    wrong = row("nanoGPT, float32", [5.0], status="parity failed", reason="its loss")
    for rows in ([ours], [ours, wrong], [slow]):
        assert finding(*rows) == "A training step: no undisturbed comparison"


@needs_nanogpt
@pytest.mark.parametrize(
    ("part", "peer"),
    [("training", "nanoGPT, float32"), ("training", "nanoGPT, patched"), ("generation", "nanoGPT, float32")],
)
def test_nanogpts_own_model(tmp_path, data, part, peer):
    folder = str(pathlib.Path(NANOGPT).resolve())
    found = visit.visit(part, peer, asked(tmp_path, data, nanogpt=folder))
    assert found["errors"]["float32"] < 1e-6 and found["ran"]["parameters"]
    assert found.get("equal_ids", 8) == 8


@pytest.mark.gpu
def test_contenders_on_a_gpu(tmp_path, data):
    changes = SIZES | dict(device="cuda", n_embd=64, compile="auto")
    got = run("peers", tmp_path, data, **changes)
    assert {row["status"] for row in got} == {"measured"}, got
    ours = next(row for row in got if row["peer"] == "ours")
    assert ours["ran"]["compile"] and ours["peak_memory"] < 2**30
