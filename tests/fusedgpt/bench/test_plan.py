"""Plans: what they say, and what they refuse."""

import dataclasses
import re

import pytest

import bench
from configurator import configure
from fusedgpt.bench import kinds, plan
from fusedgpt.errors import UserError
from fusedgpt.estimates.training_memory import Load, Memory
from fusedgpt.settings import validate
from model import GPTConfig
from tests.launch import ROOT, script

pytest.importorskip("tyro")  # reads the command line
GPT2 = GPTConfig(vocab_size=50304, bias=False)
XL = ["--n_layer=48", "--n_head=25", "--n_embd=1600"]


def settings(*args):
    defaults = kinds.settings_class(plan)(**plan.DEFAULTS)
    return configure(defaults, list(args), "", kinds.unused_settings("plan"))


def planned(*args):
    """What a plan says."""
    said = []
    plan.answer(settings(*args), said.append)
    return said


def numbers(pattern, text):
    return [float(number.replace(",", "")) for number in re.search(pattern, text).groups()]


def test_a_plan_says_memory_and_time():
    said = planned()
    assert said[0].startswith("computed, not measured: 124,373,760 parameters on 8 x H100, ddp, recompute=none")
    assert "of each GPU: 5, of 12 x 1024 tokens; a vocabulary of 50,304" in said[0]
    parts = [float(part) for part in re.findall(r"[a-z]+ ([\d.]+)", said[1].partition("more: ")[2])]
    (total,) = numbers(r"memory: ([\d.]+) of 80 GB", said[1])
    assert sum(parts) == pytest.approx(total, abs=0.06)
    # by hand: 6 FLOPs a parameter but positions, and 12 L C T of attention; 40 x 12 x 1024 tokens a step
    flops = 6 * (124_373_760 - 1024 * 768) + 12 * 12 * 768 * 1024
    rate = 0.4 * 8 * 989e12 / flops
    ms, tokens_per_s = numbers(r"([\d.,]+) ms a step, ([\d,]+) tokens/s", said[2])
    assert (ms, tokens_per_s) == pytest.approx((491_520e3 / rate, rate), rel=1e-3)
    # its price is what people ask: a plan used to answer for 20 tokens a parameter only, whatever max_iters
    took = r"max_iters=600,000, (\d+) billion tokens, take ([\d.]+) h: (\d+) GPU-hours"
    billions, hours, of_gpus = numbers(took, said[2])
    assert billions == round(600_000 * 0.49152e-3)
    wanted = 600_000 * 491_520 / rate / 3600
    assert (hours, of_gpus) == pytest.approx((wanted, 8 * wanted), rel=5e-3)
    assert numbers(r"([\d.,]+) ms a step", planned("--mfu=0.2")[2])[0] == pytest.approx(2 * ms, rel=1e-3)


def test_the_command_line():
    said = script("bench.py", "plan", "--gpu=RTX 4090", "--gpus=1", "--gradient_accumulation_steps=5").stdout
    assert "1 x RTX 4090" in said
    text = script("bench.py", "plan", "--help", COLUMNS="200").stdout
    assert "--mfu" in text and "--learning_rate" not in text and "RTX 4090" in text


def test_a_llama_is_planned_as_what_it_is(monkeypatch):
    # it used to be refused; as a GPT-2 of its layers and channels it would have 12 C² parameters in a layer
    monkeypatch.chdir(ROOT)
    s = settings("config/model/llama-3-8b.py", "--parallel=fsdp", "--batch_size=1", "--gradient_accumulation_steps=8")
    config, run = plan.config_of(s), plan.run_of(s)
    assert config.num_params == 8_030_261_248
    more = Memory.of(dataclasses.replace(config, n_kv_head=None), run).total
    assert more > 1.05 * Memory.of(config, run).total


@pytest.mark.parametrize(
    ("args", "changes"),
    [
        (["--batch_size=512", "--gradient_accumulation_steps=8"], {"batch_size"}),
        (["--block_size=196608", "--batch_size=1", "--gradient_accumulation_steps=8"], {"recompute"}),
        ([*XL, "--gpu=RTX 4090", "--gpus=4", "--batch_size=1"], {"parallel"}),
        ([*XL, "--gpu=RTX 4090", "--gpus=1", "--batch_size=1"], {"parallel", "gpus"}),
        (["--gpus=1", "--parallel=fsdp", "--batch_size=500"], {"batch_size"}),
        ([*XL, "--n_layer=60", "--gpu=L4", "--batch_size=1", "--optimizer=muon"], {"parallel"}),
    ],
    ids=["smaller micro-batch", "recompute", "fsdp", "more GPUs", "fsdp alone", "fsdp of muon"],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(args, changes):
    # smaller micro-batches first, then recomputation, then fsdp, then more GPUs
    with pytest.raises(UserError) as raised:
        planned(*args)
    advice = str(raised.value).partition("what fits is ")[2].split()
    named = {flag.removeprefix("--").partition("=")[0] for flag in advice}
    assert named - {"gradient_accumulation_steps"} == changes
    s, other = settings(*args), settings(*args, *advice)
    validate(other)  # train.py and bench.py take it
    assert s.batch_size * s.gradient_accumulation_steps == other.batch_size * other.gradient_accumulation_steps
    assert planned(*args, *advice)  # it does fit


@pytest.mark.parametrize(("attention", "recompute"), [("auto", "block"), ("manual", "attention")])
def test_the_nearest_saves_what_it_says(attention, recompute):
    # a fused kernel keeps next to nothing that recompute=attention could save
    run = Load(1, attention=attention)
    room = Memory.of(GPT2, dataclasses.replace(run, recompute="attention")).total
    assert plan.nearest(GPT2, run, room).recompute == recompute


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpus=6"], "gradient_accumulation_steps=40 cannot be shared by 6 processes"),
        (["--gpus=0"], "gpus=0 must be 1 or more"),
        (["--shard_size=3", "--parallel=fsdp"], "shard_size=3 must divide gpus=8, or be None"),
        (["--vocab_size=None"], "vocab_size=None: a plan reads no data; give its number of ids"),
        (["config/eval_gpt2_xl.py"], "init_from=gpt2-xl: a plan reads no weights; give --init_from=scratch"),
        (["--dtype=float32"], "--dtype has no effect here: bench.py plan does not use it"),
        (["--mfu=40"], "mfu=40 must be more than 0, and at most 1"),
        ([*XL, "--gpu=L4", "--n_layer=100000"], "nothing fits; take a smaller model"),
    ],
    ids=" ".join,
)
def test_bad_input_ends_in_one_sentence(args, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(message)):
        bench.say_plan(args)
