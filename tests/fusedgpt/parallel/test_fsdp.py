"""parallel=fsdp beside parallel=ddp: the same batches, losses, gradients and weights; and its checkpoints."""

import json
import os
import signal
import types

import pytest
import torch

from fusedgpt.runs import checkpoint
from tests.conftest import LLAMA, assert_same_bytes, flags, rows, run, small, tensors, wait_for
from tests.faults.processes import start
from tests.launch import fails, ranks, script

# dropout, accumulation on each rank and clipping; with 2 x 4 windows, ranks of 4 have none at an evaluation's end
SETTINGS = dict(max_iters=20, dropout=0.1, gradient_accumulation_steps=8, batch_size=2, grad_clip=0.5, eval_iters=3)
SETTINGS |= dict(attention="manual", learning_rate=1e-3)  # small steps: AdamW's first ones magnify rounding
WHOLE, SHARED = dict(parallel="ddp"), dict(parallel="fsdp")
SPLIT = [(2, SHARED), (4, SHARED), (4, dict(parallel="fsdp", shard_size=2))]


def trained(out_dir, data, world, env=types.MappingProxyType({}), **settings):
    """The folder of a run of `world` processes with `env` in their environment, and what the run said."""
    args = flags(small(out_dir, data, **{**SETTINGS, **settings}))
    return out_dir, ranks(world, "train.py", *args, **env) if world > 1 else script("train.py", *args, **env)


def state(out_dir, name="ckpt.pt"):
    """All tensors of a checkpoint, each in one piece."""
    return tensors(checkpoint.load(out_dir / name))


@pytest.fixture(scope="module")
def ddp(tmp_path_factory, data):
    """A run of two ranks that hold a whole copy each."""
    return trained(tmp_path_factory.mktemp("ddp"), data, 2, **WHOLE)[0]


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory, data):
    """A run of two ranks that share the model."""
    return trained(tmp_path_factory.mktemp("fsdp"), data, 2, **SHARED)[0]


