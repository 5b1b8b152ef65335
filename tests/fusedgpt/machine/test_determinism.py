"""Random numbers: a stream of its own for each use."""

import os
import subprocess
import sys

import torch
from torch._inductor import config as inductor

from fusedgpt.machine import determinism
from tests.launch import ROOT


def test_streams_of_random_numbers_are_their_own():
    def draw(*stream):
        determinism.seed(*stream)
        return torch.rand(4).tolist()

    assert draw(1, "dropout", 0, 0) == draw(1, "dropout", 0, 0)
    different = [(1, "init"), (2, "init"), (1, "dropout", 0, 0), (1, "dropout", 0, 1), (1, "dropout", 1, 0)]
    assert len({tuple(draw(*stream)) for stream in different}) == len(different)


def test_the_tests_choose_cublas_workspaces_before_pytorch_is_there():
    # cuBLAS reads the variable at its first product: in one process with other tests, test_resume failed on every GPU
    name = "CUBLAS_WORKSPACE_CONFIG"
    watch = f"""
import os, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(os.environ.get({name!r}, "it is not set"))

sys.meta_path.insert(0, Watch())
import tests.conftest
"""
    env = {key: value for key, value in os.environ.items() if key != name}
    done = subprocess.run([sys.executable, "-c", watch], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ":4096:8"


def test_the_compiler_is_deterministic_too():
    # Inductor that picks kernels by timing them rounds differently from run to run
    assert not inductor.deterministic  # nor does another test leave it behind
    determinism.require_deterministic()
    assert inductor.deterministic and torch.are_deterministic_algorithms_enabled()
