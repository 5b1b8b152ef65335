"""Defaults, then files, then flags; and a sentence for each mistake."""

import dataclasses
import os
from typing import Literal

import pytest

import configurator
import sample
import train
from configurator import assigned, changed, configure, separate
from fusedgpt.errors import UserError
from tests.launch import ROOT, fails, script

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


def test_a_config_file_is_taken_from_here_before_the_projects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = ["config/quickstart.py", "config/study/../quickstart.py"]
    assert configure(train.Settings(), both[:1], "").block_size == 128
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "quickstart.py").write_text("block_size = 3")
    assert [configure(train.Settings(), [file], "").block_size for file in both] == [3, 128]


def test_a_file_changes_an_earlier_run_to_a_default_too(tmp_path):
    # Python keeps one object of a small number, a bool or a short text, so that a default counted as not assigned
    (tmp_path / "c.py").write_text(
        "rate = 0.1\nsteps = 2 * 5\nquick: bool = False\nif quick:\n    name = 'x'\nkernel = 'fla' 'sh'\n"
        "def _set():\n    global size\n    size = steps\n_set()\n"
    )
    before = Settings(rate=0.2, steps=99, name="y", quick=True, compile=True, kernel="manual")
    got = changed(before, assigned(Settings(), [str(tmp_path / "c.py")]))
    assert got == Settings(name="y", compile=True, size=10)


KINDS = [bool, int, float, str, bool | Literal["auto"], Literal["manual", "flash"], int | None, float | None]
KINDS += [str | None, Literal["manual", "flash"] | str]
# T8: many of these ended nanoGPT with a bare AssertionError or ValueError
TEXTS = ["", " ", " 5 ", "two words", "\u0665", "5" * 5000, "'flash'", "5", "-5", "+5", "2_000", "5.0", "1e3", "1e308"]
TEXTS += ["-.5", "inf", "nan", "0x10", "True", "true", "False", "1", "None", "none", "auto", "flash", "a=b", "--x"]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_read_as_tyro_reads_them(kind, capfd):
    import tyro

    made = dataclasses.make_dataclass("Made", [("value", kind)])
    for text in TEXTS:
        try:
            want = tyro.cli(made, args=[f"--value={text}"], config=(tyro.conf.FlagConversionOff,)).value
        except SystemExit:
            assert configurator._read(text, kind) == [], text
        else:
            got, *_ = configurator._read(text, kind)
            assert type(got) is type(want) and repr(got) == repr(want), text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        # as --help prints it, and as other tools take it
        (["--steps", "3", "--rate", "-1"], dict(steps=3, rate=-1.0)),
        (["--quick", "True", "--name", "two words"], dict(quick=True, name="two words")),
        (["--name=a=b", "--size=None", "--compile=auto"], dict(name="a=b")),
        (["--name=~/run"], dict(name=os.path.expanduser("~/run"))),  # as bash passes it on; a folder named ~ came of it
    ],
)
def test_a_flag_may_be_apart_from_its_value_and_have_any_text(written, meant):
    assert parse(*written) == Settings(**meant)


def test_arguments_without_names_set_places(tmp_path):
    config = tmp_path / "c.py"
    config.write_text("steps = 3")
    both = ("name", "size")
    assert configure(Settings(), ["a", str(config), "7"], "", places=both) == Settings(steps=3, name="a", size=7)
    assert configure(Settings(), ["--name=b", "a"], "", places=both[:1]).name == "b"  # flags count more
    with pytest.raises(UserError, match="'8' is one argument too many"):
        configure(Settings(), ["a", "7", "8"], "", places=both)
    assert separate(["a", "--x-y", "1", "-h", "b", "--z"]) == (["a", "b"], ["--x_y=1", "--z"])


def test_a_script_that_executes_the_text_is_told(tmp_path):
    # nanoGPT's train.py, sample.py and bench.py do: every flag and file was ignored in silence
    mine = tmp_path / "mine.py"
    mine.write_text("compile = True\nexec(open('configurator.py').read())\n")
    assert "import configurator" in fails(mine)


NO_VALUE = "has no value: flags are written --name=value, as in --device=cpu or --compile=True"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("--stepz=5", "there is no setting 'stepz': did you mean steps?"),
        ("--qqqqq=5", "there is no setting 'qqqqq': --help lists every setting"),
        ("--quick --steps=3", f"--quick {NO_VALUE}"),
        ("--steps=2.5", "steps='2.5' is not allowed: it takes a whole number"),
        ("--quick=1", "quick='1' is not allowed: it takes True or False"),
        ("--kernel=FLASH", "kernel='FLASH' is not allowed: it takes 'manual' or 'flash': did you mean 'flash'?"),
        ("--compile=maybe", "compile='maybe' is not allowed: it takes True or False or 'auto'"),
        ("--size=none", "size='none' is not allowed: it takes a whole number or None"),
        # these used to reach PyTorch and end in an OverflowError or a RuntimeError
        (f"--steps={2**63}", f"steps='{2**63}' is not allowed: it takes whole numbers below 2**63"),
    ],
)
def test_bad_flags_are_named_with_what_was_meant(written, said, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as raised:
        parse(*written.split(" "))
    assert str(raised.value).endswith(said)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("steps = '5'", "steps='5' is not allowed: it takes a whole number"),
        ("steps = 1 / 0", "fails: ZeroDivisionError"),
        ("import numpy\nname = numpy.float32", "is not allowed: it takes text"),
        ("name = math.cos", "name=<built-in function cos> is not allowed: it takes text"),  # it was left out
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


def test_files_of_nanogpt_load(tmp_path):
    # names that its train.py had imported, a float for a whole number, and numpy's numbers were refused
    text = "import numpy as np\nsteps = 0.03 * 10466\nrate = np.sqrt(4) + math.cos(math.pi)\n"
    (tmp_path / "c.py").write_text(f"{text}def base(): return os.path.basename('a/b')\nname = base()")
    assert parse(str(tmp_path / "c.py")) == Settings(steps=314, rate=1.0, name="b")


UNUSED = {"quick": "it is of no use here", "epochs": "it is a setting of another script"}


def test_a_file_may_be_another_scripts(tmp_path):
    (tmp_path / "c.py").write_text("epochs = 7\nquick = True\nsteps = 3")
    assert configure(Settings(), [str(tmp_path / "c.py")], "", UNUSED) == Settings(steps=3)
    (tmp_path / "c.py").write_text("epochs = 7\nstepz = 3")  # T8: used to be ignored in silence
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
