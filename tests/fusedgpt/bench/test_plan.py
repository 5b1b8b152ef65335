"""Plans: what they print and write, and what they refuse."""

import dataclasses
import functools
import re
import shlex
import time
from unittest import mock

import pytest

import bench
from configurator import configure
from fusedgpt.bench import kinds, plan, plan_sweep
from fusedgpt.errors import UserError
from fusedgpt.estimates import step
from fusedgpt.estimates.memory import Memory
from fusedgpt.estimates.run import Run
from fusedgpt.machine.gpus import GPUS
from fusedgpt.settings import validate
from model import GPTConfig
from tests.launch import ROOT, script

pytest.importorskip("tyro")  # reads the command line
GPT2 = GPTConfig(vocab_size=50304, bias=False)
XL = ["--n_layer=48", "--n_head=25", "--n_embd=1600"]


def settings(*args):
    defaults = kinds.settings_class(plan)(**plan.DEFAULTS)
    return configure(defaults, list(args), "", kinds.unused_settings("plan"))


def planned(tmp_path, *args):
    """What a plan says. It draws nothing."""
    said = []
    with mock.patch.object(plan, "figures", lambda *_: iter(())):
        plan.answer(settings(*args, f"--results={tmp_path}"), "the command", said.append)
    return said


@functools.cache
def h100_sweep():
    """The rows of a sweep. Tests only read them."""
    return plan_sweep.sweep("H100", "ndr")


def numbers(pattern, text):
    return [float(number.replace(",", "")) for number in re.search(pattern, text).groups()]


def test_a_plan_says_memory_time_and_what_bounds_it(tmp_path):
    said = []
    paths = plan.answer(settings(f"--results={tmp_path}"), "the command", said.append)
    text = "\n".join(said)
    assert "computed, not measured: 124,373,760 parameters on 8 x H100, ddp" in text
    assert "5 micro-batches of 12 x 1024 tokens on each" in text
    parts = [float(part) for part in re.findall(r"[a-zA-Z]+ ([\d.]+)", said[1].partition("GPU: ")[2])]
    total, least, most = numbers(r"memory: ([\d.]+) \(([\d.]+) to ([\d.]+)\) of 80 GB", said[1])
    assert sum(parts) == pytest.approx(total, abs=0.06) and least < total < most
    ms, fastest, slowest = numbers(r"step: ([\d.]+) \(([\d.]+) to ([\d.]+)\) ms", said[2])
    assert (fastest / ms, slowest / ms) == pytest.approx(step.RANGE, rel=0.01)
    speeds = numbers(r"speed: ([\d,]+) \(([\d,]+) to ([\d,]+)\) tokens/s", said[3])
    assert speeds == pytest.approx([491_520e3 / each for each in (ms, slowest, fastest)], rel=0.01)  # 40 x 12 x 1024
    took = numbers(r"take ([\d.]+) minutes \(([\d.]+) minutes to ([\d.]+) minutes\)", said[4])
    assert took == pytest.approx([20 * 124_373_760 / speed / 60 for speed in (speeds[0], *speeds[:0:-1])], rel=0.05)
    assert "bound by matrix products" in said[3] and "20 tokens a parameter, 2.49 billion" in said[4]
    report = (tmp_path / "plan" / "plan.md").read_text()
    assert "Computed, not measured" in report and "`the command`" in report and "| fsdp | block |" in report
    assert [path.name for path in paths] == ["plan.md", "plan.png", "plan.svg"] and all(path.exists() for path in paths)


def test_a_plan_says_if_the_range_of_its_memory_does_not_fit(tmp_path):
    # "75.2 of 80 GB" promised what runs with as much more as others needed would not have had
    tight = planned(tmp_path, *XL, "--batch_size=16")
    (most,) = numbers(r"to ([\d.]+)\) of 80 GB of each GPU; it may not fit: ", tight[1])
    assert most > 80
    roomy = planned(tmp_path, *XL, "--batch_size=8")
    assert "may not fit" not in roomy[1]


