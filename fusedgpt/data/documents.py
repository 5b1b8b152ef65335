"""The bytes of a file as text: unpacked, in the right encoding; pandoc reads documents, pypdf PDF, `email` mail."""

import codecs
import contextlib
import email
import email.message
import email.policy
import itertools
import logging
import lzma
import mailbox
import pathlib
import re
import subprocess
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

from fusedgpt.errors import UserError

CHUNK = 2**20  # bytes or characters to read at a time
BOMS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
BOMS |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}  # UTF-32's begins with UTF-16's
# as browsers read these names: only the second has the quotation marks that texts of the first have
READ_AS = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949"}
GUESSED = ["cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp874"]
GUESSED += ["gb18030", "big5", "cp932", "euc_jp", "cp949"]
CLOSE = 0.1  # if charset-normalizer's marks for two encodings are closer, neither is sure
DECLARED = re.compile(rb"<(?:meta[^>]*?charset|\?xml[^>]*?encoding)\s*=\s*[\"']?\s*([\w.:-]+)", re.I)
LARGEST = 2**28  # most bytes of a document
MOST_SECONDS, MOST_MEMORY = 120, "2g"  # of pandoc for one document


@contextlib.contextmanager
def unpacked(path: pathlib.Path) -> Iterator[BinaryIO]:
    """The unpacked content of a file."""
    with open(path, "rb") as file:
        match path.suffix.lower():
            case ".gz" | ".zst" | ".bz2" as suffix:
                import pyarrow  # it notices if the file was cut short

                names = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
                yield pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), names[suffix])
            case ".xz":
                with lzma.open(file) as content:
                    yield content
            case ".zip":
                with zipfile.ZipFile(file) as archive:
                    if len(names := [each for each in archive.namelist() if not each.endswith("/")]) != 1:
                        raise UserError(f"{path} has {len(names)} files: unpack it and name the folder")
                    with archive.open(names[0]) as content:
                        yield content
            case _:
                yield file


def encoding_of(path: pathlib.Path, given: str | None = None) -> tuple[str, str]:
    """The encoding of a text, and a note if it is neither UTF-8 nor what a byte order mark says.

    UTF-8 comes first, then what a web page declares, then `given`, then what charset-normalizer finds.
    Raises UserError if it is no text, or if nothing fits.
    """
    decoder, at = codecs.getincrementaldecoder("utf-8")(), 0
    with unpacked(path) as file:
        head = raw = file.read(CHUNK)
        if bom := next((encoding for mark, encoding in BOMS.items() if head.startswith(mark)), None):
            return bom, ""
        declared = DECLARED.search(head[:4096])
        name = (declared and declared[1].decode()) or given
        if b"\0" in head[:4096]:
            if not name:
                raise UserError(f"{path} is no text: it has zero bytes. Remove it, or say --encoding, as in utf-16-le")
            return name, f"reading {path} as {name}"
        try:
            while raw:
                decoder.decode(raw)
                at, raw = at + len(raw), file.read(CHUNK)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            bad = f"byte {at + len(raw) - len(error.object) + error.start:,} ({error.reason})"
        else:
            return "utf-8", ""
    text = (raw or head).decode(errors="replace")
    if len(re.findall(r"[^\x00-\x7f\ufffd]", text)) > text.count("\N{REPLACEMENT CHARACTER}"):  # whatever it is called
        raise UserError(f"{path} is UTF-8 but for {bad}: mend it, or leave the file out by --skip_unreadable=True")
    if name:
        name = READ_AS.get(codecs.lookup(name).name, name)
        return name, f"reading {path} as {name}, because it is not UTF-8"
    return _guessed(path, raw or head, bad)


def _guessed(path, raw, bad):
    import charset_normalizer  # after UTF-8, which most texts are

    found = list(charset_normalizer.from_bytes(raw, cp_isolation=GUESSED))
    likely = [e for e in found if e.chaos < found[0].chaos + CLOSE and e.coherence > found[0].coherence - CLOSE]
    names = [each.encoding for each in likely]
    if any("cp1252" in each.could_be_from_charset for each in likely):
        names = ["cp1252"]
    if len(names) != 1:
        raise UserError(f"{path} is not UTF-8 ({bad}), nor surely anything else: say --encoding=NAME, or convert it")
    return names[0], f"reading {path} as {names[0]}, by its letters: say --encoding=NAME if it is another"


def paragraphs(lines: Iterable[str]) -> Iterator[str]:
    """The paragraphs of a text. Empty lines, also of blanks alone, separate them."""
    for filled, paragraph in itertools.groupby(lines, lambda line: bool(line.strip())):
        if filled:
            yield "".join(paragraph).rstrip("\n")


def plain(raw: bytes, format: str, path: pathlib.Path) -> str:
    """The text of a document in a `format` that pandoc knows, without markup and line breaks of its own.

    raw: its bytes, UTF-8 if the format is of text. Raises UserError if pandoc refuses the document, TimeoutExpired if
    it takes over MOST_SECONDS.
    """
    import pypandoc

    limits = ["+RTS", f"-M{MOST_MEMORY}", "-RTS", "--sandbox"]  # in a sandbox, a document names no other files
    command = [pypandoc.get_pandoc_path(), *limits, f"--from={format}", "--to=plain", "--wrap=none"]
    done = subprocess.run(command, input=raw, capture_output=True, check=False, timeout=MOST_SECONDS)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[:200]
        raise UserError(f"{path} cannot be read by pandoc ({said}): it is damaged, protected, or its suffix is wrong")
    return done.stdout.decode()


def read_whole(file: BinaryIO, path: pathlib.Path) -> bytes:
    """The content of a document. Raises UserError if it is larger than LARGEST, as small packed files may become."""
    raw = file.read(LARGEST + 1)
    if len(raw) > LARGEST:
        raise UserError(f"{path} has more than {LARGEST:,} bytes: save its parts as files of their own")
    return raw


def pdf(file: BinaryIO, path: pathlib.Path, say: Callable[[str], None]) -> str:
    """The text of the pages of a PDF. Tells `say` how many have none. Raises UserError if the file has a password."""
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of each small fault of a file
    reader, texts = pypdf.PdfReader(file), []
    if reader.is_encrypted and not reader.decrypt(""):
        raise UserError(f"{path} has a password: save it without one")
    for page in reader.pages:
        texts.append(page.extract_text().strip())
        reader.resolved_objects.clear()  # it keeps each image that was met
    if empty := texts.count(""):
        say(f"{empty:,} of its {len(texts):,} pages have no text: read images with OCR first")
    return "".join(text + "\n" for text in texts if text)


def mail(raw: bytes | email.message.Message, path: pathlib.Path) -> str:
    """The text of a mail without headers and attachments."""
    message = email.message_from_bytes(bytes(raw), policy=email.policy.default)
    if (body := message.get_body(("plain", "html"))) is None:
        return ""
    text = body.get_content()
    return plain(text.encode(), "html", path) if body.get_content_subtype() == "html" else text


def mails(path: pathlib.Path) -> Iterator[str]:
    """The text of each mail of a mailbox, which must not be packed."""
    with contextlib.closing(mailbox.mbox(path, create=False)) as box:
        yield from (mail(each, path) for each in box)
