"""parallel=fsdp beside one process and parallel=ddp: the same batches, losses, gradients, weights; its checkpoints."""

import math
import os
import re
import shutil
import signal
from unittest import mock

import pytest
import torch

from fusedgpt.runs import checkpoint
from tests.conftest import LLAMA, again, assert_same_bytes, flags, record, rows, small, tensors, wait_for
from tests.faults.processes import start
from tests.launch import fails, ranks, script

# dropout, accumulation on each rank and clipping; with 2 x 3 windows, ranks of 4 have none at an evaluation's end
SETTINGS = dict(max_iters=4, dropout=0.1, gradient_accumulation_steps=4, batch_size=2, grad_clip=0.5)
SETTINGS |= dict(eval_interval=2, eval_iters=3, attention="manual")
SETTINGS |= dict(learning_rate=1e-3)  # small steps: AdamW's first ones magnify rounding
SHARED, MUON = dict(parallel="fsdp"), dict(optimizer="muon")
# evaluations and samples put other weights into the model, which ranks gather; after samples nothing is saved
AVERAGED = dict(ema_decay=0.5, sample_interval=2, sample_prompts="a")
FLOAT32 = dict(dtype="float32")  # Muon's products too
LESS = dict(recompute="block", loss="chunked")


def trained(out_dir, data, world, **settings):
    """The folder of a run of `world` processes."""
    args = flags(small(out_dir, data, **{**SETTINGS, **settings}))
    return go(out_dir, world, *args)


def resumed(out_dir, world, *args):
    """`out_dir`, in which `world` processes have gone on."""
    return go(out_dir, world, *again(out_dir, *args))


def go(out_dir, world, *args):
    if world > 1:
        ranks(world, "train.py", *args, inside=few_tokens)
    else:
        with few_tokens():
            script("train.py", *args)
    return out_dir


def state(out_dir, name="ckpt.pt"):
    """All tensors of a checkpoint, each in one piece."""
    return tensors(checkpoint.load(out_dir / name))


def assert_same_run(ours, theirs):
    """The same losses, gradient norms, rates and evaluations, to rounding."""
    for kind, names in (("train", ("loss", "grad_norm", "lr")), ("eval", ("train_loss", "val_loss"))):
        found, wanted = ({row["iter"]: row for row in rows(out, kind)} for out in (ours, theirs))
        assert kind == "eval" or found.keys() == wanted.keys()
        for it in found.keys() & wanted.keys():
            assert [found[it][n] for n in names] == pytest.approx([wanted[it][n] for n in names], rel=5e-5)


def assert_close_state(ours, theirs):
    """The same weights and running means, to rounding."""
    s, ours, theirs = checkpoint.load(ours / "ckpt.pt")["config"], state(ours), state(theirs)
    assert ours.keys() == theirs.keys()
    for name, w in theirs.items():
        far = 1e-5 * w.abs().max().item()  # of running means: gradients are added up in another order
        if "weight" in name or "bias" in name or "twin" in name:
            far = s["learning_rate"] / 50  # AdamW magnifies rounding where a gradient is almost 0
        if s["optimizer"] == "muon" and ".h." in name and w.dim() == 2:
            # such gradients differ by a few 2**-24 of their norm; the slope of Muon's five steps is 3.4445**5, or 485,
            # at most; and a step moves weights by learning_rate * 0.2 * sqrt(larger side) of that
            far = s["max_iters"] * s["learning_rate"] * 0.2 * math.sqrt(max(w.shape)) * 485 * 4 * 2**-24
        torch.testing.assert_close(ours[name], w, rtol=0, atol=far, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def one(tmp_path_factory, data):
    """A run of one process."""
    return trained(tmp_path_factory.mktemp("one"), data, 1, **AVERAGED)


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory, data):
    """A run of two ranks that share the model."""
    return trained(tmp_path_factory.mktemp("fsdp"), data, 2, **SHARED, **AVERAGED)


@pytest.fixture(scope="module")
def half(tmp_path_factory, data):
    """The first half of `fsdp`."""
    return trained(tmp_path_factory.mktemp("half"), data, 2, **SHARED, **AVERAGED, max_iters=2)


