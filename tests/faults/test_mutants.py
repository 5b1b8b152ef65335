"""A test or a gate notices each mistake that is planted in the project."""

import subprocess
import sys

import pytest

from tests.launch import ROOT
from tests.mutants import MUTANTS

pytestmark = pytest.mark.faults


def test_every_mutant_dies(tell):
    # F15: 8 of 48 lived
    plant = [sys.executable, "tests/mutants.py"]
    done = subprocess.run(plant, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tell(done.stdout.splitlines()[-1])
    assert f"{len(MUTANTS)} of {len(MUTANTS)} mutants are dead" in done.stdout
