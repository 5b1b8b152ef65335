"""The settings of training."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT

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
