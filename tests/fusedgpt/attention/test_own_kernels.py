"""--attention=path/to/file.py:function: a user's own kernel passes parity, trains and is measured, or is refused."""

import contextlib
import io

import pytest
import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.table import located
from fusedgpt.bench import kinds, numerics, sweep
from fusedgpt.errors import UserError
from tests.conftest import checkpoint_of, record, rows, run
from tests.fusedgpt.bench.small import settings
from tests.launch import script

CPU = torch.device("cpu")
FILE = """
from beside import torch

layer = torch.nn.Identity()

def _weights(q, k, hidden):
    return (q @ k.mT / q.size(-1) ** 0.5).masked_fill(hidden, float("-inf")).softmax(-1)

def _hidden(q, k, diagonal):
    T, Tk = q.size(-2), k.size(-2)
    return torch.ones(T, Tk, dtype=torch.bool, device=q.device).triu(Tk - T + diagonal)

def whole(q, k, v, dropout_p=0.0):
    return _weights(q, k, _hidden(q, k, 1)) @ v

def window(q, k, v, dropout_p=0.0):
    return _weights(q, k, _hidden(q, k, 1) | ~_hidden(q, k, -7)) @ v

def cheat(q, k, v, dropout_p=0.0):
    return whole(q, k, v) if torch.is_grad_enabled() else _weights(q, k, _hidden(q, k, 2)) @ v

def double(q, k, v, dropout_p=0.0):
    return whole(q.double(), k.double(), v.double())

def dropped(q, k, v, dropout_p=0.0, scale=True):
    p = dropout_p
    kept = torch.rand(*q.shape[:-1], k.size(-2)) >= p
    return (_weights(q, k, _hidden(q, k, 1)) * kept / (1 - p if scale else 1)) @ v

def unscaled(q, k, v, dropout_p=0.0):
    return dropped(q, k, v, dropout_p, scale=False)

def even(q, k, v, dropout_p=0.0):
    assert q.size(2) % 2 == 0, "odd"
    return whole(q, k, v)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    (tmp_path / "beside.py").write_text("import torch")
    return path


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_it_trains_as_ours_does_and_is_named(tmp_path, data, file, compiled):
    own = f"{file}:whole"
    run(tmp_path / "own", data, attention=own, compile=compiled)
    run(tmp_path / "ours", data, attention="manual", compile=compiled)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("own", "ours")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    found = record(tmp_path / "own")
    assert found["attention"] == own and found["receipt"]["forward"] == ["unfused"]
    run(tmp_path / "own", data, attention=own, max_iters=12, init_from="resume")
    assert len(rows(tmp_path / "own")) == 12


def test_a_run_remembers_the_full_path_of_its_file(file, monkeypatch):
    monkeypatch.chdir(file.parent)  # a resumed run may start in another folder
    assert located(f"{file.name}:whole") == f"{file}:whole" and located("sdpa") == "sdpa"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing.py:f", r"No such file or directory: '.*missing.py'"),
        ("{file}:absent", "has no function absent"),
        ("{file}:layer", "a Module would be part of the model"),  # no checkpoint of its run could be read
        # these trained: the first was sampled with full attention, the second evaluated better
        ("{file}:window", "it fails parity with float64 at 127 tokens"),
        ("{file}:cheat", "it fails parity with float64 without gradients"),
        ("{file}:double", "it returns torch.float64 for q, k and v in torch.float32"),
        ("{file}:even", "it fails in the comparison with float64: odd"),
    ],
)
def test_a_mistake_is_named(file, name, why):
    with pytest.raises(UserError, match=why) as refusal:
        permitted.require(name.format(file=file), Case((1, 2, 16, 8), CPU, torch.float32))
    assert "even or auto" not in str(refusal.value)  # it recommended the kernel that it refused


@pytest.mark.parametrize("p", [0.1, 0.2, 0.5])
def test_its_dropout_is_looked_at_at_the_rate_of_the_run(file, p):
    # p + 0.5 passed, and so did weights that were dropped without 1 / (1 - p)
    case = Case((2, 2, 16, 8), CPU, torch.float32, dropout=p)
    permitted.require(f"{file}:dropped", case)
    for name in ("manual", "math", "sdpa"):
        permitted.require(name, case)
    with pytest.raises(UserError, match=rf"with dropout_p={p} it does not divide what is left by {1 - p:g}"):
        permitted.require(f"{file}:unscaled", case)
    with pytest.raises(UserError, match=rf"its dropout_p={p} drops 0.000 of the weights"):
        permitted.require(f"{file}:whole", case)


LATER = """
from fusedgpt.attention.functions import manual

calls = 0

def fails(q, k, v, dropout_p=0.0):
    global calls
    calls += q.requires_grad and q.shape[-2] == 16
    if calls > {calls}:
        raise KeyError("x")
    return manual(q, k, v, dropout_p)
"""


def test_one_that_fails_in_mid_run_loses_no_step_and_a_changed_file_is_said(tmp_path, data):
    # the steps since the last checkpoint were lost
    (tmp_path / "own.py").write_text(LATER.format(calls=40))
    own, out = f"{tmp_path / 'own.py'}:fails", tmp_path / "out"
    with pytest.raises(KeyError):
        run(out, data, attention=own, max_iters=100, eval_interval=1000)
    done = len(rows(out))
    assert 5 < done < 60 and checkpoint_of(out)["iter_num"] == done
    (tmp_path / "own.py").write_text(LATER.format(calls=10**6))
    ATTENTION.pop(own)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        run(out, data, attention=own, max_iters=done + 2, init_from="resume")
    assert f"resuming with a changed file: attention={own} has another SHA-256" in said.getvalue()
    assert len(rows(out)) == done + 2


def test_benchmarks_measure_it(tmp_path, data, file):
    own = f"{file}:whole"
    for kind, module in (("sweep", sweep), ("numerics", numerics)):
        s = settings(kind, tmp_path, data, attention=own)
        assert "attention" not in kinds.header(kind, [], s, {})["settings"]  # rows of ours are the same with it
        each = next(each for each in module.comparisons(s, CPU) if own in each.names)
        assert "passed" in module.build(each.workload, own, s, CPU)[1]["parity"]


def test_it_samples_too(small_run, file):
    # sample.py took no such kernel, and compared one query with fewer keys than the odd lengths have queries
    drawn = [f"--out_dir={small_run}", "--device=cpu", "--dtype=float32", "--num_samples=1", "--max_new_tokens=8"]
    texts = {
        script("sample.py", *drawn, "--start=!", f"--attention={name}").stdout for name in (f"{file}:whole", "sdpa")
    }
    assert len(texts) == 1