def test_a_llama_is_planned_as_what_it_is(monkeypatch):
    # it used to be refused; as a GPT-2 of its layers and channels it would have 12 C² parameters in a layer
    monkeypatch.chdir(ROOT)
    s = settings("config/model/llama-3-8b.py", "--parallel=fsdp", "--batch_size=1", "--gradient_accumulation_steps=8")
    config, run = plan.config_of(s), plan.run_of(s)
    assert config.num_params == 8_030_261_248
    row = plan.compute(config, run, "H100", "ndr")
    assert row["status"] == "computed" and 0.3 < row["mfu"] < 0.6
    more = plan.compute(dataclasses.replace(config, n_kv_head=None), run, "H100", "ndr")
    assert more["memory"]["total"] > 1.05 * row["memory"]["total"]
    assert more["seconds"]["total"] > 1.05 * row["seconds"]["total"]


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
        (["--block_size=196608", "--batch_size=1", "--gradient_accumulation_steps=8"], {"recompute"}),
        ([*XL, "--gpu=RTX 4090", "--gpus=4", "--batch_size=1"], {"parallel"}),
        ([*XL, "--gpu=RTX 4090", "--gpus=1", "--batch_size=1"], {"parallel", "gpus"}),
        (["--gpus=1", "--parallel=fsdp", "--batch_size=500"], {"batch_size"}),
        ([*XL, "--n_layer=60", "--gpu=L4", "--batch_size=1", "--optimizer=muon"], {"parallel"}),
        (["--gpus=131072", "--batch_size=1024", "--gradient_accumulation_steps=131072"], {"batch_size"}),
    ],
    ids=["smaller micro-batch", "recompute", "fsdp", "more GPUs", "fsdp alone", "fsdp of muon", "many GPUs"],
)
def test_what_does_not_fit_is_refused_with_the_nearest_that_does(args, changes, tmp_path):
    # smaller micro-batches first, then recomputation, then fsdp, then more GPUs
    with pytest.raises(UserError) as raised:
        planned(tmp_path, *args)
    advice = str(raised.value).partition("what fits is ")[2].split()
    named = {flag.removeprefix("--").partition("=")[0] for flag in advice}
    assert named - {"gradient_accumulation_steps"} == changes
    s, other = settings(*args), settings(*args, *advice)
    validate(other)  # train.py and bench.py take it
    assert s.batch_size * s.gradient_accumulation_steps == other.batch_size * other.gradient_accumulation_steps
    assert planned(tmp_path, *args, *advice)  # it does fit
    assert not list(tmp_path.glob("*.md"))


def test_the_nearest_is_the_largest_micro_batch_that_fits_and_is_found_soon():
    room, started = GPUS["H100"].memory, time.monotonic()
    found = plan.nearest(GPT2, Run(2 * 10**9), room)  # every number down from there used to be tried
    assert time.monotonic() - started < 20
    twice = dataclasses.replace(found, batch_size=2 * found.batch_size)
    assert Memory.of(GPT2, found).total <= room < Memory.of(GPT2, twice).total


@pytest.mark.parametrize(("attention", "recompute"), [("auto", "block"), ("manual", "attention")])
def test_the_nearest_saves_what_it_says(attention, recompute):
    # a fused kernel keeps next to nothing that recompute=attention could save
    run = Run(1, attention=attention)
    room = Memory.of(GPT2, dataclasses.replace(run, recompute="attention")).total
    assert plan.nearest(GPT2, run, room).recompute == recompute


