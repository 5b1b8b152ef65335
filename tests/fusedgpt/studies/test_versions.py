"""Versions of the code: a git commit or a folder beside the working tree, and digests of what runs read."""

import os
import shutil
import subprocess

import pytest

from fusedgpt.errors import UserError
from fusedgpt.studies import versions

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


def git(folder, *command):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    # a hook that runs us names its own repository there
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", "-C", folder, *who, *command], check=True, capture_output=True, text=True, env=env)
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path):
    """A project of two commits, whose work tree and index somebody has changed since."""
    root = tmp_path / "project"
    (root / "fusedgpt").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch=main")
    for n in (1, 2):
        (root / "train.py").write_text(f"version = {n}\n")
        (root / "fusedgpt" / "loss.py").write_text("loss = 0\n")
        git(root, "add", ".")
        git(root, "commit", "--quiet", f"--message=commit {n}")
        git(root, "tag", f"v{n}")
    (root / "train.py").write_text("version = 3\n")
    (root / "staged.py").write_text("staged = 1\n")
    (root / "untracked.py").write_text("untracked = 1\n")
    (root / ".env").write_text("secret = 1\n")
    git(root, "add", "staged.py")
    return root


def state(root):
    """Whatever of the user's a study must not touch."""
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}
    return files, [(root / ".git" / name).read_bytes() for name in ("index", "HEAD", "config")]


def test_a_commit_is_a_version(root, tmp_path):
    before, last, first = state(root), git(root, "rev-parse", "HEAD"), git(root, "rev-parse", "v1")
    for named, sha in {"HEAD": last, last[:7]: last, "HEAD~1": first, "v1": first}.items():
        name, there, record = versions.other(root, named, tmp_path / "code")
        assert name == sha[:7] and record == {"named": named, "commit": sha}
        assert (there / "train.py").read_text() == f"version = {1 if sha == first else 2}\n"
        assert not (there / "staged.py").exists()
    for named in ("mian", "-x", "HEAD:train.py"):
        with pytest.raises(UserError, match=r"is no commit of .* It takes the folder of a clone, a branch, a tag"):
            versions.other(root, named, tmp_path / "code")
    assert state(root) == before
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == sorted([last[:7], first[:7]])  # no leftovers


@pytest.mark.parametrize("ignored", [True, False])
def test_the_change_that_is_judged_is_kept_and_a_folder_is_a_version(ignored, root, tmp_path):
    # only a hash was, so nobody could run "working tree" again; then a study ended if .gitignore names its folder, as
    # ours does, because git adds nothing if a folder to leave out is ignored
    (root / "study").mkdir()
    (root / "study" / "study.json").write_text("{}")
    (root / ".gitignore").write_text("/study/\n" * ignored)
    before, path, clone = state(root), root / "study" / "working-tree.diff", tmp_path / "clone"
    versions.save_diff(root, path)
    patch = path.read_bytes()
    assert b"study.json" not in patch and b"secret" not in patch
    path.unlink()
    assert state(root) == before
    git(root, "clone", "--quiet", str(root), str(clone))
    name, there, record = versions.other(root, str(clone), tmp_path / "code")
    assert (name, there, record["commit"]) == ("clone", clone, git(root, "rev-parse", "HEAD"))
    path.write_bytes(patch)
    git(clone, "apply", str(path))
    for name in ("train.py", "staged.py", "untracked.py"):
        assert (clone / name).read_text() == (root / name).read_text()
    assert versions.save_diff(tmp_path, tmp_path / "none.diff") is None  # no work tree
