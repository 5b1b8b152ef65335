"""The shell of all pages: one file with its style, which has no script and loads nothing."""

import html
import pathlib
import string

HERE = pathlib.Path(__file__).parent


def fill(title: str, body: str, refresh: str = "") -> bytes:
    """A page with the HTML `body`."""
    page, style = ((HERE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    text = string.Template(page).substitute(title=html.escape(title), refresh=refresh, style=style, body=body)
    return text.encode("utf-8", "replace")  # a folder's name may not be UTF-8