def test_only_ways_that_train_py_has_are_compared():
    for optimizer in ("adamw", "muon"):
        rows = plan.alternatives(GPT2, Run(1, 16, optimizer=optimizer, gpus=16), "H100", "ndr")
        assert {row["parallel"] for row in rows} == {"ddp", "fsdp", "fsdp in groups of 8"}
    # groups of one share nothing, and one GPU has nobody to share with
    for alone in (Run(1, 8, gpus=8, parallel="fsdp", shard_size=1), Run(1, parallel="fsdp")):
        assert plan.compute(GPT2, alone, "H100", "ndr")["parallel"] == "ddp"


def test_numbers_are_words_that_anyone_reads(tmp_path):
    said = planned(tmp_path, "--gpus=1", "--gradient_accumulation_steps=1")
    assert "1 micro-batch of 12 x 1024 tokens" in said[0] and "a vocabulary of 50,304" in said[0]
    assert said[2].split()[-3:-1] == ["not", "counted"] and " of " not in said[2]  # nothing is sent
    said = planned(tmp_path, *XL, "--batch_size=16", "--optimizer=muon", "--recompute=block")
    assert "products 1," in said[2] and "e+" not in "".join(said) and "AdamW" not in "".join(said)
    rounded = [plan.rounded(number) for number in (1250.4, 12.71, 0.5312, 0, 1234567)]
    assert rounded == ["1,250", "12.7", "0.531", "0", "1,230,000"]
    assert [plan.duration(days) for days in (0.007, 0.5, 17.42)] == ["10 minutes", "12 hours", "17.4 days"]


