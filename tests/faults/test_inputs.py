"""Bad input of every kind. Whatever a user writes, the outcome is settings, a meta, or one sentence.

FAULTS_CASES inputs (by default 20,000, and a few in make test) are made from FAULTS_SEED: flags, config files, and the
metas of data folders and checkpoints. Any exception but UserError fails, SystemExit too.
"""

import dataclasses
import functools
import itertools
import json
import os
import pickle
import random
import typing

import pytest
import torch

import sample
import train
from configurator import configure
from fusedgpt.bench import kinds
from fusedgpt.data import dataset
from fusedgpt.data.tokenizer import KINDS, Tokenizer, vocabulary
from fusedgpt.errors import UserError
from fusedgpt.estimates import fits
from model import GPTConfig
from tests.faults.processes import SEED
from tests.launch import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # a mutated config file may well deserve one

CASES = int(os.environ.get("FAULTS_CASES", "20000"))
CPU = torch.device("cpu")


def few_or_many(share):
    """Run a test with a few cases, and in the slow tier with its `share` of CASES."""
    return pytest.mark.parametrize("cases", [200, pytest.param(int(share * CASES), marks=pytest.mark.slow)])


def tried(call, got, what=None):
    """Return call(got), or None if it ends in a sentence. Any other error fails the test and names `what` or `got`."""
    what = what or got
    try:
        return call(got)
    except UserError as error:
        assert str(error).strip(), f"no sentence for {what!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise AssertionError(f"{type(error).__name__} for {what!r} (FAULTS_SEED={SEED})") from error


# settings: these functions do what scripts do with their command line before they touch a file


def training(args):
    s = configure(train.Settings(), args, "")
    train.validate(s)
    shape = {name: getattr(s, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "bias", "vocab_multiple")}
    config = GPTConfig(vocab_size=s.vocab_size or 50257, **shape)
    fits.check_training(config, s.batch_size, CPU, torch.float32)
    return s


def sampling(args):
    s = configure(sample.Settings(), args, "", sample.ONLY_TRAINING)
    sample.validate(s)
    return s


def benchmarking(args, kind):
    return kinds.read_settings(kind, args)[0]


SCRIPTS = [(training, train.Settings)] * 4 + [(sampling, sample.Settings)] * 3
SCRIPTS += [(functools.partial(benchmarking, kind=k), kinds.settings_class(kinds.KINDS[k])) for k in kinds.KINDS]
FIELDS = [field for _, settings in SCRIPTS for field in dataclasses.fields(settings)]
NAMES = sorted({field.name for field in FIELDS})
CHOICES = sorted({str(c) for f in FIELDS for t in (f.type, *typing.get_args(f.type)) for c in typing.get_args(t)})
NUMBERS = ["0", "-0", "1", "-1", "10_000", "1e-3", "1e-320", "1e400", "nan", "inf"]
NUMBERS += [str(n + d) for n in (2**31, 2**53, 2**63, -(2**63), 10**18, 10**30, 10**400) for d in (-1, 0, 1)]
NUMBERS += ["9" * 5000, "1" * 4299, "-inf", "0x10", "1e5", "٣", "²", " 5 ", "1__0", "+3", "5L", "1j", "½"]
TEXTS = ["", " ", "True", "False", "None", "auto", "cpu", "cuda:1", "cpu:0", "meta", "/", "/dev/null", ".", "..", "~"]
TEXTS += ["\0", "\udcff", "\ud800\udc00", "a\nb", "\x1b[2J", "🙂", "x" * 5000, "../" * 2000, "%s{0}", "FILE:\0"]
TEXTS += ["=", "--", "-", "scratch", "resume", "gpt2", "gpt5", "char", "256-16-0", "32x128", "x", "'", '"', "\\", "[]"]


def value(rng):
    """Text that a flag may be given: of any setting, or nonsense."""
    number = rng.choice((rng.randrange(100), rng.random(), rng.randrange(10**6), rng.uniform(-2, 2)))
    noise = "".join(chr(rng.choice((rng.randrange(1, 128), rng.randrange(0x11_0000)))) for _ in range(rng.randrange(9)))
    kinds = (rng.choice(NUMBERS), str(number), rng.choice(CHOICES), rng.choice(TEXTS), noise)
    return rng.choices(kinds, (4, 2, 1, 2, 1))[0]


def fitting(rng, annotation):
    """Text that a setting of the type `annotation` probably takes."""
    options = typing.get_args(annotation)
    if options:
        return str(rng.choice(options)) if typing.get_origin(annotation) is typing.Literal else fitting(rng, options[0])
    some = {bool: ("True", "False"), int: (1, 64, rng.randrange(5000)), float: (0, rng.random()), str: ("x", "cpu")}
    return str(rng.choice(some[annotation]))


