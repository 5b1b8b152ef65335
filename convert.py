"""Convert each checkpoint of a run to one file, or to shards as a run with --parallel=fsdp writes them.

    python convert.py OUT_DIR file
    python convert.py OUT_DIR shards

Both forms can be resumed, sampled and exported. nanoGPT and torch.load need one file. Processes that read shards need
not hold all of them in memory. The conversion itself holds one whole checkpoint in memory.
"""

import os
import pathlib
import sys

from fusedgpt.home import as_called

if __name__ == "__main__" and {"-h", "--help"} & set(sys.argv):
    sys.exit(print(as_called(__doc__)))  # before PyTorch, which takes seconds to import

from fusedgpt.errors import UserError, one_sentence
from fusedgpt.machine import files
from fusedgpt.parallel import shard_files
from fusedgpt.runs import checkpoint, run_folder

FORMS = ("file", "shards")


def main(out_dir: str | os.PathLike, form: str) -> None:
    """Convert every checkpoint in `out_dir` in place. Raises UserError if one is damaged, or a run is using them."""
    if form not in FORMS:
        raise UserError(f"the form {form!r} is unknown: it can be {' or '.join(FORMS)}")
    folder = pathlib.Path(out_dir)
    if not (names := run_folder.checkpoints(folder)):
        raise UserError(f"{folder} has no checkpoint: name the folder of a run")
    with files.lock(folder) as lock:
        for same in _by_file(names):
            saved = checkpoint.load(same[0])
            saved.pop("shards", None)
            lock.check()  # the folder may have been moved while the checkpoint was loaded
            if form == "shards":
                saved, tensors = shard_files.split(saved)
                name = shard_files.free_name(folder, saved["iter_num"])
                saved["shards"] = {"folder": name, "files": shard_files.write(folder / name, tensors)}
                lock.check()
            checkpoint.save(same[0], saved)
            for name in same[1:]:
                files.link(same[0], name)
            print(f"wrote {', '.join(map(str, same))}, of iteration {saved['iter_num']}")
        run_folder.remove_unused_shards(folder)


def _by_file(paths):
    """Group the paths by the file that they name. ckpt.pt and best.pt may be links to one file."""
    groups = {}
    for path in paths:
        groups.setdefault((path.stat().st_dev, path.stat().st_ino), []).append(path)
    return list(groups.values())


if __name__ == "__main__":
    with one_sentence():
        if len(sys.argv) != 3 or any(arg.startswith("-") for arg in sys.argv):
            raise UserError("name a run and a form: python convert.py OUT_DIR file, or ... OUT_DIR shards")
        main(*sys.argv[1:])