def test_the_figure_shows_what_was_asked_for(tmp_path):
    # a bar of what does not fit used to shrink all others to nothing, and one of a single GPU to leave the axes
    for args in ([*XL, "--n_layer=960", "--gpus=512", "--batch_size=1", "--parallel=fsdp"], ["--gpus=1"]):
        s = settings(*args, "--gradient_accumulation_steps=512", "--recompute=block")
        config, run = plan.config_of(s), plan.run_of(s)
        rows = plan.alternatives(config, run, "H100", "ndr")
        ((_, _, _, figure),) = plan.figures(config, rows, "H100")
        left, right = figure.axes
        assert left.get_xlim()[1] == pytest.approx(84)
        fitting = [row["seconds"]["total"] for row in rows if row["status"] == "computed"]
        assert right.get_xlim()[1] >= 1.02e3 * max(fitting)
        assert len(right.texts) == len(rows) - len(fitting)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--gpus=6"], "gradient_accumulation_steps=40 cannot be shared by 6 processes"),
        (["--gpus=0"], "gpus=0 must be 1 or more"),
        (["--shard_size=3", "--parallel=fsdp"], "shard_size=3 must divide gpus=8, or be None"),
        (["--vocab_size=None"], "vocab_size=None: a plan reads no data; give its number of ids"),
        (["config/eval_gpt2_xl.py"], "init_from=gpt2-xl: a plan reads no weights; give --init_from=scratch"),
        (["--dtype=float32"], "--dtype has no effect here: a plan is for compiled steps in 16 bits"),
        (["--learning_rate=1"], "--learning_rate has no effect here: a plan does not depend on it"),
        (["--sweep=True", "--n_layer=3"], "--n_layer has no effect here: --sweep=True has models and runs of its own"),
        ([*XL, "--gpu=L4", "--n_layer=100000"], "65536 of them are not enough"),
    ],
    ids=" ".join,
)
def test_bad_input_ends_in_one_sentence(args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=re.escape(message)):
        bench.write_plan([*args, f"--results={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_the_command_line(tmp_path):
    args = ["--gpu=RTX 4090", "--gpus=1", "--gradient_accumulation_steps=5", f"--results={tmp_path}"]
    said = script("bench.py", "plan", *args).stdout
    assert "1 x RTX 4090" in said and "wrote " in said
    # it can be given again: a GPU of two words used to stand there as two arguments
    command = (tmp_path / "plan" / "plan.md").read_text().splitlines()[2].strip("`")
    assert shlex.split(command) == ["python", "bench.py", "plan", *args]
    text = script("bench.py", "plan", "--help", COLUMNS="200").stdout
    assert "--interconnect" in text and "--learning_rate" not in text and "RTX 4090" in text
    with pytest.raises(UserError, match="--gpus has no effect here"):
        kinds.read_settings("numerics", ["--gpus=2"])


def test_the_sweep_crosses_where_its_rows_do_and_is_the_published_one(tmp_path, monkeypatch):
    rows = h100_sweep()
    text = "\n".join(plan_sweep.crossings(rows))
    assert {row["status"] for row in rows} == {"computed", "does not fit"}
    for row in rows:
        if row["status"] == "computed":
            assert row["memory"]["total"] <= 80e9
            tokens = row["gpus"] * row["micro_steps"] * row["batch_size"] * 1024
            assert tokens == plan_sweep.MODELS[row["model"]][1]  # the same step on any number of GPUs
    # by hand: 16 bytes for each of 7 billion parameters are more than a GPU has
    assert "| 7B | ddp | on none |" in text
    xl = {row["gpus"]: plan_sweep.ratio(row) for row in rows if (row["model"], row["sharing"]) == ("XL", "fsdp")}
    first = min(gpus for gpus, ratio in xl.items() if ratio > 1)
    assert f"| XL | fsdp | from 8 GPUs on | from {first} GPUs on |" in text
    monkeypatch.setattr(plan_sweep, "sweep", lambda *_: rows)
    paths = plan_sweep.answer(settings("--sweep=True", f"--results={tmp_path}"), "the command", lambda line: None)
    assert [path.name for path in paths] == ["sweep.md", "sweep.png", "sweep.svg"]
    # published figures of a formula that has changed since would mislead
    published = (ROOT / "results" / "plan" / "sweep.md").read_text()
    tables = [*plan_sweep.crossings(rows), *plan_sweep.table(rows)]
    assert tables == [line for line in published.splitlines() if line.startswith("|")]


def test_the_titles_say_what_was_computed(tmp_path):
    s = settings("--gpus=16", "--gradient_accumulation_steps=48")
    rows = plan.alternatives(plan.config_of(s), plan.run_of(s), "H100", "ndr")
    title = plan.finding(rows, "H100")
    speed = plan.rounded(rows[0]["tokens_per_s"])
    assert title.startswith(f"Computed: 16 x H100 make {speed} tokens/s with ddp, ")
    slower = [rows[0] | {"tokens_per_s": rows[0]["tokens_per_s"] / 2}, *rows[1:]]
    assert re.search(r"; \w+.* [12]\.?\d* times that$", plan.finding(slower, "H100"))
    sweep = h100_sweep()
    models = dict.fromkeys(plan_sweep.MODELS)
    for model in models:  # by hand: the least number of GPUs on which no way to share keeps messages shorter
        numbers = sorted({row["gpus"] for row in sweep if row["model"] == model and row["status"] == "computed"})
        over = [
            gpus
            for gpus in numbers
            if all(
                plan_sweep.ratio(row) > 1
                for row in sweep
                if (row["model"], row["gpus"], row["status"]) == (model, gpus, "computed")
            )
        ]
        models[model] = over[0] if over else None
    title = plan_sweep.finding(sweep)
    where = [model for model, gpus in models.items() if gpus == 1024]
    assert f"from 1024 GPUs on in {' and '.join(where)}, not in 124M and 70B" in title
    assert [model for model, gpus in models.items() if gpus is None] == ["124M", "70B"]
    ((_, drawn, subject, _),) = plan_sweep.figures(sweep, "H100", "ndr")
    assert drawn == title
    for word in ("ddp: ", "fsdp: ", "hybrid: ", "InfiniBand NDR (ndr), 400 Gbit/s for each GPU"):
        assert word in subject  # ndr and hybrid were not explained
    assert plan.network("ethernet") == "Ethernet, 12.5 Gbit/s for each GPU"
