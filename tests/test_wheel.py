"""What `pip install .` installs: the wheel, built here and put on the path of processes that do not see the clone."""

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

from fusedgpt import home
from tests.launch import ROOT

BUILD = "import sys; from setuptools import build_meta; build_meta.build_{}(sys.argv[1])"
SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--batch_size=2", "--block_size=16", "--device=cpu"]
SHORT = ["--max_iters=2", "--eval_interval=2", "--eval_iters=1", "--dtype=float32", "--compile=False"]
# which scripts bench.py and study.py start, and whether a study would notice that the package was changed
WHERE = """
from fusedgpt import home
from fusedgpt.bench import child, kinds
from fusedgpt.studies import versions
before, new = versions.digest(home.SCRIPTS), home.SCRIPTS.parent / "new.py"
new.touch()
print(child.TRAIN, kinds.SCRIPTS, versions.digest(home.SCRIPTS) != before)
new.unlink()
"""
TEXT = "To be, or not to be, that is the question. " * 400


def build(source, out, kind="wheel"):
    """The path of the wheel or sdist that setuptools builds of the folder `source`."""
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(kind), out], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A copy of the files of the clone, because setuptools writes into the folder that it builds."""
    version = importlib.metadata.version("setuptools").split(".")[0]
    if int(version) < 77:
        pytest.skip(f"pyproject.toml needs setuptools 77; here is {version}")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, which tells the project's files from others")
    root = tmp_path_factory.mktemp("source")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", ":!tests", ":!results"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    (root / "data" / "text" / "train.bin").write_bytes(b"prepared data")  # must not be in a wheel
    return root


@pytest.fixture(scope="module")
def installed(source, tmp_path_factory):
    """A folder that holds what the wheel holds."""
    folder = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(build(source, folder.parent / f"{folder.name}-wheel")) as wheel:
        wheel.extractall(folder)
    return folder


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_the_wheel_has_every_file_of_the_product_and_no_other(source, installed):
    # packages are listed one by one in pyproject.toml, and a new room, page or config file is easily forgotten
    wanted = {name for name in files_in(source) if name.startswith("fusedgpt/")}
    scripts = {*source.glob("*.py"), *source.glob("config/**/*.py"), *source.glob("eval/*")}
    scripts |= {*source.glob("data/*/prepare.py")}
    wanted |= {f"fusedgpt/scripts/{path.relative_to(source).as_posix()}" for path in scripts}
    wanted |= {"model.py", "configurator.py"}
    assert {name for name in files_in(installed) if ".dist-info/" not in name} == wanted


def test_a_wheel_made_of_the_sdist_is_the_same(source, installed, tmp_path):
    # PyPI serves an sdist; files that setuptools does not list in it are missing in what is made of it
    with tarfile.open(build(source, tmp_path / "sdist", "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.name != "sdist")
    with zipfile.ZipFile(build(unpacked, tmp_path / "wheel")) as wheel:
        assert set(wheel.namelist()) == files_in(installed)


def test_the_command_leads_to_main(installed):
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    (script,) = distribution.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("fusedgpt", "fusedgpt.__main__:main")


@pytest.fixture
def fusedgpt(installed, tmp_path):
    """Runs the installed command in an empty folder."""

    def run(*args, launcher=("-m",)):
        # the wheel alone: no clone, and no bytecode in it
        environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("FUSEDGPT_COMMIT", None)  # containers set it, and records name that commit
        command = [sys.executable, *launcher, "fusedgpt", *map(str, args)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
        )

    return run


def test_from_text_to_an_export_in_any_folder(fusedgpt, installed, tmp_path):
    for package in ("tyro", "matplotlib", "transformers", "tokenizers"):
        pytest.importorskip(package)
    before = files_in(installed)
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    unprepared = fusedgpt("train", "--dataset=text")
    assert unprepared.returncode == 1 and "run fusedgpt prepare text" in unprepared.stderr
    unnamed = fusedgpt("export", "no_such_run", "hf")
    assert unnamed.returncode == 1 and "python " not in unnamed.stderr  # it would not find that script
    steps = [
        ["prepare", "text", "book.txt", "--tokenizer=byte"],
        ["train", "config/train_text_cpu.py", *SMALL, *SHORT, "--minutes=None", "--out_dir=out"],
        ["sample", "--out_dir=out", "--num_samples=1", "--max_new_tokens=5", "--device=cpu"],
        ["plot", "out"],
        ["export", "out", "hf"],
    ]
    for step in steps:
        done = fusedgpt(*step)
        assert done.returncode == 0, f"{step}\n{done.stdout}\n{done.stderr}"
    for made in ("data/text/train.bin", "out/ckpt.pt", "out/report.html", "out/loss.png", "hf/model.safetensors"):
        assert (tmp_path / made).is_file(), made
    record = json.loads((tmp_path / "out" / "run.json").read_text(encoding="utf-8"))
    assert record["settings"]["max_iters"] == 2 and record["environment"]["commit"] is None
    assert files_in(installed) == before  # data used to go beside the prepare script


def test_children_and_ranks_find_the_installed_scripts(fusedgpt, installed, tmp_path):
    pytest.importorskip("tyro")
    (tmp_path / "book.txt").write_text(TEXT, encoding="utf-8")
    assert fusedgpt("prepare", "text", "book.txt", "--tokenizer=byte").returncode == 0
    refused = fusedgpt("bench", "gpu")
    assert refused.returncode == 1 and "run it in a clone" in refused.stderr
    where = fusedgpt(launcher=("-c", WHERE))
    scripts = installed / "fusedgpt" / "scripts"
    assert where.stdout.split() == [str(scripts / "train.py"), str(scripts), "True"], where.stderr
    settings = ["--dataset=text", *SMALL, *SHORT, "--attention=flash", "--gradient_accumulation_steps=2"]
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m")
    two = fusedgpt("train", *settings, "--out_dir=out-two", launcher=torchrun)
    assert two.returncode == 0, two.stdout + two.stderr
    assert json.loads((tmp_path / "out-two" / "run.json").read_text(encoding="utf-8"))["world_size"] == 2


def test_the_clone_is_no_installed_package():
    assert not home.INSTALLED and not (ROOT / "fusedgpt" / "scripts").exists()
