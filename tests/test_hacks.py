"""Changes that people make to a GPT after reading CONTRIBUTING.md: each works in every script, or is refused.

Each once went wrong in silence: a log that ended the run, a model exported as another. A kernel that computes something
else is in tests/fusedgpt/attention/test_own_kernels.py.
"""

import re

import pytest

from tests.conftest import TINY, flags, record, rows, small
from tests.launch import copied, fails, process

PLAN = ["bench.py", "plan", "--vocab_size=65", *(f"--{name}={value}" for name, value in TINY.items())]

# {file: [old text, new text, ...]}: a schedule, a number that is logged, and a field without weights of its own, such
# as Gemma's factor of the embeddings
SMALL_CHANGES = {
    "fusedgpt/settings.py": ['Literal["cosine", "wsd", "constant"]', 'Literal["cosine", "wsd", "constant", "sqrt"]'],
    "fusedgpt/training/optimizer.py": [
        '    if s.schedule == "constant"',
        '    if s.schedule == "sqrt":\n'
        "        return s.learning_rate * (s.warmup_iters / max(it, s.warmup_iters, 1)) ** 0.5\n"
        '    if s.schedule == "constant"',
    ],
    "train.py": [
        'return {"loss": loss_sum / len(micro_steps), "grad_norm": norm}',
        "weight_norm = state.model.lm_head.weight.detach().norm()\n"
        '    return {"loss": loss_sum / len(micro_steps), "grad_norm": norm, "weight_norm": weight_norm}',
    ],
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


class Project:
    """A copy of the project with a change, and its scripts."""

    def __init__(self, folder, data, change):
        self.folder, self.data = copied(folder), data
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
        return ["train.py", *flags(small("out", self.data, max_iters=20, lr_decay_iters=20, eval_interval=10)), *more]


def test_a_schedule_a_number_that_is_logged_and_a_field(tmp_path, data):
    project, own = Project(tmp_path / "copy", data, SMALL_CHANGES), "--embedding_scale=2.0"
    said = project.says(*project.training("--max_iters=10", "--schedule=sqrt", own))
    found = rows(project.folder / "out")
    assert found[8]["lr"] == pytest.approx(found[2]["lr"] / 2) and all(row["weight_norm"] > 0 for row in found)
    assert f"tok/s, weight_norm {found[0]['weight_norm']:.4g}\n" in said
    assert "<b>weight_norm</b> over iterations" in (project.folder / "out" / "report.html").read_text()
    assert record(project.folder / "out")["model"]["embedding_scale"] == 2.0
    assert "does not know embedding_scale=2.0" in project.refuses("export.py", "out", "hf")
    assert "does not know embedding_scale=2.0" in project.refuses(*PLAN, own)


@pytest.mark.slow
def test_a_norm_of_the_embeddings(tmp_path, data):
    forgotten = Project(tmp_path / "forgotten", data, EMBEDDING_NORM)
    assert "mend the formula in fusedgpt/dimensions.py" in forgotten.refuses(*forgotten.training())
    project = Project(tmp_path / "counted", data, EMBEDDING_NORM | COUNTED)
    project.says(*project.training("--max_iters=10"))
    project.says(*project.training("--init_from=resume"))
    found = rows(project.folder / "out")
    assert [row["iter"] for row in found] == [*range(20)]
    assert found[-1]["loss"] < found[0]["loss"] - 0.3
    text = project.says("sample.py", "--out_dir=out", "--num_samples=1", "--max_new_tokens=30", "--start=AB")
    assert re.search("AB.{20}", text, re.DOTALL)
    assert "the model is no GPT-2 and cannot be written as one" in project.refuses("export.py", "out", "hf")
    assert not (project.folder / "hf").exists()
    project.says(*PLAN)
