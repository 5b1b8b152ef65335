"""A git commit beside the working tree: found, checked out, removed, and whether both start with the same weights."""

import pathlib
import shutil
import subprocess

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.machine import determinism
from fusedgpt.settings import Settings
from fusedgpt.studies import versions
from model import GPT, GPTConfig
from tests.conftest import assert_same_bytes, run, small, weights
from tests.launch import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")

# a train.py that does not import torch, so that it takes a moment: it "trains" the weights that lie beside it
FAKE = """
import pathlib, shutil, sys
flags = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[1:])
if "minutes" in flags or "window" in flags:
    sys.exit("a line before\\nerror: the command line: there is no setting 'window': --help lists every setting")
assert float(flags["learning_rate"]) == 0 and flags["device"] == "cpu", flags
found = sorted(pathlib.Path(__file__).parent.glob("weights*.pt"))
shutil.copy(found[min(int(flags["max_iters"]), len(found)) - 1], pathlib.Path(flags["out_dir"]) / "ckpt.pt")
"""


def git(folder, *command):
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    how = dict(capture_output=True, text=True, env=versions.environment())  # not the repository of a hook that runs us
    return subprocess.run(["git", "-C", folder, *who, *command], check=True, **how).stdout.strip()


@pytest.fixture
def root(tmp_path):
    """A project of two commits, whose work tree and index somebody has changed since."""
    root = tmp_path / "project"
    (root / "fusedgpt").mkdir(parents=True)
    (root / ".gitignore").write_text("/out*/\n")  # not __pycache__, as in a fork that does not ignore it
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
    git(root, "add", "staged.py")
    return root


def state(root):
    """Whatever of the user's a worktree must not touch."""
    files = {path: path.read_bytes() for path in root.rglob("*") if path.is_file() and ".git" not in path.parts}
    kept = [(root / ".git" / name).read_bytes() for name in ("index", "HEAD", "config")]
    return files, kept, git(root, "branch", "--all"), git(root, "worktree", "list")


def test_a_ref_is_a_commit(root, monkeypatch):
    last, first = git(root, "rev-parse", "HEAD"), git(root, "rev-parse", "v1")
    for ref, sha in {"HEAD": last, "main": last, last[:7]: last, "HEAD~1": first, "v1": first, first: first}.items():
        assert versions.commit_of(root, ref) == sha
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):  # a hook of another repository sets them
        monkeypatch.setenv(name, "/nowhere")
    assert versions.commit_of(root, "HEAD") == last


@pytest.mark.parametrize(
    "ref, said",
    [
        ("mian", "did you mean main[?]"),
        ("v3", "did you mean v2 or v1[?]"),
        ("HEAAD~1", "did you mean HEAD[?]"),
        ("HEAD~7", "HEAD has 1 commit before it$"),
        ("main^^", "main has 1 commit before it$"),
        *(
            (ref, "--against takes a branch, a tag")
            for ref in ("", "-x", "^HEAD", "a b", "v1..v2", "HEAD:train.py", "0" * 40)
        ),
    ],
)
def test_another_ref_is_refused(ref, said, root):
    with pytest.raises(UserError, match=f"is no commit of .*{said}"):
        versions.commit_of(root, ref)


def test_a_shallow_clone_says_that_it_is_one(root, tmp_path):
    git(root, "clone", "--quiet", "--depth=1", root.as_uri(), str(tmp_path / "clone"))
    with pytest.raises(UserError, match="HEAD has 0 commits before it, because this clone is shallow"):
        versions.commit_of(tmp_path / "clone", "HEAD~1")


def test_what_is_no_work_tree_is_refused(root, tmp_path, monkeypatch):
    (tmp_path / "plain").mkdir()
    for folder in (tmp_path / "plain", tmp_path / "nowhere", root / "fusedgpt", root / ".git"):
        with pytest.raises(UserError, match=r"is no git work tree.*take a clone"):
            versions.commit_of(folder, "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no program git here: install it"):
        versions.commit_of(root, "HEAD")


