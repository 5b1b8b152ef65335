"""The bytes of a file as text: unpacked, in the right encoding; pandoc reads documents, pypdf PDF, `email` mail."""

import codecs
import email
import email.policy
import io
import logging
import lzma
import pathlib
import re
import subprocess
import zipfile
from collections.abc import Callable
from typing import BinaryIO

from fusedgpt.errors import UserError

CHUNK = 2**18  # bytes or characters to read at a time: preparing 200 MB takes 5 % longer with 2**20
CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}  # pyarrow's names
PACKED = (*CODECS, ".xz", ".zip")
# as browsers read these names: only the second has the quotation marks that texts of the first have
READ_AS = {"iso8859-1": "cp1252", "ascii": "cp1252", "gb2312": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949"}
GUESSED = ["cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp874"]
GUESSED += ["gb18030", "big5", "cp932", "euc_jp", "cp949"]
CLOSE = 0.1  # if charset-normalizer's marks for two encodings are closer, neither is sure
MOST_SECONDS, MOST_MEMORY = 120, "2g"  # of pandoc for one document


def unpacked(path: pathlib.Path) -> BinaryIO:
    """The unpacked content of a file, to be closed."""
    suffix = path.suffix.lower()
    if suffix in CODECS:
        import pyarrow  # it notices if the file was cut short, and takes no name that is not UTF-8

        return pyarrow.input_stream(open(path, "rb"), CODECS[suffix])
    if suffix == ".xz":
        return lzma.open(path)
    if suffix != ".zip":
        return open(path, "rb")
    with zipfile.ZipFile(path) as archive:
        return archive.open(name_in_zip(path))  # which outlives the archive


def name_in_zip(path: pathlib.Path) -> str:
    """The name of the only file in a .zip. Raises UserError if there are more."""
    with zipfile.ZipFile(path) as archive:
        if len(names := [each for each in archive.namelist() if not each.endswith("/")]) != 1:
            raise UserError(f"{path} has {len(names)} files: unpack it and name the folder")
    return names[0]


def encoding_of(path: pathlib.Path, given: str, say: Callable[[str], None]) -> str:
    """The encoding of a text: UTF-8, or `given`, or what charset-normalizer finds, of which `say` is told.

    given: NAME, or FILE:NAME for files whose names the pattern FILE matches; several have commas between them.
    Raises UserError if the file is no text, is UTF-8 but for some bytes, or if no encoding is sure.
    """
    decoder, at, bad, sure = codecs.getincrementaldecoder("utf-8")(), 0, "", False
    with unpacked(path) as file:
        head = raw = file.read(CHUNK)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        try:
            while raw:
                decoder.decode(raw)
                sure = sure or not raw.isascii()  # it has letters of UTF-8
                at, raw = at + len(raw), file.read(CHUNK)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            bad = f"byte {at + len(raw) - len(error.object) + error.start:,} ({error.reason})"
    zeros = b"\0" in head[:4096]
    if not (bad or zeros):
        return "utf-8-sig"  # with a byte order mark or without
    text = (raw or head).decode(errors="replace")
    valid, lost = len(re.findall(r"[^\x00-\x7f\ufffd]", text)), text.count("\N{REPLACEMENT CHARACTER}")
    if sure or valid > lost or head.startswith(codecs.BOM_UTF8):
        raise UserError(f"{path} is UTF-8 but for {bad or 'zero bytes'}: mend it")  # whatever it is called
    for pattern, _, name in (each.rpartition(":") for each in given.split(",")):
        if name and (not pattern or path.match(pattern)):
            name = READ_AS.get(codecs.lookup(name).name, name)
            say(f"reading {path} as {name}, because it is not UTF-8")
            return name
    if zeros:
        raise UserError(f"{path} is no text: it has zero bytes. Remove it, or say --encoding, as in utf-16-le")
    import charset_normalizer  # after UTF-8, which most texts are

    end = raw.rfind(b"\n") if len(raw) == CHUNK else None  # of its last whole line: a character may be cut in two
    found = list(charset_normalizer.from_bytes(raw[:end] or head, cp_isolation=GUESSED))
    likely = [e for e in found if e.chaos < found[0].chaos + CLOSE and e.coherence > found[0].coherence - CLOSE]
    names = ["cp1252"] if any("cp1252" in e.could_be_from_charset for e in likely) else [e.encoding for e in likely]
    if len(names) != 1:
        raise UserError(f"{path} is not UTF-8 ({bad}), nor surely anything else: say --encoding=NAME, or convert it")
    say(f"reading {path} as {names[0]}, by its letters: say --encoding=NAME if it is another")
    return names[0]


def plain(raw: bytes, format: str) -> str:
    """The text of a document in a `format` of pandoc's. Raises ValueError, TimeoutExpired if pandoc fails."""
    import pypandoc

    limits = ["+RTS", f"-M{MOST_MEMORY}", "-RTS", "--sandbox"]  # in a sandbox, a document names no other files
    command = [pypandoc.get_pandoc_path(), *limits, f"--from={format}", "--to=plain", "--wrap=none"]
    done = subprocess.run(command, input=raw, capture_output=True, check=False, timeout=MOST_SECONDS)
    if done.returncode:
        raise ValueError(f"pandoc says: {done.stderr.decode(errors='replace'):.200}")
    return done.stdout.decode()


def pdf(raw: bytes) -> str:
    """The text of the pages of a PDF. pypdf raises an error for one that has a password."""
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it warns of each small fault of a file
    reader, texts = pypdf.PdfReader(io.BytesIO(raw)), []
    for page in reader.pages:
        texts.append(page.extract_text().strip())
        reader.resolved_objects.clear()  # it keeps each image that was met
    if not any(texts):
        raise ValueError("its pages have no text: read them with OCR first")
    return "".join(text + "\n" for text in texts if text)


def mail(raw: bytes) -> str:
    """The text of a mail without headers and attachments."""
    message = email.message_from_bytes(raw, policy=email.policy.default)
    if (body := message.get_body(("plain", "html"))) is None:
        return ""
    raw, name = body.get_payload(decode=True), body.get_content_charset("ascii")
    try:
        text = raw.decode("utf-8" if (name := codecs.lookup(name).name) == "ascii" else READ_AS.get(name, name))
    except (LookupError, ValueError):  # its charset is unknown, as unknown-8bit, or another than it says
        text = raw.decode("cp1252", "replace")
    return plain(text.encode(), "html") if body.get_content_subtype() == "html" else text
