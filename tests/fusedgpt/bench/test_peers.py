"""Contenders of other projects compute what ours does, or take no turn."""

import os
import pathlib
import sys

import pytest
import torch

from fusedgpt.bench import commands, foreign, peers, training
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.small import run, settings

pytest.importorskip("transformers")
CPU = torch.device("cpu")
NANOGPT = os.environ.get("NANOGPT")


def build(part, name, tmp_path, data, **changes):
    s = settings("peers", tmp_path, data, batch_size=2, **changes)
    return peers.build({"part": part}, name, s, CPU)


def test_parts_to_a_report(tmp_path, data, clone):
    only = "training&*eager,generation&*float32,llama&*eager,llama&ours, GPT-2,recipe&*"
    found = run("peers", tmp_path, data, nanogpt=str(clone), only=only, vocab_size=None)
    assert [each.workload["part"] for each in found] == ["training", "generation", "llama", "recipe"]
    for each in found:
        assert all(line["status"] == "measured" for line in each.contenders.values()), each.contenders
        assert all(each.ratio(name) for name in each.measured if name != "ours")
    training, generation, llama, recipe = found
    assert training.measured.keys() == {"ours", "Hugging Face, eager", "nanoGPT, eager"}
    assert generation.measured["nanoGPT, float32"]["equal_ids"] == 8
    assert llama.measured.keys() == {"ours", "Hugging Face, eager", "ours, GPT-2"}
    assert recipe.measured["nanoGPT"]["tokens"] == recipe.measured["ours"]["tokens"] == 12 * 64
    text = (tmp_path / "results" / "peers" / "report.md").read_text()
    assert "## training" in text and "first ids equal to ours in float32" in text


def test_the_first_steps_have_the_same_losses(tmp_path, data):
    # the same weights, batches, learning rates and clipping: losses after five steps differ by rounding alone
    losses = [
        build("training", name, tmp_path, data, vocab_multiple=1, bias=True)[1]
        for name in ("ours", "Hugging Face, eager")
    ]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-3)
    assert losses[1]["errors"]["float32"] < 1e-6 and losses[1]["errors"]["first step"] < 1e-6


@pytest.mark.parametrize("by", [1.001, float("nan")])
@pytest.mark.parametrize(("part", "name"), [("training", "Hugging Face, eager"), ("generation", "nanoGPT, float32")])
def test_a_model_that_computes_something_else_takes_no_turn(part, name, by, tmp_path, data, clone, monkeypatch):
    # the proof is of the model itself, before its steps: a mask that is missing changes the loss by 6e-3
    project = foreign.Transformers if "Hugging" in name else foreign.NanoGPT
    loss = project.loss
    monkeypatch.setattr(project, "loss", lambda self, x, y: by * loss(self, x, y))
    with pytest.raises(ParityError, match=r"its loss in float32 is .*: a difference of (1\.0e-03|nan), allowed 1e-05"):
        build(part, name, tmp_path, data, nanogpt=str(clone))


def test_other_ids_than_ours_take_no_turn(tmp_path, data, clone, monkeypatch):
    generate = foreign.NanoGPT.generate
    monkeypatch.setattr(foreign.NanoGPT, "generate", lambda self, idx, new: (generate(self, idx, new) + 1) % 65)
    with pytest.raises(ParityError, match="in float32 only its first 0 ids equal ours"):
        build("generation", "nanoGPT, float32", tmp_path, data, nanogpt=str(clone))
    monkeypatch.setattr(foreign.NanoGPT, "generate", lambda self, idx, new: generate(self, idx, new - 1))
    with pytest.raises(ParityError, match="it made 7 new tokens, not 8"):
        build("generation", "nanoGPT, float32", tmp_path, data, nanogpt=str(clone))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nanogpt": "."}, r"nanogpt='\.' has no model.py|nanogpt='\.' has no"),
        ({"prompt_tokens": 1}, "prompt_tokens=1 and new_tokens=8 must be 2 or more"),
        ({"new_tokens": 99}, "together at most"),
    ],
)
def test_bad_input(changes, message, tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        peers.comparisons(settings("peers", tmp_path, data, **changes), CPU)


def test_who_takes_part(tmp_path, data, monkeypatch):
    def names(**changes):
        found = peers.comparisons(settings("peers", tmp_path, data, **changes), CPU)
        return {each.workload["part"]: each.names for each in found}

    monkeypatch.setattr(peers, "cpu_multiplies_bfloat16", lambda: True)
    assert names()["training"] == ("ours", "ours, compiled", "Hugging Face, eager", "Hugging Face, compiled")
    assert "Hugging Face, bfloat16, compiled" in names()["generation"] and "recipe" not in names()
    monkeypatch.setattr(peers, "cpu_multiplies_bfloat16", lambda: False)  # such a CPU only emulates it
    assert not [name for name in names()["generation"] if "16" in name]
    monkeypatch.setattr(training, "build", lambda s: (None, {"ran": {"compile": False}}))  # without a C++ compiler
    with pytest.raises(UserError, match="cannot be compiled"):  # it was measured eager under this name
        build("training", "ours, compiled", tmp_path, data)


def test_a_whole_command_is_timed_from_start_to_end(tmp_path, data, clone, monkeypatch):
    ran = []

    def ended(command, folder):
        ran.append((command[1], pathlib.Path(folder)))
        return "step 0: train loss 4.2, val loss 4.1000\nstep 9: train loss 2.0, val loss 2.5000\n"

    monkeypatch.setattr(commands, "_ended", ended)
    s = settings("peers", tmp_path, data, nanogpt=str(clone))
    for name, loss in (("ours", 2.5), ("nanoGPT", 2.5)):
        turn, found = peers.build({"part": "command"}, name, s, CPU)
        assert found["val_loss"] == loss and len(ran) == 1
        assert len(turn(0.0)) == 1 and len(ran) == 1  # the run that built it was its warm-up
        assert len(turn(0.5)) == 1 and len(ran) == 2
        ran.clear()


def test_a_command_that_fails_says_so(tmp_path):
    with pytest.raises(RuntimeError, match=r"-c import sys.* ended with status 3: no"):
        commands._ended([sys.executable, "-c", "import sys; print('no', file=sys.stderr); sys.exit(3)"], tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not NANOGPT, reason="NANOGPT names no clone of nanoGPT")
def test_nanogpt_itself(tmp_path, data):
    for part, name in (("training", "nanoGPT, eager"), ("generation", "nanoGPT, float32"), ("recipe", "nanoGPT")):
        turn, _ = build(part, name, tmp_path, data, nanogpt=NANOGPT)
        assert turn(0.0)
