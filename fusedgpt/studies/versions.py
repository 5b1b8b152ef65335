"""Two versions of the code: a git commit, in a worktree of its own, and the working tree.

`root` is the folder of a version: the one with its train.py.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

from fusedgpt import home
from fusedgpt.attention.table import is_own
from fusedgpt.errors import UserError, shown
from fusedgpt.settings import Settings

# the code that a run of train.py executes
CODE = ("train.py", "model.py", "configurator.py", "fusedgpt/**/*.py")
MODEL = ("*.json", "*.safetensors", "*.bin")  # of a folder that init_from names, what decides on the initial weights
WHAT_A_REF_IS = "a branch, a tag, HEAD~1 (the commit before the last), or the first digits of a commit, as in git log"

# A step with these settings moves no weight, to the bit. AdamW multiplies a weight by 1 - learning_rate * weight_decay,
# which is 1, and Muon does too; both then subtract learning_rate times a finite number, which is 0. A step whose
# gradient is not finite is skipped. Dropout changes the gradient and nothing else: the weights are drawn from a random
# stream of their own. weight_decay=0 is for versions that do not multiply it by the learning rate.
STANDSTILL = {"learning_rate": 0.0, "decay_lr": False, "weight_decay": 0.0}
# Initial weights do not depend on these, which make the step quick and possible on any machine
QUICK = {"eval_iters": 1, "batch_size": 1, "gradient_accumulation_steps": 1, "device": "cpu", "dtype": "float32"}
QUICK |= {"compile": False, "attention": "manual"}
# Nor on these, which would end the run too early or late, or report it. Not passing them turns them off in versions
# that know them, and others need not know them
LEFT_OUT = {"max_seconds", "minutes", "sample_interval", "sample_prompts", "tensorboard_log", "wandb_log"}
LEFT_OUT |= {"wandb_project", "wandb_run_name", "profile", "eval_interval", "always_save_checkpoint"}


def environment() -> dict[str, str]:
    """Our environment without the variables with which git tells its hooks where they are.

    In a hook, GIT_DIR and GIT_INDEX_FILE would send every git to the repository of the hook, that of train.py's record
    too. Variables that configure git stay: containers use them to say that a folder of another owner is safe.
    """
    stays = ("GIT_CONFIG_", "GIT_EXEC_PATH")
    return {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith(stays)}


def commit_of(root: pathlib.Path, ref: str) -> str:
    """The SHA of the commit that `ref` names. Raises UserError if git or the commit is missing."""
    _require_work_tree(root)
    try:
        return _commit(root, ref)
    except UserError as error:
        raise UserError(f"against={shown(ref)} is no commit of {root}: {_hint(root, ref)}") from error


def check_out(root: pathlib.Path, sha: str, folder: pathlib.Path) -> pathlib.Path:
    """A worktree of the commit `sha` in `folder`, which must be for it alone; returns its absolute path.

    Takes the worktree that is there. If a kill left a part of it, or if it is of another commit, makes it anew. The
    user's files, index, HEAD and branches stay as they are. Files that git ignores, such as prepared data, are not in
    it: pass absolute paths to its train.py. Raises UserError if somebody has changed the code in `folder`, or if git
    cannot write it.
    """
    folder = folder.resolve()
    if not _is_whole(folder, sha):
        remove(root, folder)
        # --force twice: take the place of a worktree that git lists but cannot read, locked or not
        _git(root, "worktree", "add", "--force", "--force", "--detach", str(folder), sha)
    if not (folder / "train.py").is_file():
        raise UserError(f"commit {sha:.7} has no train.py to compare with: take another commit")
    return folder


def remove(root: pathlib.Path, folder: pathlib.Path) -> None:
    """Remove the worktree in `folder`, or what is left of it, from the disk and from git's list of worktrees."""
    folder = folder.resolve()
    if root.resolve().is_relative_to(folder):
        raise UserError(f"{folder} holds the project itself: name a folder for the worktree alone")
    shutil.rmtree(folder, ignore_errors=True)  # first, because git refuses to remove a folder without a .git
    # Twice --force: a worktree that was being made when it was killed is locked. Not `git worktree prune`, which would
    # forget the user's own worktrees too if they are on a disk that is not mounted now
    with contextlib.suppress(UserError):  # git does not list it
        _git(root, "worktree", "remove", "--force", "--force", str(folder))


