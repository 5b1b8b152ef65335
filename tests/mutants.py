"""Does a test notice if the project computes something else? Plants one mistake after another and counts.

    python tests/mutants.py [WORD ...]

The mistakes are in tests/planted/, a file for each room: under the path of a source file, `what = [old, new, test]`,
where `old` occurs once in that file. Each is planted in a copy of the project, where `test` must then fail. Tests that
are marked slow do not count. With words, only mistakes whose description, file or test has one of them are planted.
The exit status is 1 if a mutant lives. If one cannot be planted, because its text or test is gone or its test fails
without it, a sentence says so.
"""

import compileall
import dataclasses
import gc
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import sys
import tempfile
import tomllib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py, which is imported after PyTorch here
ROOT = pathlib.Path(__file__).resolve().parent.parent
COPIED = ("fusedgpt", "tests", "config", "data", "eval", "pyproject.toml", *(file.name for file in ROOT.glob("*.py")))
PROCESSES, FORK = 2, multiprocessing.get_context("fork")
LIMIT_S = 120.0  # tests that take longer hang
# slow to import: forked processes inherit them
PRELOADED = ("torch._dynamo", "torch.distributed.fsdp", "torch.profiler", "tyro", "pytest", "hypothesis")
PRELOADED += ("transformers.models.gpt2.modeling_gpt2", "scipy.stats", "matplotlib.figure")
PASSED, FAILED = 0, 1  # exit codes of pytest; any other: a test could not be run
OPTIONS = ["-x", "-q", "--tb=line", "-rfE", "--disable-warnings", "-p", "no:cacheprovider", "-p", "no:xdist"]
# twice as fast: no collection of all garbage at the end, and no rewriting of asserts
OPTIONS += ["-p", "no:unraisableexception", "-p", "no:threadexception", "--assert=plain"]
# without its own limit: its error may come from bytecode that has no line, which ends pytest on Python 3.11
OPTIONS += ["--timeout=0"]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: `old`, which occurs once in `file`, becomes `new`. `tests` should notice it."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: pathlib.Path) -> str:
        """The text of its file in `root`, with the mistake. Exits if `old` does not occur exactly once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            sys.exit(f"error: the mutant no longer applies: {self.what}. {self.file} has {self.old!r} not exactly once")
        return text.replace(self.old, self.new)


def table() -> list[Mutant]:
    """All mutants of tests/planted/."""
    rooms = [tomllib.loads(path.read_text()) for path in sorted((ROOT / "tests" / "planted").glob("*.toml"))]
    return [
        Mutant(what, file, old, new, (f"tests/{test}",))
        for files in rooms
        for file, changes in files.items()
        for what, (old, new, test) in changes.items()
    ]


def _run(folder, mutant):
    """Run the tests of `mutant` in `folder`, a copy of the project, in this process; then the process ends."""
    import pytest

    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() not in (ROOT, ROOT / "tests")]
    sys.dont_write_bytecode = True  # the bytecode is shared, and not that of a mistake
    sys.exit(int(pytest.main([*OPTIONS, f"--basetemp={folder / 'tmp'}", *mutant.tests])))


def outcome(mutant: Mutant) -> tuple[int | None, str]:
    """pytest's exit code with a mutant planted in a copy of the project, and its output; the code is None if it hung.

    The tests run in a process that is forked from this one.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
        folder = pathlib.Path(root, "copy")
        _copy(mutant, folder)
        process = FORK.Process(target=_run, args=(folder, mutant))
        process.start()
        process.join(LIMIT_S * len(mutant.tests))
        code = process.exitcode
        process.kill()
        process.join()
        return code, (folder / "output.txt").read_text()


def _copy(mutant, folder):
    """Fill `folder` with links to the project's files and their bytecode, which goes by their time; plant `mutant`."""
    folder.mkdir()
    for path in COPIED:
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, folder / path, copy_function=_link, ignore=shutil.ignore_patterns("*.bin"))
        else:
            _link(ROOT / path, folder / path)
    file, text = folder / mutant.file, mutant.planted(folder)
    file.unlink()  # not the file that it is linked to
    file.write_text(text)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()


def _link(file, name):
    try:
        os.link(file, name)
    except OSError:  # the folder for temporary files is on another disk
        shutil.copy2(file, name)


def plant(mutants: list[Mutant]) -> None:
    """Plant one after another, and print who noticed it; then the process ends with the number of those that live."""
    lived = 0
    for each in mutants:
        code, output = outcome(each)
        seen_by = "a test that hangs"
        if code == PASSED:
            lived += 1
            seen_by = "nobody: IT LIVES"
        elif code == FAILED:
            seen_by = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - |$)", output, re.MULTILINE)[1]
        elif code is not None:
            sys.exit(f"error: the tests of the mutant {each.what!r} cannot tell (exit status {code}):\n{output}")
        print(f"| {each.what} | {each.file} | {seen_by} |", flush=True)
    sys.exit(lived)


def main(words: list[str]) -> None:
    """Plant the mutants with one of `words` in them, or all. Exits with status 1 if one lives or cannot be run."""
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # or each process would look for garbage in all of that
    for folder in COPIED[:2]:
        compileall.compile_dir(ROOT / folder, quiet=2)
    chosen = table()
    if words:
        chosen = [each for each in chosen if any(word in f"{each.what} {each.file} {each.tests}" for word in words)]
    every_test = tuple(dict.fromkeys(test for each in chosen for test in each.tests))
    code, output = outcome(Mutant("no change", "pyproject.toml", "[project]", "[project]", every_test))
    if code != PASSED:
        sys.exit(f"error: without a mutant the tests end with exit status {code}:\n{output}")
    print("| mutant | file | seen by |", "|---|---|---|", sep="\n", flush=True)
    halves = [FORK.Process(target=plant, args=(chosen[n::PROCESSES],)) for n in range(PROCESSES)]
    for half in halves:
        half.start()
    for half in halves:
        half.join()
    if any(half.exitcode for half in halves):
        sys.exit("error: a mutant lives, or cannot be run")
    print(f"\nall {len(chosen)} mutants are dead")


if __name__ == "__main__":
    main(sys.argv[1:])