def flag(rng, settings):
    """A flag of one of `settings` or, now and then, of another script or misspelt."""
    field = rng.choice(dataclasses.fields(settings))
    if rng.random() < 0.6:
        return f"--{field.name}={fitting(rng, field.type)}"
    name = rng.choice(NAMES) if rng.random() < 0.2 else field.name
    if rng.random() < 0.1:
        at = rng.randrange(len(name))
        name = name[:at] + rng.choice(("", "x", "-", "\0", "\udcff", "=")) + name[at + 1 :]
    dashes, equals = rng.choice(("-", "---", "")) if rng.random() < 0.03 else "--", rng.random() > 0.03
    return f"{dashes}{name}={value(rng)}" if equals else f"{dashes}{name}"


def right_types(s):
    """Whether each setting has the type that its field declares."""
    for field in dataclasses.fields(s):
        got = getattr(s, field.name)
        for option in typing.get_args(field.type) or (field.type,):
            literal = typing.get_args(option) or ((option,) if not isinstance(option, type) else ())
            if got in literal if literal else type(got) is option:
                break
        else:
            return False
    return True


def fuzz(cases, make):
    """Give scripts what `make(rng, settings)` makes: (arguments, what they are). How many of the cases were valid."""
    rng, valid = random.Random(SEED), 0
    for _ in range(cases):
        script, settings = rng.choice(SCRIPTS)
        args, what = make(rng, settings)
        s = tried(script, args, what)
        if s is not None:
            valid += 1
            assert right_types(s), what
    assert 0.05 * cases < valid < 0.95 * cases  # both sides have to be fuzzed
    return valid


@few_or_many(0.6)
def test_flags_become_settings_or_one_sentence(tell, cases):
    def make(rng, settings):
        args = [flag(rng, settings) for _ in range(rng.randrange(1, 5))]
        return args, args

    tell(f"{cases:,} command lines, {fuzz(cases, make):,} of them valid")


EXPRESSIONS = """0 | 1 | -1 | 2.5 | True | False | None | 'auto' | 'cpu' | 'sdpa' | 'gelu' | 32 | 64 | 0.1 | 1e-3
1e400 | 1e-320 | float('nan') | float('inf') | 10**18 | 10**400 | -2**63 | 1j | b'x' | 'x' | '' | 'x' * 9999
'\\0' | '\\ud800' | [] | {} | () | set() | [[[]]] * 3 | object() | print | type | Ellipsis | range(10**9)
lambda: 0 | memoryview(b'x') | __import__('os') | __import__('numpy').arange(3) | __import__('numpy').float64(1)
__import__('numpy').int64(5) | __import__('torch').ones(2) | __import__('decimal').Decimal('sNaN')
__import__('fractions').Fraction(1, 2) | type('T', (), {})() | type('T', (), {'__repr__': None, '__str__': None})()
type('T', (int,), {'__eq__': None})(3) | type('T', (str,), {'__eq__': lambda s, o: []})()
type('T', (), {'__eq__': lambda s, o: 1 / 0})()"""
EXPRESSIONS = [expression.strip() for line in EXPRESSIONS.splitlines() for expression in line.split(" | ")]
STATEMENTS = ["exit()", "raise GeneratorExit", r"raise Exception(b'\xff')", "\0", "\ufeff", "'\udcff'", "return"]
STATEMENTS += ["raise ExceptionGroup('x', [ValueError(1)])"]
STATEMENTS += [
    "def f(): return f()\nf()",
    r"assert False, 'x\ny'",
    "if True:\nx = 1",
    "\tx = 1\n  y = 2",
    "import train",
]
STATEMENTS += ["x = " + "(" * 300, "x = " + "-" * 20_000 + "1", "_x = " + "[" * 90 + "]" * 90, "__builtins__ = {}"]
STATEMENTS += ["# -*- coding: nonsense -*-", "globals()[''] = 1", "globals().clear()"]
STATEMENTS += ["del batch_size", "del __name__, __file__", "class batch_size: pass", "batch_size, block_size = 4, 64"]
STATEMENTS += ["with open(__file__) as dataset: pass", "learning_rate *= 2; batch_size //= 2"]
OURS = sorted(file.read_bytes() for file in (ROOT / "config").glob("*.py"))