def test_a_commit_is_checked_out_and_removed(root):
    hook = root / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\ntouch hooked\n")
    hook.chmod(0o755)
    before, folder, sha = state(root), root / "out" / "v1", versions.commit_of(root, "v1")
    assert versions.check_out(root, sha, folder) == folder
    assert (folder / "train.py").read_text() == "version = 1\n" and not (folder / "hooked").exists()
    assert git(folder, "rev-parse", "HEAD") == sha
    (folder / "fusedgpt" / "__pycache__").mkdir()  # a run's
    (folder / "fusedgpt" / "__pycache__" / "loss.pyc").touch()
    assert versions.check_out(root, sha, folder) == folder
    assert (folder / "fusedgpt" / "__pycache__").exists()  # the one that was there is taken
    versions.check_out(root, versions.commit_of(root, "v2"), folder)
    assert (folder / "train.py").read_text() == "version = 2\n"
    for _ in range(2):
        versions.remove(root, folder)
        assert not folder.exists() and state(root) == before


def git_dir(folder):
    return pathlib.Path(git(folder, "rev-parse", "--absolute-git-dir"))


# what a kill of `git worktree add` or of a removal, a power cut, or somebody with rm may leave
DAMAGES = {
    "only a folder": lambda f: (shutil.rmtree(git_dir(f)), (f / ".git").unlink()),
    "no .git": lambda f: (f / ".git").unlink(),
    "an empty .git": lambda f: (f / ".git").write_text(""),
    "no folder": shutil.rmtree,
    "locked, no folder": lambda f: ((git_dir(f) / "locked").write_text("initializing"), shutil.rmtree(f)),
    "not complete": lambda f: ((git_dir(f) / "locked").write_text("initializing"), (git_dir(f) / "index").unlink()),
    "no train.py": lambda f: (f / "train.py").unlink(),
    "an empty HEAD": lambda f: (git_dir(f) / "HEAD").write_text(""),
    "a damaged index": lambda f: (git_dir(f) / "index").write_text("x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_a_kill_left_is_made_anew(damage, root):
    before, folder, sha = state(root), root / "out" / "v1", versions.commit_of(root, "v1")
    versions.check_out(root, sha, folder)
    DAMAGES[damage](folder)
    versions.check_out(root, sha, folder)
    assert (folder / "train.py").read_text() == "version = 1\n" and git(folder, "status", "--porcelain") == ""
    DAMAGES[damage](folder)
    versions.remove(root, folder)
    assert not folder.exists() and state(root) == before


def test_somebodys_changes_are_not_lost(root):
    folder, sha = root / "out" / "v1", versions.commit_of(root, "v1")
    versions.check_out(root, sha, folder)
    for changed in ("train.py", "another.py"):
        (folder / changed).write_text("version = 5\n")
        with pytest.raises(UserError, match=rf"{sha[:7]} in .* was changed \({changed}\). Keep your changes"):
            versions.check_out(root, sha, folder)
        assert (folder / changed).read_text() == "version = 5\n"
        git(folder, "checkout", "--quiet", ".")
    for folder in (root, root.parent):
        with pytest.raises(UserError, match="holds the project itself"):
            versions.remove(root, folder)


def test_a_commit_without_train_py_is_refused(root):
    git(root, "rm", "--quiet", "--cached", "train.py")
    git(root, "commit", "--quiet", "--message=none")
    with pytest.raises(UserError, match=r"has no train\.py"):
        versions.check_out(root, versions.commit_of(root, "HEAD"), root / "out")


def test_the_code_that_training_runs_has_a_digest(root):
    changed = versions.digest(root)
    (root / "train.py").write_text("version = 2\n")
    unchanged = versions.digest(root)  # staged.py and untracked.py are not of training
    folder = versions.check_out(root, versions.commit_of(root, "HEAD"), root / "out")
    assert versions.digest(folder) == unchanged != changed
    (root / "fusedgpt" / "loss.py").rename(root / "fusedgpt" / "loss2.py")
    renamed = versions.digest(root)
    assert renamed not in (changed, unchanged)
    (root / "fusedgpt" / "notes.md").write_text("not of training")
    assert versions.digest(root) == renamed


def test_a_version_is_told_what_differs_from_the_defaults():
    settings = {**vars(Settings()), "n_layer": 2, "max_seconds": 5.0, "from_a_fork": 1}
    assert versions.flags_for(settings) == {"n_layer": 2, "max_seconds": 5.0, "from_a_fork": 1}


def test_what_is_left_out_for_the_initial_weights_are_settings():
    assert {*versions.LEFT_OUT, *versions.QUICK, *versions.STANDSTILL} <= vars(Settings()).keys()


W = {"wte": torch.arange(6.0).reshape(2, 3), "scale": torch.tensor(0.0)}
COMPILED = {f"_orig_mod.{name}": weight for name, weight in W.items()}
OTHER = {**W, "scale": torch.tensor(-0.0)}  # the smallest difference there is


def version(folder, *steps):
    """A version of the code whose train.py has these weights after each number of steps."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    (folder / "train.py").write_text(FAKE)
    for n, model in enumerate(steps):
        torch.save({"model": model, "iter_num": n + 1}, folder / f"weights{n}.pt")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=a")
    return folder


@pytest.mark.parametrize(
    "a, b, said",
    [
        ([W], [COMPILED], "equal"),
        ([W], [OTHER], "differ"),
        ([W], [{**W, "wte": W["wte"].bfloat16()}], "differ"),
        ([W], [{**W, "wte": torch.zeros(2, 4)}], "have other shapes"),
        ([W], [{**W, "wpe": torch.zeros(2)}], "have other shapes"),
        ([W], [OTHER, W], None),  # its first step has moved a weight, as its second does
    ],
)
def test_initial_weights_are_compared(a, b, said, tmp_path):
    roots = version(tmp_path / "a", *a), version(tmp_path / "b", *b)
    assert versions.initial_weights(*roots, {"seed": 1, "learning_rate": 1e-3, "device": "cuda", "minutes": 5}) == said


def test_a_version_that_refuses_is_named_with_its_sentence(tmp_path):
    a, b = version(tmp_path / "a", W), version(tmp_path / "b", W)
    short = git(a, "rev-parse", "--short=7", "HEAD")
    with pytest.raises(
        UserError, match=rf"train.py of {short}, in {a}, fails: the command line: there is no setting 'window'"
    ):
        versions.initial_weights(a, b, {"window": 5})
    (b / "train.py").write_text("print('fine so far')\n1 / 0\n")
    with pytest.raises(UserError, match=rf", changed, in {b}, fails: ZeroDivisionError: division by zero\. To compare"):
        versions.initial_weights(a, b, {})


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_standing_step_moves_no_weight(optimizer, dropout, tmp_path, data):
    shape = dict(dropout=dropout, bias=True, seed=3)
    still = {**shape, **versions.QUICK, **versions.STANDSTILL, "max_iters": 2, "optimizer": optimizer}
    s = small(tmp_path, data, **still)
    run(tmp_path, data, **still)
    determinism.seed(3, "init")
    assert_same_bytes(weights(tmp_path), GPT(GPTConfig.of(s, vocab_size=65)).state_dict())


@pytest.mark.slow  # four starts of PyTorch; the tests above have another train.py
@pytest.mark.timeout(300)
def test_this_project_against_itself(tmp_path, data):
    try:
        versions.commit_of(ROOT, "HEAD")
    except UserError as error:
        pytest.skip(str(error))
    clone = tmp_path / "clone"  # so that no worktree is listed in the repository of whoever runs the tests
    git(ROOT, "clone", "--quiet", "--no-checkout", str(ROOT), str(clone))
    code = versions.check_out(clone, versions.commit_of(clone, "HEAD"), tmp_path / "code")
    flags = versions.flags_for(vars(small(tmp_path / "out", data, optimizer="muon", seed=5)))
    assert versions.initial_weights(code, code, flags) == "equal"
    shutil.copytree(code, tmp_path / "other", ignore=shutil.ignore_patterns("results", "docs"))
    text = (code / "train.py").read_text()
    assert 'seed(s.seed, "init")' in text
    (tmp_path / "other" / "train.py").write_text(text.replace('seed(s.seed, "init")', 'seed(s.seed + 1, "init")'))
    assert versions.initial_weights(code, tmp_path / "other", flags) == "differ"
    assert not (tmp_path / "out").exists()
