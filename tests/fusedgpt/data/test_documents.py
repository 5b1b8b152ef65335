"""The text of Word, OpenDocument, EPUB and PDF files, and only that. What cannot be read is named."""

import gzip
import io
import re
import sys
import tarfile
import tracemalloc

import pytest

from fusedgpt.data import documents
from fusedgpt.data.corpus import Files
from fusedgpt.errors import UserError
from tests.documents import W, docx, epub, odt, pdf, zip_of, zipped
from tests.fusedgpt.data.test_html import PAGE, text_of


def test_a_chapter_says_what_it_leaves_out_too(tmp_path, capsys):
    text_of(tmp_path / "a.epub", epub([("a.xhtml", chapter("one<nav>Menu"), "")]))
    assert "a.epub, which has a <nav> without its </nav>" in capsys.readouterr().out


BODY = """<w:p><w:pPr><w:tabs><w:tab w:val="left"/></w:tabs></w:pPr><w:r><w:t>First </w:t></w:r><w:r>
<w:t xml:space="preserve">
paragraph</w:t></w:r><w:ins><w:r><w:t>, inserted</w:t></w:r></w:ins>
<w:del><w:r><w:delText>deleted</w:delText></w:r></w:del>
</w:p><w:p><w:r><w:t>a</w:t><w:tab/><w:t>b</w:t><w:br/><w:t>c</w:t></w:r></w:p><w:p/>
<w:moveFrom><w:r><w:t>moved away</w:t></w:r></w:moveFrom>
<w:tbl><w:tr><w:tc><w:p><w:r><w:t>1</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>2</w:t></w:r></w:p></w:tc></w:tr>
<w:tr><w:tc><w:p><w:r><w:t>3</w:t></w:r></w:p></w:tc><w:tc><w:p><w:r><w:t>4</w:t></w:r></w:p></w:tc></w:tr></w:tbl>
<w:p><w:r><mc:AlternateContent xmlns:mc="mc"><mc:Choice><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Choice>
<mc:Fallback><w:p><w:r><w:t>box</w:t></w:r></w:p></mc:Fallback></mc:AlternateContent></w:r></w:p><w:p><w:hyperlink><w:r><w:t>link</w:t></w:r>
</w:hyperlink><w:r><w:instrText>PAGE</w:instrText></w:r></w:p>"""


@pytest.mark.parametrize("name", ["word/document.xml", "word/document2.xml"])  # Word on the web writes the second
def test_word(tmp_path, name):
    want = "First \nparagraph, inserted\n\na\tb\nc\n\n1\t2\n3\t4\n\nbox\n\nlink"
    assert text_of(tmp_path / "a.docx", docx(BODY, name)) == want


def test_word_as_python_docx_writes_it(tmp_path):
    write = pytest.importorskip("docx").Document()
    write.add_heading("Title", 0)
    write.add_paragraph("One & two").add_run(" bold").bold = True
    table = write.add_table(2, 2)
    for n, cell in enumerate(cell for row in table.rows for cell in row.cells):
        cell.text = str(n)
    write.save(tmp_path / "a.docx")
    assert text_of(tmp_path / "a.docx") == "Title\n\nOne & two bold\n\n0\t1\n2\t3"


def test_open_document(tmp_path):
    body = """<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>
    <text:h>A  head</text:h> <text:p>one<text:s text:c="2"/>two<text:tab/>three<text:line-break/>four
    <text:span>five</text:span><text:note><text:note-body><text:p>a note</text:p></text:note-body></text:note></text:p>
    <table:table><table:table-row><table:table-cell><text:p>1</text:p></table:table-cell><table:table-cell>
    <text:p>2</text:p></table:table-cell></table:table-row></table:table><text:p>end</text:p>"""
    want = "A head\n\none  two\tthree\nfour five\n\n1\t2\n\nend"
    assert text_of(tmp_path / "a.odt", odt(body)) == want


def paragraph(runs, before=""):
    return f"<w:p>{before}{runs}</w:p>"


def run(text, before=""):
    return f"<w:r>{before}<w:t>{text}</w:t></w:r>"


def test_word_keeps_characters_that_are_elements(tmp_path):
    # "non-breaking" became "nonbreaking", and the words on both sides of a tab to the margin became one
    body = paragraph("<w:r><w:t>non</w:t><w:noBreakHyphen/><w:t>breaking</w:t><w:ptab/><w:t>1</w:t></w:r>")
    assert text_of(tmp_path / "a.docx", docx(body)) == "non\u2011breaking\t1"


