"""The folder of an export: replaced as a whole, and only if nothing else is in it."""

import contextlib
import fnmatch
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from fusedgpt.errors import UserError

CARD = "README.md"
OURS = re.compile(r"^tags: \[[a-z0-9]+, fusedgpt\]$", re.MULTILINE)  # in the card of every export
WRITTEN = (CARD, "config.json", "generation_config.json", "model*.safetensors*")
WRITTEN += ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "meta.json")
WRITTEN += ("ckpt.pt", "meta.pkl")


def tags(family: str) -> str:
    """The line of a card with the tags that the Hub finds it by. family: its title, such as GPT-2."""
    return f"tags: [{family.lower().replace('-', '')}, fusedgpt]"


def require_ours(folder: pathlib.Path) -> None:
    """Raise UserError if `folder` is a file or a link, or holds a file that no export wrote."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):  # a link may lead out of a stranger's run
        raise UserError(f"{folder} is a file or a link: name a folder to write")
    there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    card = folder / CARD
    ours = card.is_file() and OURS.search(card.read_text(encoding="utf-8", errors="replace"))
    if others := [name for name in there if not (ours and any(fnmatch.fnmatch(name, each) for each in WRITTEN))]:
        raise UserError(f"{folder} has files that no export wrote, such as {others[0]}: name another folder")


@contextlib.contextmanager
def replacing(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder beside `folder`. At the end of the `with` statement it takes the place of an earlier export.

    After a kill, `folder` is the earlier export, the new one, or absent. Raises UserError if it holds other files.
    """
    require_ours(folder := folder.absolute())
    new, old = (folder.with_name(f".{folder.name}.{each}") for each in ("new", "old"))
    for left in (new, old):  # by a call that was killed
        shutil.rmtree(left, ignore_errors=True)
    new.mkdir(parents=True)
    with contextlib.ExitStack() as after:
        after.callback(shutil.rmtree, new, ignore_errors=True)  # if the export fails
        yield new
        require_ours(folder)
        if folder.exists():
            os.replace(folder, old)
        os.replace(new, folder)
        shutil.rmtree(old, ignore_errors=True)
