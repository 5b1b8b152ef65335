"""docs/tour.ipynb: every cell runs."""

import json

import pytest

from tests.launch import ROOT, copied

SHORTER = {"STEPS = 800 ": "STEPS = 3 ", "(128, 256, 512, 1024)": "(128, 256)"}
SHORTER["eval_iters=20,"] = 'eval_iters=1, dtype="float32", compile=False,'


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_cell_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    root = copied(tmp_path / "copy")
    notebook = nbformat.read(ROOT / "docs" / "tour.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells)
    for long, short in SHORTER.items():
        assert text.count(long) == 1, long
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    # a script in a notebook used to end with an AttributeError: its streams have no `reconfigure`
    notebook.cells.append(nbformat.v4.new_code_cell("%run plot.py out-tour --y=loss"))
    where = {"metadata": {"path": str(root / "docs")}}  # Jupyter starts a notebook in its own folder
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()  # raises CellError
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert "error" not in {output.output_type for output in outputs}  # %run shows an error, and goes on
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 3
    record = json.loads((root / "out-tour" / "run.json").read_text())
    assert record["settings"]["max_iters"] == 3 and record["settings"]["n_layer"] == 4
    said = "".join(output.get("text", "") for output in outputs)
    assert "drew out-tour/loss.png" in said and (root / "out-tour" / "loss.png").exists()
    assert f"{record['attention']} was chosen" in said and said.count(": ok") >= 3 and "WRONG" not in said
