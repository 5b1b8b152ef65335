"""The text of documents as people have them: HTML, Word, OpenDocument, EPUB and PDF.

HTML and XML are parsed as a stream by the standard library, so memory does not grow with a document. pypdf reads PDF.
"""

import codecs
import collections
import contextlib
import hashlib
import html.parser
import importlib.metadata
import logging
import pathlib
import platform
import posixpath
import re
import urllib.parse
import xml.etree.ElementTree
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from fusedgpt.errors import UserError

READERS = [pathlib.Path(__file__).with_name(f"{name}.py") for name in ("corpus", "decoding", "documents", "tables")]
# by content: the suffixes of such files, and what they are
SUFFIXES = {".html": (".html", ".htm", ".xhtml"), ".zip": (".docx", ".odt", ".epub"), ".pdf": (".pdf",)}
NAMES = {".html": "HTML", ".zip": "a zip file, as those of Word, OpenDocument and EPUB are", ".pdf": "a PDF"}
KINDS = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
CHUNK = 2**20  # bytes of XML to parse at a time
LONGEST_TAG = 2**24  # most characters of a tag or a comment, which the parsers keep in memory
MOST_OPEN = 2**16  # most elements that are open at once: the parser keeps their names
MOST_BLANKS = 1000  # of one <text:s>, so that a small file does not become gigabytes
LONGEST_CONTENTS = 2**24  # most bytes of an EPUB's list of chapters