def digest(root: pathlib.Path) -> str:
    """SHA-256 of the names and contents of the code that training runs, to tell whether it was changed."""
    patterns = CODE
    if home.INSTALLED:  # the scripts are inside the package
        root, patterns = root.parent, ("**/*.py",)
    return _digest({path.relative_to(root).as_posix(): path for pattern in patterns for path in root.glob(pattern)})


def inputs(runs: Iterable[dict[str, Any]]) -> dict[str, str]:
    """{path: SHA-256} of what `runs` with these settings read beside the project's code and their data.

    A path is that of an own kernel's file, or of the folder of a model that a run begins with.
    """
    found = {}
    for kernel, model in {(run.get("attention", "auto"), run.get("init_from", "scratch")) for run in runs}:
        path = kernel.rpartition(":")[0]
        if is_own(kernel) and pathlib.Path(path).is_file():
            found[path] = {path: pathlib.Path(path)}
        if model != "scratch":
            found[model] = {path.name: path for pattern in MODEL for path in pathlib.Path(model).glob(pattern)}
    return {name: _digest(paths) for name, paths in sorted(found.items()) if paths}


def _digest(paths):
    found = hashlib.sha256()
    for name, path in sorted(paths.items()):
        with open(path, "rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        found.update(f"{name}\0{content}\0".encode(errors="surrogateescape"))
    return found.hexdigest()


def flags_for(settings: dict[str, Any]) -> dict[str, Any]:
    """Those of train.py's `settings` that a version has to be told: all that differ from the defaults here.

    An earlier version may not know the others. If a version has another default, that is a part of its code.
    """
    defaults = dataclasses.asdict(Settings())
    return {name: value for name, value in settings.items() if name not in defaults or value != defaults[name]}


def initial_weights(
    root_a: pathlib.Path, root_b: pathlib.Path, flags: dict[str, Any], python: str = sys.executable
) -> str | None:
    """Whether two versions start with the same weights: "equal", "differ" or "have other shapes" (or other names).

    None if that cannot be seen, because a version moves its weights even with learning_rate=0. flags: settings for
    train.py; those that no initial weight depends on need not be there. Each version's own train.py makes a step on the
    CPU. Raises UserError with its sentence if it refuses.
    """
    roots = (root_a, root_b)
    a, b = (_weights(root, flags, python) for root in roots)
    if _shapes(a) != _shapes(b):
        return "have other shapes"
    if _same(a, b):
        return "equal"
    # A version may have given a part of its weights a learning rate of another name. Then a second step moves them too
    stands_still = (_same(w, _weights(root, flags, python, steps=2)) for root, w in zip(roots, (a, b)))
    return "differ" if all(stands_still) else None


def _weights(root, flags, python, steps=1):
    """The weights by name that train.py in `root` saves after `steps` steps that do not move them."""
    import torch  # slow to import

    with tempfile.TemporaryDirectory() as folder:
        settings = {name: value for name, value in flags.items() if name not in LEFT_OUT}
        settings |= {**QUICK, **STANDSTILL, "max_iters": steps, "out_dir": folder}
        command = [python, str(root / "train.py"), *(f"--{name}={value}" for name, value in settings.items())]
        done = _run(command)
        if done.returncode:
            raise UserError(
                f"train.py of {_version(root)}, in {root}, fails: {_sentence(done)}. To compare two versions, leave out"
                " settings that one of them does not know, or take another commit"
            )
        saved = torch.load(pathlib.Path(folder, "ckpt.pt"), map_location="cpu", weights_only=True)
    return {name.removeprefix("_orig_mod."): weight for name, weight in saved["model"].items()}


def _shapes(weights):
    return {name: weight.shape for name, weight in weights.items()}


def _same(a, b):
    """Whether weights of the same names and shapes have the same bytes."""
    import torch

    def raw(weight):
        return weight.reshape(-1).view(torch.uint8)  # torch.equal would take 0.0 and -0.0 as equal, NaN as unequal

    return all(a[name].dtype == b[name].dtype and torch.equal(raw(a[name]), raw(b[name])) for name in a)


def _is_whole(folder, sha):
    """Whether `folder` is a complete worktree of the commit `sha`. Raises UserError if it was, and has been changed."""
    try:
        top, own, head = _git(folder, "rev-parse", "--show-toplevel", "--absolute-git-dir", "HEAD").splitlines()
        status = _git(folder, "status", "--porcelain", "--", ".", ":(exclude,glob)**/__pycache__/**").splitlines()
    except UserError:  # it is not there, or damaged
        return False
    # without its .git, a folder is just a part of the work tree around it; git locks a worktree until it is complete
    if not os.path.samefile(top, folder) or head != sha or os.path.exists(os.path.join(own, "locked")):
        return False
    if edited := [line for line in status if "D" not in line[:2]]:
        raise UserError(
            f"the code of commit {sha:.7} in {folder} was changed ({edited[0][3:]}). Keep your changes elsewhere, and"
            " remove that folder"
        )
    return not status  # a file is missing if a removal was killed


def _require_work_tree(root):
    """Raise UserError unless `root` is the top of a git work tree. Inside another one, refs would be the other's."""
    said = "the work tree around it is another's"
    try:
        if os.path.samefile(_git(root, "rev-parse", "--show-toplevel").rstrip("\n"), root):
            return
    except UserError as error:
        if isinstance(error.__cause__, OSError):  # git is missing
            raise
        said = str(error)
    raise UserError(
        f"{root} is no git work tree, so there is no other version of the code to compare with ({said}): take a clone"
        " of the project"
    )


def _commit(root, ref):
    if ref.startswith("^"):  # git would take "^main" for all that is not in main
        raise UserError(f"{shown(ref)} excludes a commit")
    return _git(root, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}").strip()


def _hint(root, ref):
    """What somebody may have meant by a `ref` that is no commit."""
    base, too_far_back = re.fullmatch(r"(.*?)([~^][~^\d]*)?", ref, re.DOTALL).groups()
    with contextlib.suppress(UserError):
        if too_far_back:
            before = int(_git(root, "rev-list", "--count", "--first-parent", _commit(root, base))) - 1
            shallow = _git(root, "rev-parse", "--is-shallow-repository").strip() == "true"
            lacks = ", because this clone is shallow: git fetch --unshallow gets the others" * shallow
            return f"{base} has {before} commit{'s' * (before != 1)} before it{lacks}"
    names = ["HEAD", *_git(root, "for-each-ref", "--format=%(refname:short)").split()]
    near = difflib.get_close_matches(base, names, n=3, cutoff=0.5)  # v2 is half of v3
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"--against takes {WHAT_A_REF_IS}"


def _version(root):
    """The commit of the version in `root`, and whether code that training runs was changed since."""
    changed = _git(root, "status", "--porcelain", "--", *(f":(glob){pattern}" for pattern in CODE))
    return _git(root, "rev-parse", "--short=7", "HEAD").strip() + ", changed" * bool(changed)


def _git(folder, *command):
    """What a git command in `folder` prints. Raises UserError with git's own words if it fails."""
    # no hook of the user's runs, and `git status` does not write to the index
    quiet = ("--no-optional-locks", "-c", f"core.hooksPath={os.devnull}")
    try:
        done = _run(["git", "-C", str(folder), *quiet, *command])
    except OSError as error:
        raise UserError("--against needs git, but there is no program git here: install it") from error
    if done.returncode:
        raise UserError(f"git {command[0]} says: {' '.join(done.stderr.split())}")
    return done.stdout


def _run(command):
    """The finished process of a command that reads nothing."""
    how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "surrogateescape"}
    return subprocess.run(command, env=environment(), check=False, **how)


def _sentence(done):
    """The sentence with which a finished process has ended, or the last line of what it said."""
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
    errors = [line for line in lines if line.startswith("error: ")]
    return (errors or lines)[-1].removeprefix("error: ").rstrip(".")
