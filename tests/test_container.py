"""The Dockerfile and the devcontainers, as far as they can be checked without Docker."""

import fnmatch
import json
import re

import pytest

from tests.launch import ROOT

TARGETS = re.findall(r"^FROM \S+ AS (\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.M)
IGNORED = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()


def test_the_image_gets_what_a_wheel_is_made_of():
    # .dockerignore leaves out everything else, such as data and runs; what a wheel needs is in tests/test_wheel.py
    kept = [pattern.removeprefix("!") for pattern in IGNORED if pattern.startswith("!")]
    assert IGNORED[0] == "*" and all(any(ROOT.glob(pattern)) for pattern in kept), kept
    needed = ["pyproject.toml", "README.md", "LICENSE", "train.py", "model.py", "fusedgpt", "config"]
    needed += ["data/text/prepare.py"]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in kept) for name in needed)


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_devcontainer_names_what_is_there(name):
    path = ROOT / ".devcontainer" / name / "devcontainer.json"
    container = json.loads(path.read_text(encoding="utf-8"))
    build = container["build"]
    assert (path.parent / build["dockerfile"]).samefile(ROOT / "Dockerfile")
    assert (path.parent / build["context"]).samefile(ROOT) and build["target"] in TARGETS
    command, target = container["postCreateCommand"].split()
    assert command == "make" and re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
