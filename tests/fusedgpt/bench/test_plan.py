"""Plans: what they print and write, and what they refuse."""

import dataclasses
import re

import pytest

import bench
from configurator import configure
from fusedgpt import scale
from fusedgpt.bench import plan, plan_sweep
from fusedgpt.errors import UserError
from fusedgpt.gpus import GPUS
from model import GPTConfig
from tests.conftest import ROOT, fails, script

pytest.importorskip("tyro")  # reads the command line
XL = ["--n_layer=48", "--n_head=25", "--n_embd=1600"]


def settings(*args):
    defaults = bench.settings_class(plan)(**plan.DEFAULTS)
    return configure(defaults, list(args), "", bench.unused_settings("plan"))


def planned(tmp_path, *args):
    """(what a plan says, the paths that it wrote)."""
    said = []
    return said, plan.answer(settings(*args, f"--results={tmp_path}"), "the command", said.append)


def test_a_plan_says_memory_time_and_what_bounds_it(tmp_path):
    said, paths = planned(tmp_path)
    text = "\n".join(said)
    assert "computed, not measured: 124,373,760 parameters on 8 x H100, ddp" in text
    assert "5 micro-batches of 12 x 1024 tokens on each" in text
    parts = [float(part) for part in re.findall(r"[a-zA-Z]+ ([\d.]+)", said[1].partition("GPU: ")[2])]
    total = float(re.search(r"memory: ([\d.]+) of 80 GB", said[1])[1])
    assert sum(parts) == pytest.approx(total, abs=0.06)
    ms, tokens_per_s = float(re.search(r"step: ([\d.]+) ms", said[2])[1]), float(said[3].split()[1].replace(",", ""))
    assert tokens_per_s == pytest.approx(491_520 / (ms / 1e3), rel=1e-3)  # 40 x 12 x 1024
    assert "bound by matrix products" in said[3] and "20 tokens a parameter, 2.49 billion" in said[4]
    report = (tmp_path / "plan" / "plan.md").read_text()
    assert "Computed, not measured" in report and "`the command`" in report and "| fsdp | block |" in report
    assert [path.name for path in paths] == ["plan.md", "plan.png"] and all(path.exists() for path in paths)


def test_a_config_file_of_train_py_is_taken_as_it_is(monkeypatch):
    # it sets much that a plan does not use
    monkeypatch.chdir(ROOT)
    s = settings("config/train_gpt2_blog.py")
    assert (s.gradient_accumulation_steps, s.attention, s.vocab_size) == (8, "flash", 50257)
    assert plan.run_of(s).micro_steps == 1


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        (["--batch_size=512", "--gradient_accumulation_steps=8"], {"batch_size"}),
        (["--block_size=131072", "--batch_size=1", "--gradient_accumulation_steps=8"], {"recompute"}),
        ([*XL, "--gpu=RTX 4090", "--gpus=4", "--batch_size=1"], {"parallel"}),
        ([*XL, "--gpu=RTX 4090", "--gpus=1", "--batch_size=1"], {"parallel", "gpus"}),
    ],
    ids=["smaller micro-batch", "recompute", "fsdp", "more GPUs"],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(args, changes, tmp_path):
    # smaller micro-batches first, then recomputation, then fsdp, then more GPUs
    with pytest.raises(UserError) as raised:
        planned(tmp_path, *args)
    advice = str(raised.value).partition("what fits is ")[2].split()
    named = {flag.removeprefix("--").partition("=")[0] for flag in advice}
    assert named - {"gradient_accumulation_steps"} == changes
    s, other = settings(*args), settings(*args, *advice)
    assert s.batch_size * s.gradient_accumulation_steps == other.batch_size * other.gradient_accumulation_steps
    said, _ = planned(tmp_path, *args, *advice)  # it does fit
    assert said
    assert not list(tmp_path.glob("*.md"))


def test_the_nearest_is_the_largest_micro_batch_that_fits():
    config, run = GPTConfig(vocab_size=50304, bias=False), scale.Run(batch_size=4096)
    room = GPUS["H100"].memory
    found = plan.nearest(config, run, room)
    assert scale.memory(config, found).total <= room
    twice = dataclasses.replace(run, batch_size=2 * found.batch_size, gradient_accumulation_steps=1)
    assert scale.memory(config, twice).total > room


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpus=6"], "gradient_accumulation_steps=40 cannot be shared by 6 processes"),
        (["--gpus=0"], "gpus=0 must be 1 or more"),
        (["--shard_size=3", "--parallel=fsdp"], "shard_size=3 is for --parallel=fsdp, and must divide gpus=8"),
        (["--n_head=7"], "cannot be split over n_head=7"),
        (["--gpu=H1000"], "gpu='H1000' is not allowed"),
        (["--dtype=float32"], "--dtype has no effect here: a plan is for compiled steps in 16 bits"),
        (["--learning_rate=1"], "--learning_rate has no effect here: a plan does not depend on it"),
        ([*XL, "--gpu=L4", "--n_layer=100000"], "65536 of them are not enough"),
    ],
    ids=" ".join,
)
def test_bad_input_ends_in_one_sentence(args, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        planned(tmp_path, *args)
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path):
    said = script("bench.py", "plan", "--gpus=1", "--gradient_accumulation_steps=5", f"--results={tmp_path}").stdout
    assert "1 x H100" in said and "wrote " in said
    assert "what fits is --batch_size=" in fails("bench.py", "plan", "--batch_size=5000", f"--results={tmp_path}")
    text = script("bench.py", "plan", "--help", COLUMNS="200").stdout
    assert "--interconnect" in text and "--learning_rate" not in text and "RTX 4090" in text
    assert "--gpus has no effect here" in fails("bench.py", "numerics", "--gpus=2")


def test_the_sweep_crosses_where_its_rows_do(tmp_path):
    rows = plan_sweep.sweep("H100", "ndr")
    text = "\n".join(plan_sweep.crossings(rows))
    assert {row["status"] for row in rows} == {"computed", "does not fit"}
    for row in rows:
        if row["status"] == "computed":
            assert row["memory"]["total"] <= 80e9
            tokens = row["gpus"] * row["micro_steps"] * row["batch_size"] * 1024
            assert tokens == plan_sweep.MODELS[row["model"]][3]  # the same step on any number of GPUs
    # by hand: 16 bytes for each of 7 billion parameters are more than a GPU has
    assert "| 7B | ddp | on none |" in text
    xl = {row["gpus"]: plan_sweep.ratio(row) for row in rows if (row["model"], row["sharing"]) == ("XL", "fsdp")}
    first = min(gpus for gpus, ratio in xl.items() if ratio > 1)
    assert f"| XL | fsdp | from 8 GPUs on | from {first} GPUs on |" in text
    paths = plan_sweep.answer(settings("--sweep=True", f"--results={tmp_path}"), "the command", lambda line: None)
    assert [path.name for path in paths] == ["sweep.md", "sweep.png"]
    assert paths[1].stat().st_size < 300_000


def test_the_published_sweep_is_that_of_today(tmp_path):
    # figures of a formula that has changed since would mislead
    plan_sweep.answer(settings("--sweep=True", f"--results={tmp_path}"), "python bench.py plan --sweep=True", str)
    there = (ROOT / "results" / "plan" / "sweep.md").read_text().splitlines()
    here = (tmp_path / "plan" / "sweep.md").read_text().splitlines()
    assert [line for line in here if line.startswith("|")] == [line for line in there if line.startswith("|")]
