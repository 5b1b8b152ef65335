"""The settings of training."""

import contextlib

import pytest

from fusedgpt.errors import UserError
from fusedgpt.settings import Settings, require_learning, validate
from tests.launch import process

SCRIPTS = ["train.py", "sample.py", "export.py", "plot.py", "bench.py", "data/text/prepare.py"]

# one process for all, because the imports that they need take most of the time
HELP = """
import contextlib, io, runpy, sys
sys.path.insert(0, ".")
for script in sys.argv[1:]:
    said, sys.argv = io.StringIO(), [script, "--help"]
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    text = said.getvalue()
    print(script, "torch" in sys.modules, "python " in text or "usage" in text)
"""


def test_help_does_not_import_pytorch():
    # --help took 2.6 s
    pytest.importorskip("tyro")
    assert process("-c", HELP, *SCRIPTS).stdout.splitlines() == [f"{script} False True" for script in SCRIPTS]


@pytest.mark.parametrize(
    ("setting", "must"),
    [
        (dict(batch_size=0), "must be 1 or more"),
        (dict(dropout=float("nan")), "must be from 0 to just under 1"),
        (dict(learning_rate=-1.0), "must be 0 or more, and finite"),
    ],
    ids=str,
)
def test_a_value_that_no_run_can_have_is_refused(setting, must):
    with pytest.raises(UserError, match=f"{next(iter(setting))}.* {must}"):
        validate(Settings(**setting))


@pytest.mark.parametrize(
    ("changes", "is_refused"),
    [
        (dict(min_lr=0.0, lr_decay_iters=5), True),  # it used to train on and learn nothing
        (dict(min_lr=1e-5, lr_decay_iters=5), False),
        (dict(min_lr=0.0, lr_decay_iters=5, schedule="constant"), False),
        (dict(min_lr=0.0, lr_decay_iters=5, decay_lr=False), False),
        (dict(min_lr=0.0, lr_decay_iters=5, minutes=1.0), False),  # they settle both numbers
        (dict(min_lr=0.0, lr_decay_iters=5, eval_only=True), False),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused(changes, is_refused):
    refusal = pytest.raises(UserError, match="give --lr_decay_iters=10, or a --min_lr above 0")
    with refusal if is_refused else contextlib.nullcontext():
        require_learning(Settings(max_iters=10, **changes))