def test_a_shared_model_has_the_result_of_a_whole_one(one, fsdp):
    # gradients are added up in another order; a wrong mean, seed or batch is off by far more than rounding
    assert max(row["grad_norm"] for row in rows(one)) > SETTINGS["grad_clip"]  # otherwise nothing is clipped
    assert_same_run(fsdp, one)
    assert_close_state(fsdp, one)


def test_a_rank_holds_its_part_only(fsdp):
    # a file of each rank, about half as large as the state: weights, averages and two moments of float32
    bytes_of_state = sum(t.nbytes for n, t in state(fsdp).items() if n != "lm_head.weight")
    parts = [file.stat().st_size for file in (fsdp / "shards-4").glob("__?_0.distcp")]
    assert len(parts) == 2 and all(0.4 * bytes_of_state < part < 0.8 * bytes_of_state for part in parts)


def test_a_shared_run_resumes_to_the_bit(tmp_path, half, fsdp):
    out = shutil.copytree(half, tmp_path / "out")
    said = ranks(2, "train.py", *again(out, "--max_iters=4")).stdout
    assert "resuming with max_iters=4; it was 2" in said and said.count("resuming with") == 1
    for name in ("ckpt.pt", "best.pt"):
        assert_same_bytes(state(out, name), state(fsdp, name))
    assert [row["loss"] for row in rows(out)] == [row["loss"] for row in rows(fsdp)]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, half, one):
    # 2 → 1 → 4: shards to one file and back; on one process a run that was shared goes on as a plain one
    out = shutil.copytree(half, tmp_path / "out")
    assert list(out.glob("shards-*"))
    script("train.py", *again(out, "--max_iters=3"))
    assert torch.load(out / "ckpt.pt", weights_only=True)["model"]  # in one file, as in any other run
    resumed(out, 4, "--max_iters=4")
    assert_same_run(out, one)
    assert_close_state(out, one)


def test_a_rank_whose_disk_is_full_loses_nothing(tmp_path, data, fsdp):
    # no rank may take a folder for complete that another could not write, and training goes on
    out, log = shutil.copytree(fsdp, tmp_path / "out"), tmp_path / "log"
    again = small(out, data, **{**SETTINGS, **SHARED, "init_from": "resume", "max_iters": 7})
    processes = start(again, log, world=2, before=fill_disk_of_rank_1)
    for process in processes:
        process.join(60)
    said = log.read_text()
    assert [process.exitcode for process in processes] == [1, 1], said
    assert "NOT SAVED at iteration 6: cannot write" in said and "iter 6:" in said
    assert re.search(r"^error: cannot write .* \(rank 1: no space left, or the disk refuses\)", said, re.MULTILINE)
    assert_same_bytes(state(out), state(fsdp))
    assert sorted(path.name for path in out.glob("shards-*")) == ["shards-2", "shards-4"]


def fill_disk_of_rank_1():
    if os.environ["RANK"] == "1":
        resource = pytest.importorskip("resource")
        resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, 40 * 1024))


def test_a_llama_is_shared_recomputed_in_chunks_and_resumed_to_the_bit(tmp_path, data):
    # an untied output layer used to be tied again, and was left out of checkpoints
    settings = LLAMA | MUON | FLOAT32
    whole = trained(tmp_path / "whole", data, 1, **settings)
    plain = trained(tmp_path / "plain", data, 2, **SHARED, **settings, **LESS)
    assert_same_run(plain, whole)
    assert_close_state(plain, whole)
    weights = checkpoint.load(plain / "ckpt.pt")["model"]
    assert not torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
    half = trained(tmp_path / "half", data, 2, **SHARED, **settings, **LESS, max_iters=2)
    assert_same_bytes(state(resumed(half, 2, "--max_iters=4")), state(plain))


