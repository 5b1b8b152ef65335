"""--attention=path/to/file.py:function: a user's own kernel passes parity, trains and is measured, or is refused."""

import json

import pytest
import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench import kinds, ladder, numerics, sweep
from fusedgpt.errors import UserError
from tests.conftest import rows, run
from tests.fusedgpt.bench import small
from tests.fusedgpt.bench.small import settings
from tests.launch import script

CPU = torch.device("cpu")
FILE = """
import torch

LAST = 8

def _weights(q, k, hidden):
    return (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, float("-inf")).softmax(-1)

def _hidden(q, k, diagonal):
    T, Tk = q.size(-2), k.size(-2)
    return torch.ones(T, Tk, dtype=torch.bool, device=q.device).triu(Tk - T + diagonal)

def whole(q, k, v, dropout_p=0.0):
    return _weights(q, k, _hidden(q, k, 1)) @ v

def window(q, k, v, dropout_p=0.0):
    return _weights(q, k, _hidden(q, k, 1) | ~_hidden(q, k, 1 - LAST)) @ v

def narrow(q, k, v, dropout_p=0.0):
    return whole(q, k, v)[..., :1]
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("compiled", [False, True])
def test_it_trains_as_ours_does_and_is_named(tmp_path, data, file, compiled):
    own = f"{file}:whole"
    run(tmp_path / "own", data, attention=own, compile=compiled)
    run(tmp_path / "ours", data, attention="manual", compile=compiled)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("own", "ours")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    record = json.loads((tmp_path / "own" / "run.json").read_text())
    assert record["attention"] == own and record["receipt"]["forward"] == ["unfused"]


def test_it_goes_on_when_the_run_is_resumed(tmp_path, data, file):
    run(tmp_path / "run", data, attention=f"{file}:whole", max_iters=5)
    run(tmp_path / "run", data, attention=f"{file}:whole", max_iters=10, init_from="resume")
    run(tmp_path / "unbroken", data, attention=f"{file}:whole", max_iters=10)
    assert [row["loss"] for row in rows(tmp_path / "run")] == [row["loss"] for row in rows(tmp_path / "unbroken")]


def test_what_is_no_causal_attention_is_refused_and_told_where_it_belongs(tmp_path, data, file):
    # a window used to train, and then to be sampled and evaluated with full attention
    with pytest.raises(UserError, match=r"window.*not causal attention.*belongs to the model"):
        run(tmp_path / "run", data, attention=f"{file}:window")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.py:f", "there is no file missing.py"),
        ("{file}:absent", r"has no function absent: it has narrow, whole, window"),
        ("{broken}:f", "fails: ZeroDivisionError: division by zero"),
        ("{file}:narrow", "cannot train on cpu"),
        ("flsh", "is unknown: it can be manual, .*, or path/to/file.py:function"),
    ],
)
def test_a_mistake_is_named(tmp_path, file, name, why):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(UserError, match=why):
        permitted.require(name.format(file=file, broken=broken), Case((1, 2, 16, 8), CPU, torch.float32))


def test_benchmarks_measure_it_beside_ours(tmp_path, data, file):
    own = f"{file}:whole"
    s = {kind: settings(kind, tmp_path, data, attention=own) for kind in ("sweep", "ladder", "numerics")}
    in_sweep = [spec for spec in sweep.plan(s["sweep"], CPU) if spec["attention"] == own]
    assert {spec["part"] for spec in in_sweep} == {"attention", "training"}
    assert {"rung": own} in ladder.plan(s["ladder"], CPU)
    spec = next(spec for spec in numerics.plan(s["numerics"], CPU) if spec.get("path") == own)
    assert "passed" in numerics.measure(spec, s["numerics"], CPU, tmp_path)["parity"]
    for kind, specs in ((sweep, in_sweep[:1]), (ladder, [{"rung": own}])):
        row = kind.measure(specs[0], s[kind.__name__.rpartition(".")[2]], CPU, tmp_path)
        assert "passed" in row["parity"] and row["median_ms"] > 0


def test_it_samples_too(tmp_path, data, file):
    # sample.py took no such kernel, and compared one query with fewer keys than the odd lengths have queries
    run(tmp_path, data, attention="manual")
    drawn = [
        f"--out_dir={tmp_path}",
        "--device=cpu",
        "--dtype=float32",
        "--num_samples=1",
        "--max_new_tokens=8",
        "--start=!",
    ]
    texts = {name: script("sample.py", *drawn, f"--attention={name}").stdout for name in (f"{file}:whole", "sdpa")}
    assert len(set(texts.values())) == 1
    found = script("sample.py", *drawn, f"--attention={file}:window", check=False)
    assert found.returncode == 1 and "it is not causal attention" in found.stderr


def test_one_that_ignores_dropout_does_not_train_with_it(tmp_path, data, file):
    with pytest.raises(UserError, match="it ignores dropout_p"):
        run(tmp_path / "run", data, attention=f"{file}:whole", dropout=0.1)


def test_one_that_fails_at_odd_lengths_is_one_sentence(file):
    file.write_text(
        FILE + "\n\ndef even(q, k, v, p=0.0):\n    assert q.size(2) % 2 == 0, 'odd'\n    return whole(q, k, v)\n"
    )
    with pytest.raises(UserError, match="it fails in the comparison with float64: odd") as refusal:
        permitted.require(f"{file}:even", Case((1, 2, 16, 8), CPU, torch.float32))
    assert "even or auto" not in str(refusal.value)  # it recommended the kernel that it refused


def test_a_ladder_shows_it(tmp_path, data, file):
    # its rung was measured without parity, and left out of the report
    (row,) = small.run("ladder", tmp_path, data, attention=f"{file}:whole", only=f"{file}:whole")
    assert "passed" in row["parity"] and f"{file}:whole" in (tmp_path / "results/ladder/report.md").read_text()


@pytest.mark.parametrize("kind", ["ladder", "sweep", "numerics"])
def test_a_benchmark_takes_it_as_a_flag(kind, file):
    s, _ = kinds.read_settings(kind, [f"--attention={file}:whole"])
    assert f"{file}:whole" in {value for row in kinds.planned(kind, s, CPU) for value in row.values()}
    assert "attention" not in kinds.header(kind, [], s, {})["settings"]  # rows of ours are the same with and without it


def test_its_function_is_loaded_once(file):
    assert ATTENTION[f"{file}:whole"] is ATTENTION[f"{file}:whole"]
