"""The shell of all pages: one file with its style, which has no script and loads nothing."""

import html
import pathlib
import string


def fill(title: str, body: str, refresh: str = "") -> bytes:
    """A page with the HTML `body`."""
    page, style = (pathlib.Path(__file__).with_name(f"page.{kind}").read_text("utf-8") for kind in ("html", "css"))
    text = string.Template(page).substitute(title=html.escape(title), refresh=refresh, style=style, body=body)
    return text.encode("utf-8", "replace")  # a folder's name may not be UTF-8