def test_word_is_read_without_what_is_hidden(tmp_path):
    # hidden text, the table of contents and the reading of a ruby were read as text
    hide = "<w:rPr><w:vanish/></w:rPr>"
    nested = f"<w:r><w:txbxContent>{paragraph(run('box'), f'<w:pPr>{hide}</w:pPr>')}</w:txbxContent></w:r>"
    gallery = '<w:docPartGallery w:val="Table of Contents"/>'
    body = [
        paragraph(run("one") + run("not", hide) + run(" two", '<w:rPr><w:vanish w:val="0"/></w:rPr>')),
        paragraph(run("Contents 1"), '<w:pPr><w:pStyle w:val="TOC1"/></w:pPr>'),
        f"<w:sdt><w:sdtPr><w:docPartObj>{gallery}</w:docPartObj></w:sdtPr>{paragraph(run('Contents'))}</w:sdt>",
        paragraph(run("head"), '<w:pPr><w:pStyle w:val="TOCHeading"/></w:pPr>'),
        paragraph(nested),
        paragraph(f"<w:r><w:ruby><w:rt>{run('かん')}</w:rt><w:rubyBase>{run('漢')}</w:rubyBase></w:ruby></w:r>"),
    ]
    assert text_of(tmp_path / "a.docx", docx("".join(body))).split() == ["one", "two", "head", "box", "漢"]


def test_open_document_keeps_blanks_that_count_and_leaves_out_what_is_hidden(tmp_path):
    # the indents of code in .odt became one blank
    body = """<text:table-of-content><text:p>Contents</text:p></text:table-of-content>
    <text:p><text:s text:c="4"/>if a: <text:s/>b<text:hidden-text>not</text:hidden-text></text:p>
    <text:p><text:ruby><text:ruby-base>漢</text:ruby-base><text:ruby-text>かん</text:ruby-text></text:ruby></text:p>"""
    assert text_of(tmp_path / "a.odt", odt(body)) == "    if a:  b\n\n漢"


def test_open_document_is_read_without_the_descriptions_of_images(tmp_path):
    # "one A catA black cat two", but the title of the document is text where it stands
    svg = 'xmlns:svg="urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0"'
    image = "<svg:title>A cat</svg:title><svg:desc>A black cat</svg:desc>"
    body = f"<text:p {svg}>one <text:span>{image}</text:span>two <text:title>Title</text:title></text:p>"
    assert text_of(tmp_path / "a.odt", odt(body)) == "one two Title"


def test_a_number_of_blanks_is_bounded(tmp_path):
    text = text_of(tmp_path / "a.odt", odt('<text:p>a<text:s text:c="9999999999"/>b</text:p>'))
    assert text == "a" + " " * documents.MOST_BLANKS + "b"


def chapter(text):
    return f'<?xml version="1.0" encoding="utf-8"?><html><head><title/><script src="x"/></head><p>{text}</p></html>'


CHAPTERS = [
    ("cover.xhtml", chapter('<img src="cover.png"/>'), ""),
    ("toc.xhtml", chapter("Contents"), 'properties="nav"'),
    ("z.xhtml", chapter("First é"), ""),
    ("a%20b.xhtml", chapter("Second é").replace("utf-8", "utf-16").encode("utf-16"), ""),
]


def test_an_epub_is_its_chapters_in_the_order_of_reading(tmp_path):
    fonts = '<e><CipherReference URI="OEBPS/font.otf"/></e>'
    book = epub(CHAPTERS, {"META-INF/encryption.xml": fonts})  # a publisher may scramble fonts alone
    assert text_of(tmp_path / "a.epub", book) == "First é\n\nSecond é"


def test_a_pdf_and_its_pages_without_text(tmp_path, capsys):
    pytest.importorskip("pypdf")
    path = tmp_path / "a.pdf"
    for _ in range(2):
        assert text_of(path, pdf(["A bright", "café day", None, None])).split() == ["A", "bright", "café", "day"]
    want = f"left out: 2 of the 4 pages of {path}, which have no text: read images with OCR first"
    assert capsys.readouterr().out.count(want) == 2  # once a corpus
    text = Files([path])
    assert len([list(text.fragments()) for _ in range(3)]) == 3 and capsys.readouterr().out.count("left out") == 1


