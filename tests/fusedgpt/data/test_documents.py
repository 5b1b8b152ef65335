"""The text of documents, written by other programs: python-docx, pandoc, Python's email."""

import email.message
import mailbox
import pathlib
import subprocess
import sys
import time

import pytest

from fusedgpt.data import documents, texts
from fusedgpt.errors import UserError
from tests.documents import pdf
from tests.fusedgpt.data.test_texts import documents as read

pypandoc = pytest.importorskip("pypandoc")

MARKDOWN = "# A title\n\nThe first *paragraph* of “text”.\n\n- a list\n- of two\n"


def written(format, path):
    """MARKDOWN as a document of a format."""
    command = [pypandoc.get_pandoc_path(), "--standalone", "--from=markdown", f"--to={format}", f"--output={path}"]
    subprocess.run(command, input=MARKDOWN.encode(), check=True)
    return path


@pytest.mark.parametrize(
    ("suffix", "format"),
    [(suffix, format) for suffix, format in texts.PANDOC.items() if suffix not in (".htm", ".xhtml")],
)
def test_a_document_is_its_text_without_markup(tmp_path, suffix, format):
    (text,) = read([written(format, tmp_path / f"a{suffix}")])
    assert all(words in text for words in ("A title", "The first", "paragraph", "a list")) and "<" not in text
    if suffix in (".docx", ".odt", ".epub", ".ipynb"):
        (tmp_path / f"a{suffix}").write_bytes((tmp_path / f"a{suffix}").read_bytes()[:-40])
        with pytest.raises(UserError, match=r"cannot be read by pandoc \(.*\): it is damaged, protected, or"):
            read([tmp_path / f"a{suffix}"])


@pytest.mark.parametrize("bomb", ["<meta " * 30_000, "</" * 500_000, "<!--" * 250_000])
def test_a_page_that_took_hours_takes_seconds(tmp_path, bomb):
    # Python's own parser takes the square of its length
    (tmp_path / "a.html").write_text(f"<html><p>text{bomb}")
    began = time.monotonic()
    read([tmp_path / "a.html"])
    assert time.monotonic() - began < 20


def test_pandoc_has_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MOST_SECONDS", 0.001)
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0.001 seconds"):
        documents.plain(b"text", "html", pathlib.Path("a"))
    monkeypatch.setattr(documents, "MOST_SECONDS", 60)
    monkeypatch.setattr(documents, "MOST_MEMORY", "2m")
    with pytest.raises(UserError, match=r"a cannot be read by pandoc \(.*[Hh]eap"):
        documents.plain(b"<p>text</p>" * 50_000, "html", pathlib.Path("a"))
    monkeypatch.setattr(documents, "LARGEST", 10)
    (tmp_path / "a.html").write_text("<html><p>text")
    with pytest.raises(UserError, match="has more than 10 bytes: save its parts"):
        read([tmp_path / "a.html"])


def test_a_document_names_no_other_file(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "a.tex").write_text(rf"\include{{{tmp_path / 'secret'}}}\input{{{tmp_path / 'secret.txt'}}} text")
    assert "secret" not in "".join(read([tmp_path / "a.tex"], skip_unreadable=True))


def message(text, subtype="plain"):
    mail = email.message.EmailMessage()
    mail["Subject"], mail["From"] = "Grüße", "a@example.org"
    mail.set_content(text, subtype=subtype, cte="base64")
    mail.add_attachment(b"\x89PNG", maintype="image", subtype="png", filename="a.png")
    return mail


def test_a_mail_is_its_text(tmp_path):
    # base64 was text
    (tmp_path / "a.eml").write_bytes(bytes(message("Grüße aus Berlin\n")))
    (tmp_path / "b.eml").write_bytes(bytes(message("<html><p>Grüße <b>aus</b> Bonn", "html")))
    assert read([tmp_path]) == ["Grüße aus Berlin\n", "Grüße aus Bonn\n"]


def test_each_mail_of_a_box_is_a_document(tmp_path):
    box = mailbox.mbox(tmp_path / "all.mbox")
    for n in range(3):
        box.add(message(f"mail {n}\n"))
    box.close()
    assert read([tmp_path / "all.mbox"]) == ["mail 0\n", "mail 1\n", "mail 2\n"]


def test_a_pdf_is_the_text_of_its_pages(tmp_path, capsys):
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf(["page one", None, "page three"]))
    assert read([tmp_path / "a.pdf"]) == ["page one\npage three\n"]
    assert "a.pdf: 1 of its 3 pages have no text: read images with OCR first" in capsys.readouterr().out
    (tmp_path / "a.pdf").write_bytes(pdf(["page one"])[:200])
    with pytest.raises(UserError, match=r"cannot read .*a\.pdf"):
        read([tmp_path / "a.pdf"])


@pytest.mark.parametrize(("name", "package"), [("a.docx", "pypandoc"), ("a.pdf", "pypdf")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=rf"needs the package {package}: pip install 'fusedgpt\[documents\]'"):
        read([tmp_path / name])
