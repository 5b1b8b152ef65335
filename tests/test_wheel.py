"""What `pip install .` installs: the wheel, built here and put on the path of processes that do not see the clone."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.launch import copied

pytestmark = pytest.mark.slow

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--batch_size=2", "--block_size=16", "--device=cpu"]
SMALL += ["--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--dtype=float32", "--compile=False"]
# runs the command again and again in one process, because importing PyTorch takes longer than most of it
DRIVER = """
import json, sys
from fusedgpt import __main__
for words in json.loads(sys.argv[1]):
    sys.argv = ["fusedgpt", *words]
    __main__.main()
"""


def build(source, out, kind):
    """The path of the wheel or sdist that setuptools builds of the folder `source`."""
    out.mkdir()
    subprocess.run([sys.executable, "-c", BUILD.format(kind), out], cwd=source, check=True, capture_output=True)
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the files of the clone, because setuptools writes into the folder that it builds."""
    root = copied(tmp_path_factory.mktemp("source") / "fusedgpt")
    (root / "data" / "text" / "train.bin").write_bytes(b"prepared data")  # must not be in a wheel
    return root


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    """A folder that holds what a wheel holds that is made of the sdist, as of the one that PyPI serves."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.unpack_archive(build(source, folder / "sdist", "sdist"), folder / "unpacked")
    (unpacked,) = (folder / "unpacked").iterdir()
    shutil.unpack_archive(build(unpacked, folder / "wheel", "wheel"), folder / "site", "zip")
    return folder / "site"


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_has_every_file_of_the_product_and_no_other(source, installed):
    # packages are listed one by one in pyproject.toml, and a new room, page or config file is easily forgotten; files
    # that setuptools does not list in an sdist are missing in what is made of it
    wanted = {name for name in files_in(source) if name.startswith("fusedgpt/")} | {"model.py", "configurator.py"}
    for pattern in ("*.py", "config/**/*.py", "data/*/prepare.py"):
        wanted |= {f"fusedgpt/scripts/{path.relative_to(source).as_posix()}" for path in source.glob(pattern)}
    assert {name for name in files_in(installed) if ".dist-info/" not in name} == wanted
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    (script,) = distribution.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("fusedgpt", "fusedgpt.__main__:main")


@pytest.mark.timeout(300)
def test_from_text_to_an_export_in_any_folder(installed, tmp_path):
    before = files_in(installed)
    (tmp_path / "book.txt").write_text("To be, or not to be, that is the question. " * 400, encoding="utf-8")
    steps = [
        ["prepare", "text", "book.txt", "--tokenizer=byte"],
        ["train", "config/train_text_cpu.py", *SMALL, "--minutes=None", "--out_dir=out"],
        ["sample", "--out_dir=out", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"],
        ["plot", "out"],
        ["export", "out", "hf"],
    ]
    # the wheel alone: no clone, and no bytecode in it
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("FUSEDGPT_COMMIT", None)  # containers set it, and records name that commit
    command = [sys.executable, "-c", DRIVER, json.dumps(steps)]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    for made in ("data/text/train.bin", "out/ckpt.pt", "out/report.html", "out/loss.png", "hf/model.safetensors"):
        assert (tmp_path / made).is_file(), made
    record = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["max_iters"] == 2 and record["environment"]["commit"] is None
    assert files_in(installed) == before  # data used to go beside the prepare script