def test_the_images_of_a_pdf_are_not_kept(tmp_path):
    # pypdf keeps what it has met: 100 pages with an image of 2 MB took 250 MB
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf(["a page"] * 40, image="x" * 500_000))
    tracemalloc.start()
    try:
        assert text_of(tmp_path / "a.pdf") == "a page\n" * 40
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_a_document_without_text_is_named(tmp_path, capsys):
    (tmp_path / "a.html").write_text("<html><nav>menu</nav></html>")
    assert list(Files([tmp_path / "a.html"]).fragments()) == []
    assert f"left out: {tmp_path / 'a.html'}, which has no text" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "raw"),
    [("a.txt.gz", gzip.compress(b"", mtime=0)), ("a.txt", b" \n\n" * 2000), ("a.csv", b"text\n"), ("a.json", b"[]")],
)
def test_a_text_or_table_without_a_document_is_named_too(tmp_path, capsys, name, raw):
    # only Word, PDF and the like were
    (tmp_path / name).write_bytes(raw)
    assert list(Files([tmp_path / name], paragraphs=True).fragments()) == []
    assert f"left out: {tmp_path / name}, which has no text" in capsys.readouterr().out


def encrypted(user, owner):
    pypdf = pytest.importorskip("pypdf")
    writer, raw = pypdf.PdfWriter(clone_from=io.BytesIO(pdf(["secret"]))), io.BytesIO()
    writer.encrypt(user, owner, algorithm="RC4-128")
    writer.write(raw)
    return raw.getvalue()


def test_a_pdf_that_only_forbids_copying_is_read_as_viewers_do(tmp_path):
    assert text_of(tmp_path / "a.pdf", encrypted("", "owner")).strip() == "secret"


def tar(text):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        name = tarfile.TarInfo("a.txt")
        name.size = len(text)
        archive.addfile(name, io.BytesIO(text.encode()))
    return raw.getvalue()


REFUSED = [
    ("a.pdf", lambda: encrypted("user", "owner"), "has a password: save it without one"),
    ("a.pdf", lambda: pytest.importorskip("pypdf") and pdf(["a"])[:200], "cannot read .*it is damaged"),
    ("a.docx", lambda: docx(["a"])[:200], "cannot read .*it is damaged, or its suffix is wrong"),
    ("a.docx", lambda: docx("<w:p>"), "cannot read .*mismatched tag"),
    ("a.docx", lambda: docx(["a"]).replace(b"\x01\x02\x14\x03\x14\0\0", b"\x01\x02\x14\x03\x14\0\1"), "has a password"),
    (
        "a.docx",
        lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600),
        "before 2007, or one with a password, no text",
    ),
    ("a.doc", lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "an Office file .*: save it as .docx"),
    ("a.mhtml", lambda: b"From: <Saved by Blink>\r\nSubject: a\r\n", "save it as 'Webpage, HTML only'"),
    ("a.txt", lambda: b"MIME-Version: 1.0\r\nContent-Type: multipart/related;\r\n", r"in one file \(MHTML\)"),
    ("a.rtf", lambda: rb"{\rtf1 text}", r"is rich text \(RTF\), no text: save it as .docx"),
    ("a.txt", lambda: b"\x89PNG\r\n\x1a\n" + bytes(99), "is an image, no text: remove it"),
    ("a.txt", lambda: b"\x1f\x8b\x08" + bytes(99), "is compressed by gzip, no text: let its name end in .gz"),
    ("a.md", lambda: zipped(xl__workbook_xml="<a/>"), "is an Excel workbook, no text: save its sheets as .csv"),
    ("a.pptx", lambda: zipped(ppt__presentation_xml="<a/>"), "is a PowerPoint file, no text: save it as .pdf"),
    ("a.ods", lambda: zipped(mimetype="x.spreadsheet", content_xml="<a/>"), "OpenDocument table or presentation"),
    ("a.txt", lambda: zipped(a_txt="text"), "is a zip archive: unpack it and name the folder"),
    ("a.txt", lambda: tar("text"), r"is an archive \(tar\), no text: unpack it"),  # its headers were text
    ("a.txt.gz", lambda: gzip.compress(tar("text"), mtime=0), "is an archive"),
    ("a.epub", lambda: zipped(**{"META-INF__container_xml": "<a/>"}), "names no list of chapters"),
    (
        "a.epub",
        lambda: epub(CHAPTERS, {"META-INF/encryption.xml": '<e><CipherReference URI="OEBPS/a%20b.xhtml"/></e>'}),
        "is copy-protected: take one without DRM",
    ),
    ("a.csv", lambda: b"<!doctype html><p>404", "is HTML, whatever its suffix says: rename or remove it"),
    ("a.jsonl", lambda: pdf(["a"]), "is a PDF, whatever its suffix says"),
    ("a.html", lambda: b"<meta charset='klingon'><p>a", "its encoding is 'klingon', which is unknown"),
    ("a.html", lambda: b"<p>caf\xe9", "is not UTF-8 text: .* add --encoding=cp1252"),
    ("a.html", lambda: b"<meta charset=utf-8><p>caf\xe9", "is not UTF-8 text"),
]


