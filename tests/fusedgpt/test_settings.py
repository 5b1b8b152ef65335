"""The settings of training."""

import subprocess
import sys

import pytest

from fusedgpt.errors import UserError
from fusedgpt.settings import Settings, require_learning
from tests.launch import ROOT

SCRIPTS = ["train.py", "sample.py", "export.py", "plot.py", "bench.py", "harness.py", "data/text/prepare.py"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_does_not_import_pytorch(script):
    # --help took 2.6 s
    pytest.importorskip("tyro")
    look = f"import atexit, runpy, sys; sys.argv = [{script!r}, '--help']; sys.path.insert(0, '.')"
    look += "; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    look += "; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", look], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "python " in done.stdout or "usage" in done.stdout
    assert done.stderr.strip() == "False"


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        (dict(min_lr=0.0, lr_decay_iters=5), True),  # it used to train on and learn nothing
        (dict(min_lr=0.0, lr_decay_iters=5, schedule="wsd"), True),
        (dict(min_lr=0.0, lr_decay_iters=10), False),
        (dict(min_lr=1e-5, lr_decay_iters=5), False),
        (dict(min_lr=0.0, lr_decay_iters=5, schedule="constant"), False),
        (dict(min_lr=0.0, lr_decay_iters=5, decay_lr=False), False),
        (dict(min_lr=0.0, lr_decay_iters=5, minutes=1.0), False),  # they settle both numbers
        (dict(min_lr=0.0, lr_decay_iters=5, eval_only=True), False),
    ],
)
def test_a_schedule_that_ends_before_the_run_is_refused(changes, refused):
    s = Settings(max_iters=10, **changes)
    if refused:
        with pytest.raises(UserError, match="give --lr_decay_iters=10, or a --min_lr above 0"):
            require_learning(s)
    else:
        require_learning(s)


@pytest.mark.parametrize(
    ("changes", "was", "refused"),
    [
        # an earlier version began such runs; they could not be resumed or evaluated
        (dict(), dict(max_iters=10, lr_decay_iters=5, min_lr=0.0), False),
        (dict(max_iters=8), dict(max_iters=10, lr_decay_iters=5, min_lr=0.0), False),
        (dict(max_iters=20), dict(max_iters=10, lr_decay_iters=5, min_lr=0.0), True),
        (dict(lr_decay_iters=4), dict(max_iters=10, lr_decay_iters=5, min_lr=0.0), True),
        (dict(), dict(max_iters=10, lr_decay_iters=5, min_lr=1e-5), True),
        (dict(), dict(max_iters=10, lr_decay_iters=10), True),
        (dict(), dict(), False),  # a checkpoint with few settings: it counts as begun with these
    ],
)
def test_a_run_goes_on_as_it_was_begun_even_if_its_end_learns_nothing(changes, was, refused):
    s = Settings(**(dict(max_iters=10, lr_decay_iters=5, min_lr=0.0) | changes))
    if refused:
        with pytest.raises(UserError, match="so nothing more would be learnt"):
            require_learning(s, was)
    else:
        require_learning(s, was)
