"""Changes that people make to a GPT: each works in every script, or is refused in one sentence that names the place.

Each once went wrong in silence: a log that ended the run, a model exported as another, a window that sampling forgot.
"""

import json
import re

import pytest

from tests.conftest import TINY, flags, rows, small
from tests.hacks import changes
from tests.launch import copied, fails, process

SIZES = [f"--{name}={value}" for name, value in TINY.items()]


class Project:
    """A copy of the project with a change, and its scripts. `added`: flags that training is given too."""

    def __init__(self, folder, data, change, *added):
        self.folder, self.data, self.added = copied(folder), data, added
        for file, pairs in change.items():
            text = (folder / file).read_text()
            for old, new in pairs:
                assert text.count(old) == 1, f"{file} has no longer: {old}"
                text = text.replace(old, new)
            (folder / file).write_text(text)

    def says(self, *command):
        """What a script that works prints."""
        return process(*command, cwd=self.folder).stdout

    def refuses(self, *command):
        """The one sentence of a script that refuses."""
        return fails(*command, run=process, cwd=self.folder)

    def training(self, *more):
        settings = small("out", self.data, max_iters=20, lr_decay_iters=20, eval_interval=10)
        return ["train.py", *flags(settings), *self.added, *more]

    def planning(self):
        return ["bench.py", "plan", *SIZES, "--vocab_size=65", *self.added]

    def trains_resumes_and_samples(self, start="AB"):
        """Check that this works, and that training learns; what is sampled."""
        self.says(*self.training("--max_iters=10"))
        self.says(*self.training("--init_from=resume"))
        found = rows(self.folder / "out")
        assert [row["iter"] for row in found] == [*range(20)]
        assert found[-1]["loss"] < found[0]["loss"] - 0.3
        text = self.says("sample.py", "--out_dir=out", "--num_samples=1", "--max_new_tokens=30", f"--start={start}")
        return re.search(f"{start}(.{{20}})", text, re.DOTALL)[1]


def test_a_schedule(tmp_path, data):
    project = Project(tmp_path / "copy", data, changes.SCHEDULE, "--schedule=sqrt")
    project.says(*project.training("--max_iters=10"))
    rates = [row["lr"] for row in rows(project.folder / "out")]
    assert rates[8] == pytest.approx(rates[2] / 2)


@pytest.mark.slow
def test_another_number_that_is_logged(tmp_path, data):
    project = Project(tmp_path / "copy", data, changes.WEIGHT_NORM)
    project.trains_resumes_and_samples()
    assert all(row["weight_norm"] > 0 for row in rows(project.folder / "out"))
    project.says("export.py", "out", "hf")


@pytest.mark.slow
def test_a_norm_of_the_embeddings(tmp_path, data):
    forgotten = Project(tmp_path / "forgotten", data, changes.EMBEDDING_NORM)
    assert "mend the formula in fusedgpt/dimensions.py" in forgotten.refuses(*forgotten.training())
    project = Project(tmp_path / "counted", data, changes.AND_ITS_COUNT)
    project.trains_resumes_and_samples()
    assert "the model is no GPT-2 and cannot be written as one" in project.refuses("export.py", "out", "hf")
    assert not (project.folder / "hf").exists()
    project.says(*project.planning())


@pytest.mark.slow
def test_a_factor_of_the_embeddings(tmp_path, data):
    project = Project(tmp_path / "copy", data, changes.EMBEDDING_SCALE, "--embedding_scale=2.0")
    project.trains_resumes_and_samples()
    assert json.loads((project.folder / "out" / "run.json").read_text())["model"]["embedding_scale"] == 2.0
    assert "does not know embedding_scale=2.0" in project.refuses("export.py", "out", "hf")
    plan = "bench.py plan (fusedgpt/estimates/) does not know embedding_scale=2.0"
    assert plan in project.refuses(*project.planning())
    # it used to be ignored in a file, and refused as a flag
    (project.folder / "mine.py").write_text("embedding_scale = 2.0\n")
    assert plan in project.refuses("bench.py", "plan", "mine.py", "--vocab_size=65")


@pytest.mark.slow
def test_a_kernel_that_computes_something_else_is_refused(tmp_path, data):
    kernel = Project(tmp_path / "copy", data, changes.ALIBI_AS_A_KERNEL, "--attention=alibi")
    assert "it is not causal attention" in kernel.refuses(*kernel.training())


@pytest.mark.slow
def test_a_data_set(tmp_path, data):
    project = Project(tmp_path / "copy", "mine", {})
    (project.folder / "data" / "mine").mkdir()
    (project.folder / "data" / "mine" / "prepare.py").write_text(changes.DATA_SET)
    (project.folder / "lines.txt").write_text("\n\n".join(f"{i} times {i} is {i * i}." for i in range(1, 200)))
    project.says("data/mine/prepare.py", "--input=lines.txt")
    assert set(project.trains_resumes_and_samples("1 times")) <= set("0123456789 times.\n")
    project.says("export.py", "out", "hf")
    assert (project.folder / "hf" / "tokenizer.json").exists()