def config_file(rng, settings):
    """The bytes of a config file: assignments and statements, or one of ours with damaged bytes."""
    if rng.random() < 0.3:
        raw = bytearray(rng.choice(OURS))
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(raw))
            # no *, because ** could make a power that takes an hour
            raw[at : at + rng.randrange(3)] = bytes(b for b in rng.randbytes(rng.randrange(3)) if b != ord("*"))
        return bytes(raw)
    choices = [FIELDS if rng.random() < 0.2 else dataclasses.fields(settings) for _ in range(rng.randrange(4))]
    lines = [f"{rng.choice(fields).name} = {rng.choice(EXPRESSIONS)}" for fields in choices]
    if rng.random() < 0.4:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(STATEMENTS))
    return "\n".join(lines).encode(errors="surrogateescape")


@few_or_many(0.25)
def test_config_files_become_settings_or_one_sentence(tell, tmp_path, cases):
    def make(rng, settings):
        raw = config_file(rng, settings)
        (tmp_path / "config.py").write_bytes(raw)
        return [str(tmp_path / "config.py")], raw

    tell(f"{cases:,} config files, {fuzz(cases, make):,} of them valid")


# metas

THINGS = [None, True, 0, -1, 1, 65, 2**24, 2**24 + 1, 2**32, 10**30, 10**4000, 0.5, float("nan"), "", "a", "\udcff"]
THINGS += [
    b"x",
    [],
    {},
    (1, 2),
    [[]],
    ["a", None],
    [1],
    ["ab"],
    {"a": 0},
    {"val": 3},
    {"val": "x"},
    {1: [{}]},
    "uint16",
]
ITOS = [["a"], ["a", None, "b"], [None], ["\n", "é", "\udcff"], [str(n) for n in range(10)]]
GOOD = [{"tokenizer": "char", "vocab_size": len(itos), "itos": itos, "tokens": {"val": 3}} for itos in ITOS]
GOOD += [{"tokenizer": kind, "vocab_size": 256} for kind in (*KINDS, "unknown")]
FIELDS_OF_A_META = ["tokenizer", "vocab_size", "itos", "stoi", "dtype", "tokens", "source"]


def some_meta(rng):
    """A meta that is good, or has a field or two that are not, or no meta at all."""
    if rng.random() < 0.1:
        return rng.choice(THINGS)
    return rng.choice(GOOD) | {rng.choice(FIELDS_OF_A_META): rng.choice(THINGS) for _ in range(rng.randrange(3))}


def damaged(rng, raw):
    """`raw`, some bytes of which are others in a third of all cases."""
    raw = bytearray(raw)
    for _ in range(rng.choice((0, 0, 1, 2))):
        at = rng.randrange(len(raw))
        raw[at : at + 2] = rng.randbytes(rng.randrange(3))
    return bytes(raw)


def use(meta):
    """Use a meta that was read. Every id has a text, unless the tokenizer refuses."""
    assert vocabulary(meta) >= 1
    tokenizer = tried(Tokenizer, meta)
    if tokenizer and tokenizer.kind != "gpt2":  # GPT-2's BPE files may not be here
        tokenizer.decode(list(range(min(tokenizer.vocab_size, 300)))).decode(errors="replace")
        for text in ("a", "0\n", "a\udcff"):
            assert all(0 <= id < tokenizer.vocab_size for id in tried(tokenizer.encode, text, meta) or ())


@pytest.mark.slow
def test_metas_are_read_or_refused_in_one_sentence(tell, tmp_path):
    rng, valid, cases = random.Random(SEED), 0, int(0.15 * CASES)

    def read(what):
        route, meta = what
        if route == "checkpoint":
            return dataset.meta_of_checkpoint(ROOT, {"meta": meta, "config": {"dataset": "no such"}})
        for name in ("meta.json", "meta.pkl"):
            (tmp_path / name).unlink(missing_ok=True)
        raw = pickle.dumps(meta) if route == "meta.pkl" else json.dumps(meta, default=repr).encode()
        (tmp_path / route).write_bytes(damaged(rng, raw))
        return dataset.read_meta(tmp_path)

    deep = []
    for _ in range(10_000):
        deep = [deep]
    made = ((rng.choice(("checkpoint", "meta.json", "meta.pkl")), some_meta(rng)) for _ in range(cases))
    for what in itertools.chain(made, [("checkpoint", deep), ("checkpoint", {"tokenizer": deep, "vocab_size": 1})]):
        got = tried(read, what)
        if got is not None:
            valid += 1
            use(got)
    assert 0.05 * cases < valid < 0.95 * cases
    tell(f"{cases:,} metas, {valid:,} of them valid")