# each comment is atomic (?>): in a text of 30 comments, trying where else they might end would take minutes
HTML = re.compile(rb"(\xef\xbb\xbf)?\s*(<\?xml[^>]*>\s*)?(?><!--.*?-->\s*)*<(!doctype\s+html|html)[\s>]", re.I | re.S)
CHARSET = re.compile(rb"<(?:meta[^>]*?charset|\?xml[^>]*?encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.S)
# what browsers read under these names: pages have the quotation marks or the characters that only the second has
READ_AS = {"iso8859-1": "cp1252", "ascii": "cp1252", "iso8859-9": "cp1254", "gb2312": "gbk", "shift_jis": "cp932"}
READ_AS |= {"euc_kr": "cp949"}
READ_AS |= dict.fromkeys(("utf-16", "utf-16-le", "utf-16-be"), "utf-8")  # its own letters CHARSET would not have found
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
MHTML = re.compile(rb"From: .?Saved by|MIME-Version:.{0,999}multipart/related", re.I | re.S)
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
    if MHTML.match(head):
        return "is a page with its images in one file (MHTML), no text: save it as 'Webpage, HTML only'"
    if head[257:262] == b"ustar":  # the headers in it are valid UTF-8
        return "is an archive (tar), no text: unpack it and name the folder"
    found = next(((what, remedy) for begin, what, remedy in FOREIGN if head.startswith(begin)), None)
    return f"is {found[0]}, no text: {found[1]}" if found else None


def versions() -> list[str]:
    """The versions of what reads files: another may find another text in them."""
    ours = hashlib.sha256(b"\0".join(path.read_bytes() for path in READERS))
    found = [f"readers {ours.hexdigest()[:8]}", f"Python {platform.python_version()}"]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found.append(f"pypdf {importlib.metadata.version('pypdf')}")
    return found


def charset(head: bytes) -> str | None:
    """The encoding that an HTML or XML file declares, as browsers understand it."""
    if not (found := CHARSET.search(COMMENT.sub(b"", head))):
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
        """Add `text` after the gap that is due. verbatim: keep its blanks as they are."""
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
    LEFT_OUT += " dialog video audio canvas annotation annotation-xml rt rp"
    VOID = "area base br col embed hr img input link meta param source track wbr"
    PARAGRAPHS = "p h1 h2 h3 h4 h5 h6 blockquote pre ul ol dl table figure hr article section main header footer aside"
    LINES = "div li dt dd tr br address figcaption caption form fieldset details summary dialog body"
    BETWEEN = dict.fromkeys(PARAGRAPHS.split(), "\n\n") | dict.fromkeys(LINES.split(), "\n")
    BETWEEN |= {"td": "\t", "th": "\t"}
    LEFT_OUT = frozenset(LEFT_OUT.split())
    NAVIGATION = ("div", "section", "ul", "ol", "table")  # with that role; others, as p, may have no end tag
    # The elements that are counted. Links, spans and the like close nothing but themselves. The body closes too late.
    COUNTED = LEFT_OUT.union(BETWEEN, ["ruby"]).difference(VOID.split(), ["body"])
    INLINE = "a abbr b bdi cite code em i label small span strong sub sup u"  # they may be hidden
    INLINE = frozenset(INLINE.split())
    HIDDEN = re.compile(r"(^|[;\s])(display\s*:\s*none|visibility\s*:\s*hidden)\b", re.I)  # in a style
    ENDLESS = ("p", "li", "dt", "dd", "tr", "td", "th", "rt", "rp")  # HTML lets their end tags be missing
    LISTS = ("ul", "ol", "dl", "table")

    def __init__(self, text):
        super().__init__()
        self.text, self.open, self.unclosed = text, collections.Counter(), set()
        self.left_out, self.before = None, None  # the element, and what was open when it began, with itself

    def handle_starttag(self, tag, attrs):
        if self.left_out in self.ENDLESS and self._ends(tag):
            self.left_out = None
        if tag in self.COUNTED or tag in self.INLINE:
            self.open[tag] += 1
            if self.left_out is None and self._unseen(tag, dict(attrs)):
                self.left_out = tag
                self.before = {each: self.open[each] for each in self.open if each in self.COUNTED or each == tag}
        self.text.separate(self.BETWEEN.get(tag, ""))

    def _unseen(self, tag, attrs):
        if tag in self.LEFT_OUT:
            return tag != "dialog" or "open" not in attrs
        navigation = tag in self.NAVIGATION and attrs.get("role") == "navigation"
        return navigation or "hidden" in attrs or bool(self.HIDDEN.search(attrs.get("style") or ""))

    def _ends(self, tag):
        """Whether the start of `tag` ends what is left out, though that has no end tag."""
        if self.left_out == "p":
            return tag in self.BETWEEN and tag != "br"
        return tag == self.left_out and all(self.open[each] <= self.before.get(each, 0) for each in self.LISTS)

    def handle_endtag(self, tag):
        if self.open[tag]:
            self.open[tag] -= 1
        if self.left_out and self.open[tag] < self.before.get(tag, 0):
            self.unclosed |= {self.left_out} - {tag, *self.ENDLESS}
            self.left_out = None
        self.text.separate(self.BETWEEN.get(tag, ""))

    def handle_data(self, data):
        if self.left_out is None:
            self.text.add(data, verbatim=self.open["pre"] > 0)

    def close(self):
        super().close()
        self.unclosed |= {self.left_out} - {None, *self.ENDLESS}


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

    def __init__(self, inside, verbatim, left_out, hiding, after):
        self.inside, self.verbatim, self.left_out, self.hiding, self.after = inside, verbatim, left_out, hiding, after
        self.text, self.open, self.wanted, self.events = _Text(), [], 0, 0
        self.hidden = 0  # how many elements are open around what is left out, with itself; 0 if all is read

    def start(self, tag, attrs):
        """Called by XMLParser for a start tag, as `data` and `end` are for text and end tags. Raises ValueError."""
        full, tag = tag, tag.rpartition("}")[2]
        self.open.append(tag)
        self.events, self.wanted = self.events + 1, self.wanted + (tag in self.inside)
        if len(self.open) > MOST_OPEN:
            raise ValueError(f"more than {MOST_OPEN:,} elements are open at once")
        if tag in self.hiding:
            around, values = self.hiding[tag]
            value = next((value for name, value in attrs.items() if name.endswith("}val")), "true")
            if self.open[-1 - len(around) : -1] == around and re.fullmatch(values, value):
                self.hidden = min(self.hidden or MOST_OPEN, len(self.open) - len(around))
        if not self.hidden and (tag in self.left_out or full in self.left_out):
            self.hidden = len(self.open)
        if self.hidden:
            return
        if tag == "noBreakHyphen":
            self.text.add("\N{NON-BREAKING HYPHEN}", verbatim=True)
        elif tag == "s" and self.wanted:  # OpenDocument's blanks that count
            count = next((value for name, value in attrs.items() if name.endswith("}c")), "1")
            self.text.add(" " * min(int(count), MOST_BLANKS), verbatim=True)
        else:
            self.text.separate(OFFICE_GAPS.get(tag, ""))

    def data(self, text):
        self.events += 1
        if self.wanted and not self.hidden:
            self.text.add(text, self.verbatim)

    def end(self, tag):
        tag = self.open.pop()
        self.events, self.wanted = self.events + 1, self.wanted - (tag in self.inside)
        if self.hidden > len(self.open):
            self.hidden = 0
        if not self.hidden and (gap := self.after.get(tag)):
            if gap in ("\t", "\n"):  # the end of a cell or a row counts more than that of the paragraph in it
                self.text.gap = gap
            self.text.separate(gap)

    def close(self):
        return self


TABLES = {"table": "\n\n", "table-row": "\n", "table-cell": "\t", "tbl": "\n\n", "tr": "\n", "tc": "\t"}
OFFICE_GAPS = {"tab": "\t", "ptab": "\t", "br": "\n", "cr": "\n", "line-break": "\n"}
# w:t has all text of a Word file. pPr holds tab stops, a Fallback what was said before it, moveFrom what was moved, and
# rt the reading of a ruby. Within the elements that it lists, a tag of `hiding` with this value hides the first.
WORD = dict(
    inside={"t"},
    verbatim=True,
    left_out={"pPr", "Fallback", "moveFrom", "rt"},
    hiding={
        "vanish": (["r", "rPr"], "true|1|on"),
        "pStyle": (["p", "pPr"], r"TOC\d"),
        "docPartGallery": (["sdt", "sdtPr", "docPartObj"], "Table of Contents"),
    },
    after={"p": "\n\n"} | TABLES,
)
SVG = "{urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0}"
# deleted text, comments, notes and what an image shows stand amid OpenDocument's paragraphs
OPEN_DOCUMENT = dict(
    inside={"p", "h"},
    verbatim=False,
    left_out={"tracked-changes", "annotation", "note", "table-of-content", "hidden-text", "ruby-text"}
    | {f"{SVG}title", f"{SVG}desc"},
    hiding={},
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
