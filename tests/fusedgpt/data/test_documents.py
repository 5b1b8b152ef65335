"""The text of documents, written by other programs: python-docx, pandoc, Python's email."""

import email.message
import mailbox
import subprocess
import sys

import pytest

from fusedgpt.data import documents, texts
from fusedgpt.errors import UserError
from tests.documents import pdf
from tests.fusedgpt.data.test_texts import documents as read

pypandoc = pytest.importorskip("pypandoc")

MARKDOWN = "# A title\n\nThe first *paragraph* of “text”.\n\n- a list\n- of two\n"


@pytest.mark.parametrize(("suffix", "format"), texts.PANDOC.items())
def test_a_document_is_its_text_without_markup(tmp_path, suffix, format):
    path = tmp_path / f"a{suffix}"
    pypandoc.convert_text(MARKDOWN, format, "markdown", outputfile=str(path), extra_args=["--standalone"])
    (text,) = read([path])
    assert all(words in text for words in ("A title", "The first", "paragraph", "a list")) and "<" not in text
    if suffix in (".docx", ".odt", ".epub", ".ipynb"):
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(UserError, match=r"cannot read .* \(ValueError: pandoc says: "):
            read([path])


def test_documents_have_limits(monkeypatch):
    monkeypatch.setattr(documents, "MOST_SECONDS", 0.001)
    with pytest.raises(subprocess.TimeoutExpired, match=r"timed out after 0.001 seconds"):
        documents.plain(b"text", "html")
    monkeypatch.setattr(documents, "MOST_SECONDS", 60)
    monkeypatch.setattr(documents, "MOST_MEMORY", "2m")
    with pytest.raises(ValueError, match=r"[Hh]eap"):
        documents.plain(b"<p>text</p>" * 50_000, "html")


def test_a_document_names_no_other_file(tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "a.tex").write_text(rf"\include{{{tmp_path / 'secret'}}}\input{{{tmp_path / 'secret.txt'}}} text")
    assert "secret" not in "".join(read([tmp_path / "a.tex"], skip=True))


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
    box = mailbox.mbox(tmp_path / "c.mbox")
    for n in range(2):
        box.add(message(f"mail {n}\n"))
    box.close()
    assert read([tmp_path]) == ["Grüße aus Berlin\n", "Grüße aus Bonn\n", "mail 0\n", "mail 1\n"]


def test_a_mail_whose_charset_has_no_known_name_is_read(tmp_path):
    # it ended the mailbox; and letters with accents were lost where a mail says nothing, or another charset than it has
    head = b"From a\nContent-Type: text/plain; charset="
    mails = (head + b"unknown-8bit\n\nS\xfc\xdf\n", b"From b\nSubject: x\n\nCaf\xc3\xa9\n", b"From c\n\nS\xfc\xdf\n")
    (tmp_path / "a.mbox").write_bytes(b"\n".join([*mails, head + b"iso-8859-1\n\n\x93zwei\x94\n"]))
    assert read([tmp_path]) == ["Süß\n", "Café\n", "Süß\n", "“zwei”\n"]


def test_a_pdf_is_the_text_of_its_pages(tmp_path):
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf(["page one", None, "page three"]))
    assert read([tmp_path / "a.pdf"]) == ["page one\npage three\n"]
    for raw, said in ((pdf([None]), "its pages have no text: read them with OCR"), (pdf(["page one"])[:200], "Error")):
        (tmp_path / "a.pdf").write_bytes(raw)
        with pytest.raises(UserError, match=rf"cannot read .*a\.pdf \(.*{said}"):
            read([tmp_path / "a.pdf"])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypandoc", None)
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(UserError, match=r"needs the package pypandoc: pip install pypandoc-binary 'pypdf\[crypto\]'"):
        read([tmp_path / "a.docx"])
