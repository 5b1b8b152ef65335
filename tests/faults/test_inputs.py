"""Flags and config files at random. Whatever a user writes, the outcome is settings or one sentence.

FAULTS_CASES inputs of each kind (by default 5,000, and a few in make test) are made from FAULTS_SEED. Any exception but
UserError fails, SystemExit too.
"""

import dataclasses
import functools
import os
import random
import typing

import pytest
import torch

import configurator
import sample
import train
from configurator import configure
from fusedgpt.bench import kinds
from fusedgpt.errors import UserError
from fusedgpt.estimates import fits
from model import GPTConfig
from tests.faults.processes import SEED
from tests.launch import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # a mutated config file may well deserve one

CASES = int(os.environ.get("FAULTS_CASES", "5000"))
few_or_many = pytest.mark.parametrize("cases", [200, pytest.param(CASES, marks=pytest.mark.slow)])

# these functions do what scripts do with their command line before they touch a file


def training(args):
    s = configure(train.Settings(), args, "")
    train.validate(s)
    shape = {name: getattr(s, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "bias", "vocab_multiple")}
    config = GPTConfig(vocab_size=s.vocab_size or 50257, **shape)
    fits.check_run(s, 1, str, config, s.batch_size, torch.device("cpu"), torch.float32, True)
    return s


def sampling(args):
    s = configure(sample.Settings(), args, "", sample.ONLY_TRAINING)
    sample.validate(s)
    return s


def benchmarking(args, kind):
    return kinds.read_settings(kind, args)[0]


SCRIPTS = [(training, train.Settings)] * 4 + [(sampling, sample.Settings)] * 3
SCRIPTS += [(functools.partial(benchmarking, kind=k), kinds.settings_class(kinds.KINDS[k])) for k in kinds.KINDS]
NAMES = sorted({field.name for _, settings in SCRIPTS for field in dataclasses.fields(settings)})
TEXTS = ["10_000", "1e-320", "1e400", "-inf", "0x10", "٣", "²", " 5 ", "1__0", "+3", "1j", "9" * 5000, str(10**400)]
TEXTS += ["", " ", "True", "None", "auto", "cpu:0", "meta", "/", "/dev/null", "..", "~", "../" * 2000, "FILE:\0"]
TEXTS += ["\0", "\udcff", "\ud800\udc00", "a\nb", "\x1b[2J", "x" * 5000, "%s{0}", "=", "--", "'", '"', "\\", "[]"]


def right_types(s):
    """Whether each setting has the type that its field declares, and no number is too large for PyTorch."""
    for field in dataclasses.fields(s):
        got = getattr(s, field.name)
        options = typing.get_args(field.type) or (field.type,)
        types = [option for option in options if isinstance(option, type)]
        literals = [choice for option in options for choice in typing.get_args(option) or [option]]
        if type(got) not in types and got not in literals:
            return False
        if type(got) is int and abs(got) > configurator.LARGEST:
            return False
    return True


def fuzz(cases, make):
    """Give scripts what `make(rng, settings)` makes: some of it is taken, some refused, each time in one sentence."""
    rng, taken = random.Random(SEED), 0
    for _ in range(cases):
        script, settings = rng.choice(SCRIPTS)
        args, what = make(rng, settings)
        try:
            assert right_types(script(args)), what
            taken += 1
        except UserError as error:
            assert str(error).strip(), what
        except (Exception, SystemExit, GeneratorExit) as error:
            raise AssertionError(f"{type(error).__name__} for {what!r} (FAULTS_SEED={SEED})") from error
    assert 0.05 * cases < taken < 0.95 * cases


def fitting(rng, annotation):
    """Text that a setting of the type `annotation` probably takes."""
    options = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return str(rng.choice(options))
    if options:
        return fitting(rng, options[0])
    some = {bool: (True, False), int: (1, 64, rng.randrange(5000)), float: (0, rng.random()), str: ("x", "cpu")}
    return str(rng.choice(some[annotation]))


def flag(rng, settings):
    """A flag of one of `settings` or, now and then, of another script or with a strange value."""
    field = rng.choice(dataclasses.fields(settings))
    name = rng.choices((field.name, rng.choice(NAMES), rng.choice(TEXTS)), (8, 1, 1))[0]
    return f"--{name}={rng.choices((fitting(rng, field.type), rng.choice(TEXTS)), (2, 1))[0]}"


@few_or_many
def test_flags_become_settings_or_one_sentence(cases):
    def make(rng, settings):
        args = [flag(rng, settings) for _ in range(rng.randrange(1, 5))]
        return args, args

    fuzz(cases, make)


EXPRESSIONS = """0 | 1 | -1 | 2.5 | True | False | None | 'auto' | 'cpu' | 'sdpa' | 32 | 0.1 | 1e-3 | 1e400 | 10**400
float('nan') | 10**18 | -2**63 | 1j | b'x' | '' | 'x' * 9999 | '\\0' | '\\ud800' | [] | {} | object() | print | type
range(10**9) | lambda: 0 | __import__('os') | __import__('numpy').arange(3) | __import__('numpy').float64(1)
__import__('numpy').int64(5) | __import__('torch').ones(2) | type('T', (), {'__eq__': lambda s, o: 1 / 0})()"""
EXPRESSIONS = [expression.strip() for line in EXPRESSIONS.splitlines() for expression in line.split(" | ")]
STATEMENTS = ["exit()", "raise GeneratorExit", r"raise Exception(b'\xff')", "\0", "\ufeff", "'\udcff'", "return"]
STATEMENTS += ["def f(): return f()\nf()", r"assert False, 'x\ny'", "if True:\nx = 1", "import train"]
STATEMENTS += ["x = " + "(" * 300, "x = " + "-" * 20_000 + "1", "# -*- coding: nonsense -*-", "globals().clear()"]
STATEMENTS += ["del batch_size", "class batch_size: pass", "with open(__file__) as dataset: pass"]
OURS = sorted(file.read_bytes() for file in (ROOT / "config").glob("*.py"))


def config_file(rng, settings):
    """The bytes of a config file: assignments and a statement, or one of ours with damaged bytes."""
    if rng.random() < 0.3:
        raw = rng.choice(OURS)
        at = rng.randrange(len(raw))
        # no *, because ** could make a power that takes an hour
        return raw[:at] + rng.randbytes(rng.randrange(3)).replace(b"*", b"") + raw[at + rng.randrange(3) :]
    names = [field.name for field in dataclasses.fields(settings)]
    lines = [f"{rng.choice(names)} = {rng.choice(EXPRESSIONS)}" for _ in range(rng.randrange(4))]
    lines += rng.sample(STATEMENTS, rng.choice((0, 0, 1)))
    rng.shuffle(lines)
    return "\n".join(lines).encode(errors="surrogateescape")


@few_or_many
def test_config_files_become_settings_or_one_sentence(tmp_path, cases):
    def make(rng, settings):
        raw = config_file(rng, settings)
        (tmp_path / "config.py").write_bytes(raw)
        return [str(tmp_path / "config.py")], raw

    fuzz(cases, make)