def test_a_run_of_muon_goes_on_divided_or_not(tmp_path, data):
    # 3 → 2 whole copies → two copies of two: its running means were looked for as AdamW's moments. Matrices that went
    # to the wrong owner, or rows that came back to the wrong rank, are off by far more than rounding
    settings = dict(MUON, **FLOAT32, gradient_accumulation_steps=12, batch_size=1)
    one = trained(tmp_path / "one", data, 1, **settings, max_iters=3)
    out = trained(tmp_path / "out", data, 3, **settings, **SHARED, max_iters=1)
    refused = fails("train.py", *again(out, "--max_iters=2", "--optimizer=adamw"))
    assert "optimizer=adamw cannot use the state of muon: resume with --optimizer=muon" in refused
    resumed(out, 2, "--max_iters=2", "--parallel=ddp", "--check_interval=1")
    resumed(out, 4, "--max_iters=3", "--parallel=fsdp", "--shard_size=2")
    assert_same_run(out, one)
    assert_close_state(out, one)


@pytest.mark.parametrize(
    ("dtype", "family"),
    [("bfloat16", {}), ("bfloat16", LLAMA | MUON), ("float16", MUON)],
    ids=["bfloat16", "Llama of Muon", "float16 of Muon"],
)
def test_in_low_precision_sharing_changes_no_bit(tmp_path, data, dtype, family):
    # weights are gathered in autocast's dtype, gradients are averaged in float32, and the scaler finds infinities on
    # any rank. No clipping: only the float32 norm is added up in another order. If gradients were scaled by the norm,
    # its last bit would move weights, and a weight that then rounds to another bfloat16 would move the next norm by
    # 4e-5, which no tolerance tells from gradients averaged in bfloat16 (1e-5). A Llama's norms of queries and keys, in
    # the modules of the matrices, would be gathered in bfloat16 too
    settings = dict(max_iters=2, grad_clip=0.0, dtype=dtype, **family)
    whole = trained(tmp_path / "whole", data, 2, **settings)
    out = trained(tmp_path / "out", data, 2, **SHARED, **settings)
    for ours, theirs in zip(rows(out), rows(whole), strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    assert_same_bytes(state(out), state(whole))


@pytest.mark.slow
def test_a_shared_model_compiles(tmp_path, data):
    # a compiled block draws other numbers for dropout than an eager one
    whole = trained(tmp_path / "whole", data, 1, dropout=0.0)
    out = trained(tmp_path / "out", data, 2, **SHARED, dropout=0.0, recompute="block", compile=True)
    for ours, theirs in zip(rows(out), rows(whole), strict=True):
        names = ("loss", "grad_norm")
        assert [ours[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=1e-3)
    assert record(out)["graphs"]


def test_a_signal_to_one_rank_ends_all_with_everything_saved(tmp_path, data):
    # the others need the rank that got the signal until the step, the evaluation and the samples are done
    draws = dict(max_iters=10**5, sample_interval=3, sample_prompts="a")
    settings = small(tmp_path / "out", data, **{**SETTINGS, **SHARED, **draws})
    processes = start(settings, tmp_path / "log", world=2, before=draw_little)
    wait_for(tmp_path / "out" / "ckpt.pt", seconds=60)
    os.kill(processes[1].pid, signal.SIGTERM)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 128 + signal.SIGTERM], (tmp_path / "log").read_text()
    assert checkpoint.load(tmp_path / "out" / "ckpt.pt")["iter_num"] == len(rows(tmp_path / "out"))
    drawn = [row["iter"] for row in rows(tmp_path / "out", "sample")]
    assert drawn == sorted({*drawn})  # by all ranks, and written once: a rank that draws alone waits for the others


def few_tokens():
    return mock.patch("fusedgpt.training.samples.NEW_TOKENS", 4)


def draw_little():
    few_tokens().start()


def test_what_cannot_be_shared_is_refused(tmp_path, data):
    place = dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # nobody is there
    command = ["train.py", *flags(small(tmp_path, data, **SETTINGS, **SHARED))]
    assert "shard_size=2 needs --parallel=fsdp" in fails(*command, "--parallel=ddp", "--shard_size=2", **place)
    assert "shard_size=3 does not divide 2 processes" in fails(*command, "--shard_size=3", **place)
