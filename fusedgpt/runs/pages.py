"""What the pages of runs and of studies share: how a template becomes one file, its tables and its numbers."""

import html
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from fusedgpt.errors import shown

HERE = pathlib.Path(__file__).parent


def fill(template: pathlib.Path, title: str, page: dict[str, Any], refresh: str = "") -> bytes:
    """A page: the `template` with the shared style and script, and with `page`, which its script draws.

    Raises ValueError if a number in `page` is not finite.
    """
    data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")  # no text of a run can end the script
    parts = {"title": html.escape(title), "refresh": refresh, "page": data}
    parts |= {"style": _read("page.css"), "script": _read("page.js")}
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template.read_text(encoding="utf-8"))
    return text.encode("utf-8", "replace")  # a folder's name may not be UTF-8


def _read(name):
    return (HERE / name).read_text(encoding="utf-8").rstrip()


def table(title: str, rows: Iterable[Sequence], head: Sequence[str] = (), open: bool = False) -> dict[str, Any]:
    """A table of texts as the script draws it: title, whether it is open, the heads of its columns, its rows."""
    return {"title": title, "open": open, "head": list(head), "rows": [[text(each) for each in row] for row in rows]}


def text(value: Any) -> str:
    """A value of run.json as a page shows it, of at most some 1,000 characters."""
    values = value if isinstance(value, list) else [value]
    said = ", ".join(each if isinstance(each, str) else shown(each) for each in values)
    return said if len(said) <= 1000 else f"{said[:1000]}…"
