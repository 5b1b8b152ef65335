"""Defaults, then files, then flags; and a sentence for each mistake."""

import dataclasses
import importlib
import os
from typing import Literal

import pytest

import sample
import train
from configurator import configure
from fusedgpt.errors import UserError
from tests.conftest import ROOT, script

pytest.importorskip("tyro")


@dataclasses.dataclass
class Settings:
    rate: float = 0.1  # a number
    steps: int = 10  # a whole number
    name: str = "x"  # text
    quick: bool = False  # a flag
    compile: bool | Literal["auto"] = "auto"  # three ways
    kernel: Literal["manual", "flash"] = "flash"  # a choice
    size: int | None = None  # a number or none


def parse(*args):
    return configure(Settings(), list(args), "")


def test_order_is_defaults_files_flags(tmp_path):
    (tmp_path / "a.py").write_text("rate = 5\nsteps = 3\nname = 'a'\nsize = None\ncompile = False")
    (tmp_path / "b.py").write_text("import time\nfrom math import sqrt\n_scratch = sqrt(4)\nsteps = 2 * steps")
    got = parse(str(tmp_path / "a.py"), str(tmp_path / "b.py"), "--name=c")
    assert got == Settings(rate=5.0, steps=6, name="c", compile=False) and type(got.rate) is float


@pytest.mark.parametrize(
    ("flag", "name", "value"),
    [
        ("--rate=0", "rate", 0.0),  # T8: each of these ended nanoGPT with a bare AssertionError or ValueError
        ("--rate=1", "rate", 1.0),
        ("--rate=1e308", "rate", 1e308),
        ("--name=5", "name", "5"),
        ("--name=a=b", "name", "a=b"),
        ("--name=", "name", ""),
        ("--name=--x", "name", "--x"),
        ("--name=two words", "name", "two words"),
        ("--name=True", "name", "True"),
        ("--steps=2_000", "steps", 2000),
        (f"--steps={2**63 - 1}", "steps", 2**63 - 1),
        ("--quick=True", "quick", True),
        ("--quick=False", "quick", False),
        ("--compile=True", "compile", True),
        ("--compile=auto", "compile", "auto"),
        ("--kernel=manual", "kernel", "manual"),
        ("--size=5", "size", 5),
        ("--size=None", "size", None),
    ],
)
def test_flags_are_read(flag, name, value):
    got = getattr(parse(flag), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--stepz=5", "the command line: there is no setting 'stepz': did you mean steps?"),
        ("--qqqqq=5", "the command line: there is no setting 'qqqqq': --help lists every setting"),
        ("--compile", "--compile has no value: flags are written --name=value, as in --compile=True"),
        ("--steps=2.5", "the command line: steps='2.5' is not allowed: it takes a whole number"),
        ("--rate=fast", "the command line: rate='fast' is not allowed: it takes a number"),
        ("--quick=1", "the command line: quick='1' is not allowed: it takes True or False"),
        ("--compile=maybe", "the command line: compile='maybe' is not allowed: it takes True or False or 'auto'"),
        ("--kernel=flsh", "the command line: kernel='flsh' is not allowed: it takes 'manual' or 'flash'"),
        ("--size=big", "the command line: size='big' is not allowed: it takes a whole number or None"),
        ("config.py", "config file config.py does not exist"),
        ("steps=5", "config file steps=5 does not exist; flags are written --name=value"),
        ("/", "config file / is no regular file; flags are written --name=value"),
        # these used to reach PyTorch and end in an OverflowError or a RuntimeError
        (f"--steps={2**63}", f"the command line: steps='{2**63}' is not allowed: it takes whole numbers below 2**63"),
        ("--name=a\0b", r"the command line: name='a\x00b' is not allowed: it takes text without the character NUL"),
        ("--\udcff=1", r"the command line: there is no setting '\udcff'"),
    ],
)
def test_bad_flags_are_named(flag, message, capfd):
    with pytest.raises(UserError) as raised:
        parse(flag)
    assert str(raised.value).startswith(message)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stepz = 5", "there is no setting 'stepz': did you mean steps?"),  # T8: used to be ignored in silence
        ("steps = '5'", "steps='5' is not allowed: it takes a whole number"),
        ("name = 5", "name=5 is not allowed: it takes text"),
        ("kernel = 'flsh'", "kernel='flsh' is not allowed"),
        ("steps = 1 / 0", "fails: ZeroDivisionError"),
        # each of these used to be a traceback, or to end the script with status 0
        ("def f(): f()\nf()", "fails: RecursionError"),
        ("rate = 10**400", "is not allowed: it takes a number"),
    ],
)
def test_files_pass_the_same_check(tmp_path, line, message):
    (tmp_path / "c.py").write_bytes(line.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"c\.py") as raised:
        parse(str(tmp_path / "c.py"))
    assert message in str(raised.value)


