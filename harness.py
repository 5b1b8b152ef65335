"""Evaluate a model in Hugging Face's format, as export.py writes it, with lm-evaluation-harness (lm_eval).

    python harness.py FOLDER RESULTS.json TASK [TASK ...]

TASK is the name of a task in eval/, which needs no network, or of any task of lm_eval. Prints lm_eval's results.
"""

import contextlib
import json
import pathlib
import sys
from typing import Any

from fusedgpt.home import as_called

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    sys.exit(print(as_called(__doc__)))  # before PyTorch, which takes seconds to import

from fusedgpt.errors import UserError, first_line, one_sentence
from fusedgpt.interchange import tokenizer_json
from fusedgpt.machine.device import resolve_device
from fusedgpt.machine.files import atomic

TASKS = pathlib.Path(__file__).resolve().parent / "eval"


def evaluate(folder: str, tasks: list[str]) -> dict[str, Any]:
    """Run lm_eval on the model in `folder` and return its results.

    Raises UserError if lm_eval cannot: a task may be unknown, or the tokenizer may lack a character of its texts.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedTokenizerFast

    meta, theirs = tokenizer_json.read(folder)
    ours = tokenizer_json.OfModel(meta, theirs, ())
    # lm_eval predicts the first id of a text from this id: that before each text, end-of-text, or else a new line
    before = [*ours.begin, *(ours.ends or ours.encode("\n"))][0]
    model = {"pretrained": str(pathlib.Path(folder).resolve()), "dtype": "float32", "prefix_token_id": before}
    # lm_eval's AutoTokenizer splits the texts of any Qwen2 as Qwen does, whatever the folder says
    own = {"tokenizer": theirs or PreTrainedTokenizerFast.from_pretrained(folder)}
    # reading lm_eval's thousands of tasks takes a while
    known = {file.stem for file in TASKS.glob("*.yaml")}
    manager = TaskManager(include_path=str(TASKS), include_defaults=not known.issuperset(tasks))
    how = dict(tasks=tasks, task_manager=manager, device=str(resolve_device("auto")), log_samples=False)
    try:
        with contextlib.chdir(TASKS.parent):  # lm_eval reads the texts of eval/ from the current folder
            found = lm_eval.simple_evaluate("hf", model | own, **how)
    except Exception as error:  # lm_eval and tokenizers raise all kinds, also a bare Exception
        raise UserError(f"lm_eval cannot score {folder} on {', '.join(tasks)}: {first_line(error)}") from error
    found["config"]["model_args"] = model  # without the tokenizer, which is no JSON
    return found


def main(folder: str, results: str, *tasks: str) -> None:
    """Write the results as JSON and print them as a table. Raises UserError as `evaluate` does."""
    if not pathlib.Path(folder, "config.json").exists():
        raise UserError(f"{folder} has no model: write it with python export.py OUT_DIR {folder}")
    found = evaluate(folder, list(tasks))
    from lm_eval.utils import handle_non_serializable, make_table

    with atomic(results, "w") as file:
        json.dump(found, file, indent=1, default=handle_non_serializable)
    print(make_table(found))
    print(f"wrote {results}")


if __name__ == "__main__":
    with one_sentence():
        if len(sys.argv) < 4 or any(arg.startswith("-") for arg in sys.argv):
            raise UserError("name a model, a file and tasks: python harness.py FOLDER RESULTS.json TASK [TASK ...]")
        main(*sys.argv[1:])
