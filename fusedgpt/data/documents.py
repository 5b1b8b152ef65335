"""The text of documents as people have them: HTML, Word, OpenDocument, EPUB and PDF.

HTML and XML are parsed as a stream by the standard library, so memory does not grow with a document. pypdf reads PDF.
"""

import codecs
import collections
import contextlib
import html.parser
import importlib.metadata
import logging
import platform
import posixpath
import re
import urllib.parse
import xml.etree.ElementTree
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from fusedgpt.errors import UserError

# by content: the suffixes of such files, and what they are
SUFFIXES = {".html": (".html", ".htm", ".xhtml"), ".zip": (".docx", ".odt", ".epub"), ".pdf": (".pdf",)}
NAMES = {".html": "HTML", ".zip": "a zip file, as those of Word, OpenDocument and EPUB are", ".pdf": "a PDF"}
KINDS = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
CHUNK = 2**20  # bytes of XML to parse at a time
LONGEST_TAG = 2**24  # most characters of a tag or a comment, which the parsers keep in memory
MOST_OPEN = 2**16  # most elements that are open at once: the parser keeps their names
LONGEST_CONTENTS = 2**24  # most bytes of an EPUB's list of chapters

# each comment is atomic (?>): in a text of 30 comments, trying where else they might end would take minutes
HTML = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(?><!--.*?-->\s*)*<(!doctype\s+html|html)[\s>]", re.I | re.S)
CHARSET = re.compile(rb"<(?:meta|\?xml)[^>]*?(?:charset|encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
# what browsers read under these names: pages have the quotation marks or the characters that only the second has
READ_AS = {"iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "gb2312": "gbk", "shift_jis": "cp932"}
READ_AS |= {"euc_kr": "cp949", "utf-16": "utf-8"}  # UTF-16's own letters would not have been found by CHARSET
# how files begin that are no text, what they are, and what to do
FOREIGN = (
    (b"\xd0\xcf\x11\xe0", "an Office file of before 2007, or one with a password", "save it as .docx, without one"),
    (b"{\\rtf", "rich text (RTF)", "save it as .docx"),
    (b"\x89PNG", "an image", "remove it"),
    (b"\xff\xd8\xff", "an image", "remove it"),
    (b"GIF8", "an image", "remove it"),
    (b"\x1f\x8b", "compressed by gzip", "let its name end in .gz"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "let its name end in .zst"),
    (b"BZh", "compressed by bzip2", "unpack it"),
    (b"\xfd7zXZ", "compressed by xz", "unpack it"),
    (b"7z\xbc\xaf", "an archive", "unpack it and name the folder"),
    (b"Rar!", "an archive", "unpack it and name the folder"),
    (b"SQLite format 3", "a database", "export its texts as .csv"),
)
GAPS = ("", " ", "\t", "\n", "\n\n")  # between two texts, the strongest that their tags ask for


def kind_of_content(head: bytes) -> str | None:
    """The kind that the first bytes of a file say it is: .pdf, .html or .zip. None means text, or something else."""
    if head.startswith(b"PK\x03\x04"):
        return ".zip"
    if head.lstrip(b"\xef\xbb\xbf \r\n\t\0").startswith(b"%PDF-"):
        return ".pdf"
    return ".html" if HTML.match(head) else None


def foreign(head: bytes) -> str | None:
    """What a file that begins with `head` is instead of text, and what to do. None if it may be text."""
    found = next(((what, remedy) for begin, what, remedy in FOREIGN if head.startswith(begin)), None)
    return f"is {found[0]}, no text: {found[1]}" if found else None


def versions(kinds: Iterable[str | None]) -> list[str]:
    """The versions of what reads documents of `kinds`: another may find another text in them."""
    kinds = set(kinds)
    found = [f"Python {platform.python_version()}"] if kinds & set(KINDS) else []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found += [f"pypdf {importlib.metadata.version('pypdf')}"] if ".pdf" in kinds else []
    return found


def charset(head: bytes) -> str | None:
    """The encoding that an HTML or XML file declares, as browsers understand it."""
    if not (found := CHARSET.search(head)):
        return None
    name = found[1].decode()
    with contextlib.suppress(LookupError):  # decoding refuses it
        return READ_AS.get(codecs.lookup(name).name, name)
    return name


class _Text:
    """Text that parsers add to: blanks are joined as browsers do, and gaps stand between blocks."""

    def __init__(self):
        self.parts, self.gap, self.begun = [], "", False

    def separate(self, gap):
        """Let at least `gap` stand before the next text."""
        self.gap = max(self.gap, gap, key=GAPS.index)

    def add(self, text, verbatim=False):
        if not verbatim:
            words = re.sub(r"[ \t\r\n\f]+", " ", text)
            if words.startswith(" "):
                self.separate(" ")
            text = words.strip(" ")
        if text:
            self.parts += [self.gap if self.begun else "", text]
            self.begun, self.gap = True, ""
        if not verbatim and text and words.endswith(" "):
            self.separate(" ")

    def take(self):
        """The text that was added since the last call."""
        parts, self.parts = self.parts, []
        return "".join(parts)


class _Html(html.parser.HTMLParser):
    """The text that a reader of a page sees, without scripts, styles, navigation and forms.

    What is left out ends with its element or, because end tags are forgotten, with one that was opened before it.
    `unclosed` has the elements of the second sort.
    """

    LEFT_OUT = "script style template noscript title nav svg iframe object select textarea button"
    VOID = "area base br col embed hr img input link meta param source track wbr"
    PARAGRAPHS = "p h1 h2 h3 h4 h5 h6 blockquote pre ul ol dl table figure hr article section main header footer aside"
    LINES = "div li dt dd tr br address figcaption caption form fieldset details summary body"
    BETWEEN = dict.fromkeys(PARAGRAPHS.split(), "\n\n") | dict.fromkeys(LINES.split(), "\n")
    BETWEEN |= {"td": "\t", "th": "\t"}
    LEFT_OUT = frozenset(LEFT_OUT.split())
    NAVIGATION = ("div", "section", "ul", "ol", "table")  # with that role; others, as p, may have no end tag
    # The elements that are counted. Links, spans and the like close nothing but themselves. The body closes too late.
    COUNTED = LEFT_OUT.union(BETWEEN).difference(VOID.split(), ["body"])

    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.unclosed = text, collections.Counter(), set()
        self.left_out, self.before = None, None  # the element, and what was open when it began, with itself

    def handle_starttag(self, tag, attrs):
        if tag in self.COUNTED:
            self.open[tag] += 1
        navigation = tag in self.NAVIGATION and ("role", "navigation") in attrs
        if self.left_out is None and (tag in self.LEFT_OUT or navigation):
            self.left_out, self.before = tag, self.open.copy()
        self.text.separate(self.BETWEEN.get(tag, ""))

    def handle_endtag(self, tag):
        if self.open[tag]:
            self.open[tag] -= 1
        if self.left_out and self.open[tag] < self.before[tag]:
            self.unclosed |= {self.left_out} - {tag}
            self.left_out = None
        self.text.separate(self.BETWEEN.get(tag, ""))

    def handle_data(self, data):
        if self.left_out is None:
            self.text.add(data, verbatim=self.open["pre"] > 0)

    def close(self):
        super().close()
        self.unclosed |= {self.left_out} - {None}


def html_text(path: str, blocks: Iterable[str], say: Callable[[str], None], text: _Text | None = None) -> Iterator[str]:
    """The text of an HTML page in fragments. Tells `say` if an element that is left out has no end.

    path: the name for messages. text: that of the pages before, if there are any.
    """
    parser = _Html(text or _Text())
    for block in blocks:
        parser.feed(block)
        if len(parser.rawdata) > LONGEST_TAG:
            raise ValueError(f"a tag, a script or a comment is longer than {LONGEST_TAG:,} characters")
        yield parser.text.take()
    parser.close()
    yield parser.text.take()
    for tag in sorted(parser.unclosed):
        say(f"left out: a part of {path}, which has a <{tag}> without its </{tag}>: look whether text is missing")


class _Office:
    """The text of Word's or OpenDocument's XML. Elements are known by their local names."""

    def __init__(self, inside, verbatim, left_out, after):
        self.inside, self.verbatim, self.left_out, self.after = inside, verbatim, left_out, after
        self.text, self.open, self.wanted, self.unwanted, self.events = _Text(), 0, 0, 0, 0

    def start(self, tag, attrs):
        tag = tag.rpartition("}")[2]
        self.open, self.events = self.open + 1, self.events + 1
        self.wanted, self.unwanted = self.wanted + (tag in self.inside), self.unwanted + (tag in self.left_out)
        if self.open > MOST_OPEN:
            raise ValueError(f"more than {MOST_OPEN:,} elements are open at once")
        if not self.unwanted:
            self.text.separate({"tab": "\t", "br": "\n", "cr": "\n", "line-break": "\n", "s": " "}.get(tag, ""))

    def data(self, text):
        self.events += 1
        if self.wanted and not self.unwanted:
            self.text.add(text, self.verbatim)

    def end(self, tag):
        tag = tag.rpartition("}")[2]
        self.open, self.events = self.open - 1, self.events + 1
        self.wanted, self.unwanted = self.wanted - (tag in self.inside), self.unwanted - (tag in self.left_out)
        if not self.unwanted and (gap := self.after.get(tag)):
            if gap in ("\t", "\n"):  # the end of a cell or a row counts more than that of the paragraph in it
                self.text.gap = gap
            self.text.separate(gap)

    def close(self):
        return self


TABLES = {"table": "\n\n", "table-row": "\n", "table-cell": "\t", "tbl": "\n\n", "tr": "\n", "tc": "\t"}
# w:t has all text of a Word file. pPr holds tab stops, a Fallback what was said before it, and moveFrom what was moved
WORD = dict(inside={"t"}, verbatim=True, left_out={"pPr", "Fallback", "moveFrom"}, after={"p": "\n\n"} | TABLES)
# deleted text, comments and notes stand amid OpenDocument's paragraphs
OPEN_DOCUMENT = dict(
    inside={"p", "h"},
    verbatim=False,
    left_out={"tracked-changes", "annotation", "note"},
    after={"p": "\n\n", "h": "\n\n"} | TABLES,
)


def _office_text(file, format):
    target = _Office(**format)
    parser = xml.etree.ElementTree.XMLParser(target=target)
    quiet = 0
    while chunk := file.read(CHUNK):
        before = target.events
        parser.feed(chunk)
        quiet = quiet + len(chunk) if target.events == before else 0
        if quiet > LONGEST_TAG:
            raise ValueError(f"a tag or a comment is longer than {LONGEST_TAG:,} bytes")
        yield target.text.take()
    parser.close()
    yield target.text.take()


def zip_text(path: str, file: BinaryIO, decoded: Callable, say: Callable[[str], None]) -> Iterator[str]:
    """The text of a .docx, .odt or .epub in fragments. `decoded` maps the chunks of a chapter to its text.

    path: the name for messages. say: as in html_text.
    Raises UserError if the file is another kind of zip, or is protected.
    """
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        if any(info.flag_bits & 1 for info in archive.infolist()):
            raise UserError(f"{path} has a password: save it without one")
        if word := next((name for name in sorted(names) if re.fullmatch(r"word/document\d*\.xml", name)), None):
            with archive.open(word) as content:
                yield from _office_text(content, WORD)
        elif "META-INF/container.xml" in names:
            yield from _epub_text(path, archive, decoded, say)
        elif "content.xml" in names and archive.open("mimetype").read(99).endswith(b"opendocument.text"):
            with archive.open("content.xml") as content:
                yield from _office_text(content, OPEN_DOCUMENT)
        else:
            raise UserError(f"{path} is {_other_zip(names)}")


def _other_zip(names):
    if "xl/workbook.xml" in names:
        return "an Excel workbook, no text: save its sheets as .csv"
    if "ppt/presentation.xml" in names:
        return "a PowerPoint file, no text: save it as .pdf"
    if "content.xml" in names:
        return "an OpenDocument table or presentation, no text: save it as .csv or .pdf"
    return "a zip archive: unpack it and name the folder"


def _epub_text(path, archive, decoded, say):
    container = _small_xml(archive, "META-INF/container.xml")
    package = next((each.get("full-path") for each in container.findall(".//{*}rootfile")), None)
    if package is None:
        raise ValueError("META-INF/container.xml names no list of chapters")
    content = _small_xml(archive, package)
    items = {item.get("id"): item for item in content.findall(".//{*}item")}
    protected = set()
    if "META-INF/encryption.xml" in archive.namelist():  # it may be of fonts alone
        references = _small_xml(archive, "META-INF/encryption.xml").findall(".//{*}CipherReference")
        protected = {urllib.parse.unquote(each.get("URI")) for each in references}
    text = _Text()
    for reference in content.findall(".//{*}itemref"):
        item = items[reference.get("idref")]
        if "nav" in (item.get("properties") or "").split():  # the table of contents
            continue
        within = urllib.parse.unquote(item.get("href"))
        name = posixpath.normpath(posixpath.join(posixpath.dirname(package), within))
        if name in protected:
            raise UserError(f"{path} is copy-protected: take one without DRM")
        text.separate("\n\n")
        with archive.open(name) as chapter:
            chunks = iter(lambda chapter=chapter: chapter.read(CHUNK), b"")
            yield from html_text(path, decoded(chunks), say, text)


def _small_xml(archive, name):
    with archive.open(name) as file:
        raw = file.read(LONGEST_CONTENTS + 1)
    if len(raw) > LONGEST_CONTENTS:
        raise ValueError(f"{name} is longer than {LONGEST_CONTENTS:,} bytes")
    return xml.etree.ElementTree.fromstring(raw)


def pdf_text(path: str, file: BinaryIO, say: Callable[[str], None]) -> Iterator[str]:
    """The text of a PDF, page by page. Tells `say` how many pages have none.

    path: the name for messages. Raises UserError if the file has a password.
    """
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of each small fault of a file
    try:
        reader = pypdf.PdfReader(file)
        if reader.is_encrypted and not reader.decrypt(""):
            raise UserError(f"{path} has a password: save it without one")
        pages, empty = len(reader.pages), 0
        for number in range(pages):
            text = reader.pages[number].extract_text().strip()
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")  # broken fonts give half pairs
            empty += not text
            yield text + "\n" if text else ""
            reader.resolved_objects.clear()  # it keeps each image that was met
    except pypdf.errors.DependencyError as error:
        raise UserError(f"cannot read {path} without the package cryptography: pip install cryptography") from error
    if empty:
        say(f"left out: {empty:,} of the {pages:,} pages of {path}, which have no text: read images with OCR first")
