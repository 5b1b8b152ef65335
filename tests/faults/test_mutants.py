"""A test notices each mistake that is planted in the project."""

import subprocess
import sys

import pytest

from tests.launch import ROOT
from tests.mutants import table


def test_every_file_of_the_package_has_a_mutant():
    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("fusedgpt/**/*.py") if path.name != "__init__.py"}
    assert not files - {each.file for each in table()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_mutant_dies(tell):
    # F15: 8 of 48 lived
    plant = [sys.executable, "tests/mutants.py"]
    done = subprocess.run(plant, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    tell(done.stdout.splitlines()[-1])