@pytest.mark.parametrize(("name", "raw", "sentence"), REFUSED)
def test_what_cannot_be_read_is_called_what_it_is(tmp_path, name, raw, sentence):
    with pytest.raises(UserError, match=sentence) as refused:
        text_of(tmp_path / name, raw())
    if "charset" not in str(raw()) and b"<p>" not in raw():
        assert "UTF-8" not in str(refused.value)  # it was the advice for a .docx


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (PAGE.encode(), "HTML"),
        (pdf(["A head- line"]), "a PDF"),
        (docx(["A head- line"]), "a zip file, as those of Word"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a", "a.doc"])
def test_the_source_of_a_document_is_no_text_whatever_its_name(tmp_path, capsys, name, raw, what):
    if what == "a PDF":
        pytest.importorskip("pypdf")
    assert text_of(tmp_path / name, raw).startswith("A head- line")
    assert f"reading {tmp_path / name} as {what}" in capsys.readouterr().out


def test_text_about_html_and_pdf_stays_text(tmp_path):
    for text in ("The tag <html> begins a page", "A %PDF- is a PDF", "<htmlish>", "# <!doctype html>\n"):
        assert text_of(tmp_path / "a.txt", text.encode()) == text


def test_comments_before_a_page_or_a_text_are_passed_over_at_once(tmp_path):
    # a text that began with 30 comments took minutes, and one with 40 days
    for end, want in (("<html><p>text", "text"), ("# text", 60 * "<!-- a remark -->\n" + "# text")):
        assert text_of(tmp_path / "a.md", (60 * "<!-- a remark -->\n" + end).encode()) == want


def test_a_pdf_without_pypdf_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(UserError, match=r"cannot read .*a\.pdf without the package pypdf: pip install pypdf"):
        text_of(tmp_path / "a.pdf", pdf(["a"]))


def test_a_document_is_taken_apart_once(tmp_path, monkeypatch):
    # the text of a PDF takes long to find, and a preparation reads each file up to four times
    calls = []
    monkeypatch.setattr(documents, "html_text", lambda *_: calls.append(1) or iter(["one\n\n", "two"]))
    (tmp_path / "a.html").write_text("<html>")
    (tmp_path / "b.html").write_text("<html>")
    text = Files([tmp_path], paragraphs=True, skip_unreadable=True)
    text.check()
    for _ in range(2):
        pieces = "".join(text + "|" * last for text, last in text.fragments())
        assert pieces == "one|two|one|two|"
    assert len(calls) == 2


def test_entities_do_not_grow_without_end(tmp_path):
    # "a billion laughs": expat stops them
    laughs = "".join(f'<!ENTITY l{n + 1} "{f"&l{n};" * 10}">' for n in range(10))
    xml = f'<!DOCTYPE w:document [<!ENTITY l0 "ha">{laughs}]><w:document {W}><w:t>&l10;</w:t></w:document>'
    with pytest.raises(UserError, match=r"cannot read .*limit on input amplification"):
        text_of(tmp_path / "a.docx", zip_of({"word/document.xml": xml}))
    outside = f'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><w:document {W}><w:t>&x;</w:t></w:document>'
    with pytest.raises(UserError, match=r"cannot read .*undefined entity"):
        text_of(tmp_path / "a.docx", zip_of({"word/document.xml": outside}))


def test_documents_name_their_readers(tmp_path, monkeypatch):
    # a preparation that is continued must find the same text; our own readers could be others since a `git pull`
    before = documents.versions()
    assert re.fullmatch(r"readers \w{8} Python 3\.\S+( pypdf \S+)?", " ".join(before))
    (tmp_path / "tables.py").write_text(documents.READERS[-1].read_text() + "# changed\n")
    monkeypatch.setattr(documents, "READERS", [*documents.READERS[:-1], tmp_path / "tables.py"])
    assert documents.versions()[0] != before[0] and documents.versions()[1:] == before[1:]
