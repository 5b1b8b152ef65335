"""Changes that people make to a GPT: each works in every script, or is refused in one sentence that names the place.

Each once went wrong in silence: a log that ended the run, a model exported as another, a window that sampling forgot.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest

from tests.conftest import TINY, rows, small
from tests.conftest import flags as flags_of
from tests.hacks import changes
from tests.launch import ROOT, process

pytestmark = pytest.mark.slow

TEXT = "The house in which a change works or fails aloud. " * 400
SIZES = [f"--{name}={value}" for name, value in TINY.items()]


class Project:
    """A copy of the project with a change, and its scripts."""

    def __init__(self, folder, change, flags=()):
        self.folder, self.flags = folder, [*flags]
        for path in ("fusedgpt", "config", "data/text"):
            shutil.copytree(ROOT / path, folder / path, ignore=shutil.ignore_patterns("__pycache__", "*.bin"))
        for file in ROOT.glob("*.py"):
            shutil.copy(file, folder)
        for file, pairs in change.items():
            text = (folder / file).read_text() if (folder / file).exists() else ""
            for old, new in pairs:
                assert text.count(old) == 1, f"{file} has no longer: {old}"
                text = text.replace(old, new)
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        (folder / "text.txt").write_text(TEXT)
        self.says("data/text/prepare.py", "--input=text.txt", "--tokenizer=char", "--out_dir=bins")

    def run(self, *command):
        if command[0] != "-c":
            return process(*command, cwd=self.folder, check=False)
        return subprocess.run([sys.executable, *command], cwd=self.folder, capture_output=True, text=True, check=False)

    def says(self, *command):
        """What a script that works prints."""
        done = self.run(*command)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout

    def refuses(self, *command):
        """The one sentence of a script that refuses."""
        done = self.run(*command)
        assert done.returncode == 1 and "Traceback" not in done.stderr, (done.stdout + done.stderr)[-3000:]
        return done.stderr

    def training(self, *flags):
        settings = small("out", "bins", max_iters=20, lr_decay_iters=20, eval_interval=10)
        return ["train.py", *flags_of(settings), *self.flags, *flags]

    def sampling(self, start="The"):
        drawn = ["--num_samples=1", "--max_new_tokens=30", f"--start={start}", "--seed=1"]
        return ["sample.py", "--out_dir=out", *drawn]

    def planning(self):
        return ["bench.py", "plan", *SIZES, "--vocab_size=65", *self.flags]

    def measuring(self):
        quick = ["--device=cpu", "--dataset=bins", "--vocab_size=65", "--steps=7", "--rounds=1", "--only=manual, eager"]
        return ["bench.py", "ladder", *SIZES, *quick, "--results=measured", *self.flags]

    def trains_resumes_and_samples(self):
        """Check that this works, and that what is sampled is what was trained."""
        self.says(*self.training("--max_iters=10"))
        self.says(*self.training("--init_from=resume"))
        found = rows(self.folder / "out")
        assert [row["iter"] for row in found] == [*range(20)]
        assert found[-1]["loss"] < found[0]["loss"] - 0.5
        text = self.says(*self.sampling())
        assert re.search("The.{20}", text, re.DOTALL)


def test_another_number_that_is_logged(tmp_path):
    project = Project(tmp_path, changes.WEIGHT_NORM)
    project.trains_resumes_and_samples()
    assert all(row["weight_norm"] > 0 for row in rows(tmp_path / "out"))
    project.says("export.py", "out", "hf")
    project.says(*project.planning())
    project.says(*project.measuring())


def test_a_norm_of_the_embeddings(tmp_path):
    forgotten = Project(tmp_path / "forgotten", changes.EMBEDDING_NORM)
    assert "mend the formula in fusedgpt/dimensions.py" in forgotten.refuses(*forgotten.training())
    project = Project(tmp_path / "counted", changes.AND_ITS_COUNT)
    project.trains_resumes_and_samples()
    assert "the model is no GPT-2 and cannot be written as one" in project.refuses("export.py", "out", "hf")
    assert not (project.folder / "hf").exists()
    project.says(*project.planning())
    project.says(*project.training("--compile=True", "--out_dir=compiled"))
    project.says(*project.measuring())


def test_a_factor_of_the_embeddings(tmp_path):
    project = Project(tmp_path, changes.EMBEDDING_SCALE, ["--embedding_scale=2.0"])
    project.trains_resumes_and_samples()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["model"]["embedding_scale"] == 2.0
    assert "does not know embedding_scale=2.0" in project.refuses("export.py", "out", "hf")
    plan = "bench.py plan (fusedgpt/estimates/) does not know embedding_scale=2.0"
    assert plan in project.refuses(*project.planning())
    (tmp_path / "mine.py").write_text(
        "embedding_scale = 2.0\n"
    )  # it used to be ignored in a file, and refused as a flag
    assert plan in project.refuses("bench.py", "plan", "mine.py", "--vocab_size=65")
    project.says(*project.measuring())


def test_alibi_as_a_kernel_is_refused_and_as_part_of_the_model_kept(tmp_path):
    kernel = Project(tmp_path / "kernel", changes.ALIBI_AS_A_KERNEL, ["--attention=alibi"])
    assert "it is not causal attention" in kernel.refuses(*kernel.training())
    project = Project(tmp_path / "field", changes.ALIBI_IN_THE_MODEL, ["--alibi=True"])
    project.trains_resumes_and_samples()
    assert json.loads((project.folder / "out" / "run.json").read_text())["model"]["alibi"] is True
    assert "does not know alibi=True" in project.refuses("export.py", "out", "hf")
    assert "does not know alibi=True" in project.refuses(*project.planning())
    loaded = "import torch; from model import GPT; from fusedgpt.runs import checkpoint; import pathlib\n"
    loaded += "print(GPT.from_checkpoint(checkpoint.load(pathlib.Path('out/ckpt.pt'))).config.alibi)"
    assert project.says("-c", loaded) == "True\n"


def test_a_schedule(tmp_path):
    project = Project(tmp_path, changes.SCHEDULE, ["--schedule=sqrt"])
    project.trains_resumes_and_samples()
    rates = [row["lr"] for row in rows(tmp_path / "out")]
    assert rates[8] == pytest.approx(rates[2] / 2)
    project.says("export.py", "out", "hf")


def test_a_data_set(tmp_path):
    project = Project(tmp_path, {"data/mine/prepare.py": [("", changes.DATA_SET)]})
    (tmp_path / "lines.txt").write_text("\n\n".join(f"{i} times {i} is {i * i}." for i in range(1, 200)))
    project.says("data/mine/prepare.py", "--input=lines.txt")
    project.says(*project.training("--dataset=mine"))
    assert set(project.says(*project.sampling("1 times")).partition("1 times")[2].partition("---")[0]) <= set(
        "0123456789 times.\n"
    )
    project.says("export.py", "out", "hf")
    assert (tmp_path / "hf" / "tokenizer.json").exists()
