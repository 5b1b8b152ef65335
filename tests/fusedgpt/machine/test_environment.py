"""What is written beside a figure."""

import subprocess

import pytest
import torch

from fusedgpt.attention.table import KERNELS
from fusedgpt.machine.environment import FLASH_PACKAGES, commit, environment


def test_environment_names_what_a_figure_depends_on():
    # rows of flash3 and flash4 went on over an upgrade of their packages, whose versions no header had
    of_kernels = {kernel.package for kernel in KERNELS.values()} - {""}
    assert set(FLASH_PACKAGES) == of_kernels | {"flash-attn"}  # which transformers uses


@pytest.mark.parametrize(
    ("level", "has", "said"),
    [("AVX2", ["avx2"], "AVX2"), ("AVX512", ["avx512_bf16", "amx_tile"], "AVX512+bfloat16+AMX")],
)
def test_a_cpu_is_named_with_its_instructions(monkeypatch, level, has, said):
    # rows of two processors were taken for one another: "AMD EPYC" with bfloat16 products, and many times slower; and
    # "Intel(R) Xeon(R) Processor" with AMX, whose products in bfloat16 pay, and without, where they do not
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: level)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has, True))
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert environment(torch.device("cpu"))["device"].endswith(f", {said}")
    assert environment(torch.device("mps"))["device"].endswith(", MPS" + said[len(level) :])  # laps of both were mixed


def test_the_commit_is_that_of_the_files_and_of_no_repository_around_them(tmp_path):
    # an archive that was unpacked in a user's repository ran as that repository's commit
    def git(*args):
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *who, *args], check=True, capture_output=True)

    (tmp_path / "unpacked").mkdir()
    for name in ("a.py", "rows.jsonl"):
        (tmp_path / name).write_text("one")
    git("init")
    git("add", "a.py", "rows.jsonl")
    git("commit", "-m", "one")
    (tmp_path / "rows.jsonl").write_text("two")  # `make gpu` adds to rows in the clone
    assert commit(tmp_path) and "dirty" not in commit(tmp_path) and commit(tmp_path / "unpacked") is None
    found = []
    for text in ("two", "three", "two"):  # laps of two edits were mixed, as both were "-dirty"
        (tmp_path / "a.py").write_text(text)
        found.append(commit(tmp_path))
    assert "-dirty-" in found[0] and found[0] == found[2] != found[1]
