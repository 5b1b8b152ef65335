"""The shell of all pages: one file with its style, its script and its data, which loads nothing."""

import html
import json
import pathlib
import re
from typing import Any

HERE = pathlib.Path(__file__).parent


def fill(title: str, body: str, page: dict[str, Any] | None = None, refresh: str = "") -> bytes:
    """A page with the HTML `body`, and if there is data in `page`, with the script that draws it.

    Raises ValueError if a number in `page` is not finite.
    """
    script = ""
    if page is not None:
        data = json.dumps(page, allow_nan=False).replace("<", "\\u003c")  # no text of a run can end the script
        script = f'<script type="application/json" id="page">{data}</script>\n<script>\n{_read("page.js")}</script>'
    parts = {"title": html.escape(title), "refresh": refresh, "style": _read("page.css")}
    parts |= {"body": body, "script": script}
    text = re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _read("page.html"))
    return text.encode("utf-8", "replace")  # a folder's name may not be UTF-8


def _read(name):
    return (HERE / name).read_text(encoding="utf-8")