def test_ctrl_c_in_a_file_is_no_mistake_of_the_file(tmp_path):
    (tmp_path / "c.py").write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        parse(str(tmp_path / "c.py"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
def test_a_fifo_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "c.py")
    with pytest.raises(UserError, match="is no regular file"):
        parse(str(tmp_path / "c.py"))


UNUSED = {"quick": "it is of no use here", "epochs": "it is a setting of another script"}


def test_a_file_may_be_another_scripts(tmp_path):
    (tmp_path / "c.py").write_text("epochs = 7\nquick = True\nsteps = 3")
    assert configure(Settings(), [str(tmp_path / "c.py")], "", UNUSED) == Settings(steps=3)
    (tmp_path / "c.py").write_text("epochs = 7\nstepz = 3")
    with pytest.raises(UserError, match="there is no setting 'stepz': did you mean steps"):
        configure(Settings(), [str(tmp_path / "c.py")], "", UNUSED)


def test_a_flag_without_effect_is_refused_and_not_in_the_help(capsys):
    for flag in ("--quick=True", "--quick", "--epochs=7"):
        name = flag.lstrip("-").partition("=")[0]
        with pytest.raises(UserError, match=f"the command line: --{name} has no effect here: {UNUSED[name]}"):
            configure(Settings(), [flag], "", UNUSED)
    with pytest.raises(SystemExit):
        configure(Settings(), ["--steps=7", "--help"], "", UNUSED)
    shown = capsys.readouterr().out
    assert "--quick" not in shown and "--epochs" not in shown and "(default: 7)" in shown


@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.py")), ids=lambda f: f.name)
def test_every_config_file_loads(file):
    if file.name.startswith("bench_"):
        kinds = importlib.import_module("fusedgpt.bench.kinds")
        kind = file.read_text().partition("python bench.py ")[2].split()[0]  # as its first lines say
        assert kinds.read_settings(kind, [str(file)])[0] != kinds.read_settings(kind, [])[0]
    else:
        settings = configure(train.Settings(), [str(file)], "")
        assert settings != train.Settings()
        train.validate(settings)


def test_the_articles_batch_and_nanogpts():
    gpt2 = configure(train.Settings(), [str(ROOT / "config/train_gpt2.py")], "")
    assert gpt2.batch_size * gpt2.block_size * gpt2.gradient_accumulation_steps == 491_520
    blog = configure(train.Settings(), [str(ROOT / "config/train_gpt2_blog.py")], "")
    assert (blog.dropout, blog.attention, blog.vocab_multiple, blog.batch_size) == (0.0, "flash", 64, 12)


def test_nanogpts_keys_are_all_there():
    keys = """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
    wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd dropout
    bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters min_lr backend
    device dtype compile"""
    assert set(keys.split()) <= {f.name for f in dataclasses.fields(train.Settings)}
    keys = "init_from out_dir start num_samples max_new_tokens temperature top_k seed device dtype compile"
    assert set(keys.split()) <= {f.name for f in dataclasses.fields(sample.Settings)}


@pytest.mark.parametrize("name", ["train.py", "sample.py"])
def test_help_shows_every_setting_with_its_default_and_meaning(name):
    text = " ".join(script(name, "--help", COLUMNS="200").stdout.split())
    settings = {"train.py": train.Settings, "sample.py": sample.Settings}[name]
    for field in dataclasses.fields(settings):
        start = text.index(f"--{field.name} ")
        end = text.index("(default:", start)
        # its own default, not the next one's
        assert "--" not in text[start + 2 : end].replace("--help", ""), field.name
        assert len(text[start:end].split()) >= 3, field.name
