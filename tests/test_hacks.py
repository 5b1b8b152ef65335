"""Changes that people make to a GPT after reading CONTRIBUTING.md: each works in every script, or is refused.

Each once went wrong in silence: a log that ended the run, a model exported as another. A kernel that computes something
else is in tests/fusedgpt/attention/test_own_kernels.py.
"""

import json
import re

import pytest

from tests.conftest import TINY, flags, rows, small
from tests.launch import copied, fails, process

SIZES = [f"--{name}={value}" for name, value in TINY.items()]

# {file: [old text, new text, ...]}
SCHEDULE = {
    "fusedgpt/settings.py": [
        'Literal["cosine", "wsd", "constant"]',
        'Literal["cosine", "wsd", "constant", "sqrt"]',
    ],
    "fusedgpt/training/optimizer.py": [
        '    if s.schedule == "constant"',
        '    if s.schedule == "sqrt":\n'
        "        return s.learning_rate * (s.warmup_iters / max(it, s.warmup_iters, 1)) ** 0.5\n"
        '    if s.schedule == "constant"',
    ],
}
WEIGHT_NORM = {
    "train.py": [
        'return {"loss": loss_sum / len(micro_steps), "grad_norm": norm}',
        "weight_norm = state.model.lm_head.weight.detach().norm()\n"
        '    return {"loss": loss_sum / len(micro_steps), "grad_norm": norm, "weight_norm": weight_norm}',
    ]
}
# BLOOM's LayerNorm of the embeddings: arXiv:2211.05100
EMBEDDING_NORM = {
    "model.py": [
        '            parts["drop"] = nn.Dropout(config.dropout)\n',
        '            parts["ln_0"] = _norm(config, config.n_embd)\n'
        '            parts["drop"] = nn.Dropout(config.dropout)\n',
        "        x = self.transformer.drop(x)\n",
        "        x = self.transformer.drop(self.transformer.ln_0(x))\n",
    ]
}
COUNTED = {"fusedgpt/dimensions.py": ["blocks + of_norm * C + output", "blocks + 2 * of_norm * C + output"]}
# Gemma multiplies the embeddings: a field without weights of its own
EMBEDDING_SCALE = {
    "fusedgpt/dimensions.py": [
        "    n_embd: int = 768  # channels, the width of the model\n",
        "    n_embd: int = 768  # channels, the width of the model\n"
        "    embedding_scale: float = 1.0  # factor of the token embeddings\n",
        'COUNTED = (*FAMILIES, "document_start")',
        'COUNTED = (*FAMILIES, "document_start", "embedding_scale")',
    ],
    "model.py": [
        "x, rotation = self.transformer.wte(idx), None",
        "x, rotation = self.transformer.wte(idx) * self.config.embedding_scale, None",
    ],
}


class Project:
    """A copy of the project with a change, and its scripts. `added`: flags that training is given too."""

    def __init__(self, folder, data, change, *added):
        self.folder, self.data, self.added = copied(folder), data, added
        for file, texts in change.items():
            text = (folder / file).read_text()
            for old, new in zip(texts[::2], texts[1::2]):
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

    def trains_resumes_and_samples(self):
        """Check that this works, and that training learns."""
        self.says(*self.training("--max_iters=10"))
        self.says(*self.training("--init_from=resume"))
        found = rows(self.folder / "out")
        assert [row["iter"] for row in found] == [*range(20)]
        assert found[-1]["loss"] < found[0]["loss"] - 0.3
        text = self.says("sample.py", "--out_dir=out", "--num_samples=1", "--max_new_tokens=30", "--start=AB")
        assert re.search("AB.{20}", text, re.DOTALL)


def test_a_schedule(tmp_path, data):
    project = Project(tmp_path / "copy", data, SCHEDULE, "--schedule=sqrt")
    project.says(*project.training("--max_iters=10"))
    rates = [row["lr"] for row in rows(project.folder / "out")]
    assert rates[8] == pytest.approx(rates[2] / 2)


@pytest.mark.slow
def test_another_number_that_is_logged(tmp_path, data):
    project = Project(tmp_path / "copy", data, WEIGHT_NORM)
    project.trains_resumes_and_samples()
    assert all(row["weight_norm"] > 0 for row in rows(project.folder / "out"))
    project.says("export.py", "out", "hf")


@pytest.mark.slow
def test_a_norm_of_the_embeddings(tmp_path, data):
    forgotten = Project(tmp_path / "forgotten", data, EMBEDDING_NORM)
    assert "mend the formula in fusedgpt/dimensions.py" in forgotten.refuses(*forgotten.training())
    project = Project(tmp_path / "counted", data, EMBEDDING_NORM | COUNTED)
    project.trains_resumes_and_samples()
    assert "the model is no GPT-2 and cannot be written as one" in project.refuses("export.py", "out", "hf")
    assert not (project.folder / "hf").exists()
    project.says(*project.planning())


@pytest.mark.slow
def test_a_factor_of_the_embeddings(tmp_path, data):
    project = Project(tmp_path / "copy", data, EMBEDDING_SCALE, "--embedding_scale=2.0")
    project.trains_resumes_and_samples()
    assert json.loads((project.folder / "out" / "run.json").read_text())["model"]["embedding_scale"] == 2.0
    assert "does not know embedding_scale=2.0" in project.refuses("export.py", "out", "hf")
    plan = "bench.py plan (fusedgpt/estimates/) does not know embedding_scale=2.0"
    assert plan in project.refuses(*project.planning())