@pytest.mark.parametrize(("world", "settings"), SPLIT, ids=["two", "four", "two copies of two"])
def test_sharing_a_model_changes_no_result(tmp_path, data, ddp, fsdp, world, settings):
    # gradients are added up in another order; a wrong mean, seed or batch is off by far more than rounding
    out = fsdp if world == 2 else trained(tmp_path, data, world, **settings)[0]
    for kind, names in (("train", ("loss", "grad_norm", "lr")), ("eval", ("train_loss", "val_loss"))):
        for ours, theirs in zip(rows(out, kind), rows(ddp, kind), strict=True):
            assert [ours[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=5e-5)
    ours, theirs = state(out), state(ddp)
    assert ours.keys() == theirs.keys()
    for name, w in theirs.items():
        torch.testing.assert_close(ours[name], w, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    start = {row["grad_norm"] for row in rows(ddp)}
    assert max(start) > SETTINGS["grad_clip"]  # otherwise clipping would not be tested


def test_a_shared_run_resumes_to_the_bit(tmp_path, data, fsdp):
    half, _ = trained(tmp_path, data, 2, **SHARED, max_iters=10)
    done = ranks(2, "train.py", "--init_from=resume", f"--out_dir={half}", "--max_iters=20")
    assert "resuming with max_iters=20; it was 10" in done.stdout and done.stdout.count("resuming with") == 1
    assert_same_bytes(state(half), state(fsdp))
    assert_same_bytes(state(half, "best.pt"), state(fsdp, "best.pt"))
    assert [row["loss"] for row in rows(half)] == [row["loss"] for row in rows(fsdp)]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, data, fsdp):
    # 2 → 1 → 4: shards to one file and back; on one process a run that was shared goes on as a plain one
    out, _ = trained(tmp_path, data, 2, **SHARED, max_iters=5)
    assert list(out.glob("shards-*"))
    done = script("train.py", "--init_from=resume", f"--out_dir={out}", "--max_iters=10")
    assert "parallel=fsdp shares nothing on one process, which holds the whole model" in done.stdout
    assert torch.load(out / "ckpt.pt", weights_only=True)["model"]  # in one file, as in any other run
    ranks(4, "train.py", "--init_from=resume", f"--out_dir={out}", "--max_iters=20")
    assert [row["loss"] for row in rows(out)] == pytest.approx([row["loss"] for row in rows(fsdp)], rel=2e-5)
    for name, w in state(fsdp).items():
        torch.testing.assert_close(state(out)[name], w, rtol=1e-4, atol=2e-5)


def test_a_rank_holds_its_part_only(tmp_path, data, fsdp):
    # a file of each rank, about half as large as the state: weights and two moments of float32
    bytes_of_state = sum(t.nbytes for n, t in state(fsdp).items() if n != "lm_head.weight")
    parts = [file.stat().st_size for file in (fsdp / "shards-20").glob("__?_0.distcp")]
    assert len(parts) == 2 and all(0.4 * bytes_of_state < part for part in parts)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_llama_is_shared_recomputed_in_chunks_and_resumed_to_the_bit(tmp_path, data, optimizer):
    # an untied output layer used to be tied again, and was left out of checkpoints
    settings, less = dict(LLAMA, max_iters=10, optimizer=optimizer), dict(recompute="block", loss="chunked")
    whole, _ = trained(tmp_path / "whole", data, 2, **WHOLE, **settings)
    plain, _ = trained(tmp_path / "plain", data, 2, **SHARED, **settings, **less)
    for ours, theirs in zip(rows(plain), rows(whole), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-5)
    for name, w in state(whole).items():
        torch.testing.assert_close(state(plain)[name], w, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    weights = checkpoint.load(plain / "ckpt.pt")["model"]
    assert not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    half, _ = trained(tmp_path / "half", data, 2, **SHARED, **settings | less | {"max_iters": 5})
    ranks(2, "train.py", "--init_from=resume", f"--out_dir={half}", "--max_iters=10")
    assert_same_bytes(state(half), state(plain))
    script("train.py", "--init_from=resume", f"--out_dir={half}", "--max_iters=11")  # on one process, in one file
    found = json.loads((half / "run.json").read_text())["model"]
    assert {name: found[name] for name in LLAMA} == LLAMA
    assert [row["iter"] for row in rows(half)] == [*range(11)]


MUON, FLOAT32 = dict(optimizer="muon"), dict(ONEDNN_MAX_CPU_ISA="AVX2")  # with FLOAT32, Muon multiplies in float32


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("family", [{}, LLAMA], ids=["GPT-2", "Llama"])
def test_muon_on_ranks_that_share_a_model_is_muon_on_one(tmp_path, data, family, world):
    # matrices that went to the wrong owner, or rows that came back to the wrong rank, are off by far more
    settings = dict(MUON, max_iters=6, gradient_accumulation_steps=6, **family)
    one, _ = trained(tmp_path / "one", data, 1, FLOAT32, **settings)
    out, _ = trained(tmp_path / "out", data, world, FLOAT32, **SHARED, **settings)
    assert max(row["grad_norm"] for row in rows(one)) > SETTINGS["grad_clip"]
    for ours, theirs in zip(rows(out), rows(one), strict=True):
        assert [ours["loss"], ours["grad_norm"]] == pytest.approx([theirs["loss"], theirs["grad_norm"]], rel=5e-5)
    ours, theirs = state(out), state(one)
    assert ours.keys() == theirs.keys()
    for name, w in theirs.items():
        torch.testing.assert_close(ours[name], w, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_of_muon_goes_on_divided_or_not(tmp_path, data):
    # 3 → 2 whole copies → two copies of two: its running means were looked for as AdamW's moments
    settings = dict(MUON, gradient_accumulation_steps=12)
    one, _ = trained(tmp_path / "one", data, 1, FLOAT32, **settings, max_iters=6)
    out, _ = trained(tmp_path / "out", data, 3, FLOAT32, **settings, **SHARED, max_iters=2)
    again = ("train.py", "--init_from=resume", f"--out_dir={out}")
    refused = ranks(3, *again, "--max_iters=4", "--optimizer=adamw", check=False)
    assert "optimizer=adamw cannot use the state of muon: resume with --optimizer=muon" in refused.stderr
    ranks(2, *again, "--max_iters=4", "--parallel=ddp", **FLOAT32)
    ranks(4, *again, "--max_iters=6", "--parallel=fsdp", "--shard_size=2", **FLOAT32)
    assert [row["loss"] for row in rows(out)] == pytest.approx([row["loss"] for row in rows(one)], rel=5e-5)
    for name, w in state(one).items():
        torch.testing.assert_close(state(out)[name], w, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("dtype", "family"),
    [("bfloat16", {}), ("float16", {}), ("bfloat16", LLAMA), ("bfloat16", LLAMA | MUON), ("float16", MUON)],
    ids=["bfloat16", "float16", "Llama", "Llama of Muon", "float16 of Muon"],
)
def test_in_low_precision_sharing_changes_no_bit(tmp_path, data, dtype, family):
    # weights are gathered in autocast's dtype, gradients are averaged in float32, and the scaler finds infinities on
    # any rank. No clipping: only the float32 norm is added up in another order. If gradients were scaled by the norm,
    # its last bit would move weights, and a weight that then rounds to another bfloat16 would move the next norm by
    # 4e-5, which no tolerance tells from gradients averaged in bfloat16 (1e-5). A Llama's norms of queries and keys, in
    # the modules of the matrices, would be gathered in bfloat16 too
    settings = dict(max_iters=4, eval_interval=4, dropout=0.1, grad_clip=0.0, dtype=dtype, **family)
    whole, _ = trained(tmp_path / "whole", data, 2, **WHOLE, **settings)
    out, _ = trained(tmp_path / "out", data, 2, **SHARED, **settings)
    for ours, theirs in zip(rows(out), rows(whole), strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    assert_same_bytes(state(out), state(whole))


VARIANTS = {
    "recomputed and in chunks": (dict(recompute="block", loss="chunked"), dict(loss="chunked"), 1e-5),
    "compiled": (dict(recompute="block", compile=True), {}, 1e-3),
}


@pytest.mark.parametrize(("settings", "plain", "rel"), VARIANTS.values(), ids=VARIANTS)
def test_sharing_goes_with_all_else(tmp_path, data, settings, plain, rel):
    # a compiled block draws other numbers for dropout than an eager one
    short = dict(max_iters=4, eval_interval=4, dropout=0.0 if "compile" in settings else 0.1)
    whole, _ = trained(tmp_path / "whole", data, 2, **WHOLE, **plain, **short)
    out, _ = trained(tmp_path / "out", data, 2, **SHARED, **settings, **short)
    for ours, theirs in zip(rows(out), rows(whole), strict=True):
        names = ("loss", "grad_norm")
        assert [ours[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=rel)
    assert bool(json.loads((out / "run.json").read_text())["graphs"]) == ("compile" in settings)


def test_a_signal_to_one_rank_ends_all_with_everything_saved(tmp_path, data):
    # the others need the rank that got the signal until the step, the evaluation and the samples are done
    draws = dict(max_iters=10**5, sample_interval=7, sample_prompts="a")
    settings = small(tmp_path / "out", data, **{**SETTINGS, **SHARED, **draws})
    processes = start(settings, tmp_path / "log", world=2)
    wait_for(tmp_path / "out" / "ckpt.pt", seconds=60)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 128 + signal.SIGTERM], (tmp_path / "log").read_text()
    assert checkpoint.load(tmp_path / "out" / "ckpt.pt")["iter_num"] == len(rows(tmp_path / "out"))


def test_samples_are_drawn_by_all_and_said_once(tmp_path, data):
    # with the model shared, a rank that samples alone waits for the others for ever
    draws = dict(max_iters=2, eval_interval=2, sample_interval=2, sample_prompts="a")
    out, done = trained(tmp_path, data, 2, **SHARED, **draws)
    assert [row["iter"] for row in rows(out, "sample")] == [0, 2] and done.stdout.count("step 2: sample") == 1


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--parallel=ddp", "--shard_size=2"], "shard_size=2 needs --parallel=fsdp: give that, or --shard_size=None"),
        (["--shard_size=0"], "shard_size=0 must be 1 or more"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, data, args, reason):
    assert reason in fails("train.py", *flags(small(tmp_path, data, **SHARED)), *args)


def test_groups_have_to_divide_the_processes(tmp_path, data):
    args = flags(small(tmp_path, data, **SETTINGS, **SHARED, shard_size=3))
    done = ranks(2, "train.py", *args, check=False)
    assert done.returncode and "shard_size=3 does not divide 2 processes" in done.stderr


def test_a_pretrained_model_is_shared_too(tmp_path, data):
    whole = run(tmp_path / "whole", data, max_iters=2)
    script("export.py", whole, tmp_path / "hf")
    first = {}
    for name, settings in (("ddp", WHOLE), ("fsdp", SHARED)):
        out, _ = trained(tmp_path / name, data, 2, **settings, init_from=str(tmp_path / "hf"), max_iters=1, n_layer=2)
        first[name] = rows(out, "eval")[-1]["val_loss"]
    assert first["fsdp"] == pytest.approx(first["ddp"], rel=1e-5)
