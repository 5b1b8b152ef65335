"""--attention=path/to/file.py:function: a user's own kernel passes parity, trains and is measured, or is refused."""

import json

import pytest
import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.table import located
from fusedgpt.bench import kinds, numerics, sweep
from fusedgpt.errors import UserError
from tests.conftest import rows, run
from tests.fusedgpt.bench import small
from tests.fusedgpt.bench.small import settings
from tests.launch import fails, script

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

def even(q, k, v, dropout_p=0.0):
    assert q.size(2) % 2 == 0, "odd"
    return whole(q, k, v)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_trains_as_ours_does_and_is_named(tmp_path, data, file, compiled):
    own = f"{file}:whole"
    run(tmp_path / "own", data, attention=own, compile=compiled)
    run(tmp_path / "ours", data, attention="manual", compile=compiled)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("own", "ours")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    record = json.loads((tmp_path / "own" / "run.json").read_text())
    assert record["attention"] == own and record["receipt"]["forward"] == ["unfused"]
    run(tmp_path / "own", data, attention=own, max_iters=12, init_from="resume")
    assert len(rows(tmp_path / "own")) == 12


def test_a_run_remembers_the_full_path_of_its_file(file, monkeypatch):
    monkeypatch.chdir(file.parent)  # a resumed run may start in another folder
    assert located(f"{file.name}:whole") == f"{file}:whole" and located("sdpa") == "sdpa"


def test_its_function_is_loaded_once_and_can_be_compiled(file):
    own = ATTENTION[f"{file}:whole"]
    assert ATTENTION[f"{file}:whole"] is own
    q, k, v, _ = Case((1, 2, 16, 8), CPU, torch.float32, backward=False).inputs()
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), ATTENTION["manual"](q, k, v))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.py:f", "there is no file missing.py"),
        ("{file}:absent", r"has no function absent: it has even, narrow, whole, window"),
        ("{broken}:f", "fails: ZeroDivisionError: division by zero"),
        ("{file}:narrow", "cannot train on cpu"),
        ("{file}:even", "it fails in the comparison with float64: odd"),
        ("flsh", "is unknown: it can be manual, .*, or path/to/file.py:function"),
    ],
)
def test_a_mistake_is_named(tmp_path, file, name, why):
    broken = tmp_path / "broken.py"
    broken.write_text("1 / 0")
    with pytest.raises(UserError, match=why) as refusal:
        permitted.require(name.format(file=file, broken=broken), Case((1, 2, 16, 8), CPU, torch.float32))
    assert "even or auto" not in str(refusal.value)  # it recommended the kernel that it refused


def test_what_is_no_causal_attention_or_ignores_dropout_does_not_train(tmp_path, data, file):
    # a window used to train, and then to be sampled and evaluated with full attention
    with pytest.raises(UserError, match=r"window.*not causal attention.*belongs to the model"):
        run(tmp_path / "run", data, attention=f"{file}:window")
    with pytest.raises(UserError, match="it ignores dropout_p"):
        run(tmp_path / "run", data, attention=f"{file}:whole", dropout=0.1)


@pytest.mark.parametrize("kind", ["ladder", "sweep", "numerics"])
def test_a_benchmark_takes_it_as_a_flag_and_plans_it_beside_ours(kind, file):
    own = f"{file}:whole"
    s, _ = kinds.read_settings(kind, [f"--attention={own}"])
    planned = [row for row in kinds.planned(kind, s, CPU) if own in row.values()]
    assert {row.get("part") for row in planned} >= ({"attention", "training"} if kind == "sweep" else set()) and planned
    assert "attention" not in kinds.header(kind, [], s, {})["settings"]  # rows of ours are the same with and without it


def test_benchmarks_measure_it(tmp_path, data, file):
    own = f"{file}:whole"
    for kind, module in (("sweep", sweep), ("numerics", numerics)):
        s = settings(kind, tmp_path, data, attention=own)
        spec = next(spec for spec in module.plan(s, CPU) if own in spec.values())
        assert "passed" in module.measure(spec, s, CPU, tmp_path)["parity"]
    # in the ladder it was measured without parity, and left out of the report
    (row,) = small.run("ladder", tmp_path, data, attention=own, only=own)
    assert "passed" in row["parity"] and own in (tmp_path / "results/ladder/report.md").read_text()


def test_it_samples_too(small_run, file):
    # sample.py took no such kernel, and compared one query with fewer keys than the odd lengths have queries
    drawn = [f"--out_dir={small_run}", "--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=8"]
    texts = {
        script("sample.py", *drawn, "--start=!", f"--attention={name}").stdout for name in (f"{file}:whole", "sdpa")
    }
    assert len(texts) == 1
    assert "it is not causal attention" in fails("sample.py", *drawn, "--start=!", f"--attention={file}:window")
