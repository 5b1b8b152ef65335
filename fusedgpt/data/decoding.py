"""The bytes of a file as text: unpacked, decoded, and cut into documents, a chunk at a time."""

import codecs
import contextlib
import gzip
import io
import itertools
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from fusedgpt.errors import UserError, first_line, shown

PACKED = (".gz", ".zst")
CHUNK = 2**20  # bytes of a file to read at a time
ZST_CHUNK = 2**7  # bytes of a .zst: 4 MiB at most when unpacked, because 4 bytes can become 2**17
HEAD = 2**12  # bytes at the beginning of a file that tell its kind and encoding
BOMS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"))
BOMS += ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))  # UTF-32's begins with UTF-16's


def unpacked(path: pathlib.Path, file: BinaryIO) -> Iterator[bytes]:
    """The unpacked bytes of a file, in chunks."""
    suffix = path.suffix.lower()
    if suffix == ".zst":
        yield from _unpacked_zst(file)
        return
    file = gzip.GzipFile(fileobj=file) if suffix == ".gz" else file
    while chunk := file.read(CHUNK):
        yield chunk


def _unpacked_zst(file):
    """The unpacked bytes of a .zst, frame by frame. zstandard's own readers do not notice a file that was cut short."""
    import zstandard

    frame, parts, size = None, [], 0
    while chunk := file.read(ZST_CHUNK):
        while chunk:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()  # zstd --long=31
            parts.append(frame.decompress(chunk))
            size += len(parts[-1])
            chunk, frame = frame.unused_data, None if frame.eof else frame
            if size >= CHUNK:
                raw = b"".join(parts)
                yield from (raw[at : at + CHUNK] for at in range(0, size, CHUNK))
                parts, size = [], 0
    if frame:
        raise EOFError("the file ends within a frame")
    yield b"".join(parts)


def peeked(chunks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """The first bytes of a file, and its chunks with these."""
    first = []
    chunks = iter(chunks)
    for chunk in chunks:
        first.append(chunk)
        if sum(map(len, first)) >= HEAD:
            break
    return b"".join(first)[:HEAD], itertools.chain(first, chunks)


@contextlib.contextmanager
def seekable(path: pathlib.Path, file: BinaryIO, chunks: Iterable[bytes]) -> Iterator[BinaryIO]:
    """A file that can be read in any order: `file` itself, or its unpacked chunks on the disk."""
    if path.suffix.lower() not in PACKED:
        yield file
        return
    with tempfile.TemporaryFile() as unpacked:
        unpacked.writelines(chunks)
        unpacked.seek(0)
        yield unpacked


def bom(head: bytes) -> str | None:
    """The encoding that a byte order mark at the beginning of a file says."""
    return next((encoding for bom, encoding in BOMS if head.startswith(bom)), None)


def _wide(head):
    """UTF-16 or UTF-32, if a text without a BOM has zero bytes where these have them, and nowhere else."""
    zeros = [head[n::4].count(0) for n in range(4)]
    even, odd = zeros[0] or zeros[2], zeros[1] or zeros[3]  # a blank or a line end has one in every script
    if bool(even) != bool(odd):
        return "utf-16-be" if even else "utf-16-le"
    if odd and not zeros[0] and zeros[3] == len(head[3::4]):
        return "utf-32-le"
    if even and not zeros[3] and zeros[0] == len(head[::4]):
        return "utf-32-be"
    return None


def decoded(path: pathlib.Path, chunks: Iterable[bytes], encoding: str | None = None) -> Iterator[str]:
    """The text of `chunks`: in the encoding that a BOM says, otherwise in `encoding`, otherwise in UTF-8.

    Raises UserError if it is not.
    """
    head, chunks = peeked(chunks)
    if not (encoding := bom(head) or encoding) and (meant := _wide(head)):  # valid UTF-8, but hardly meant
        name = meant[:6].upper()
        raise UserError(f"{path} is no UTF-8 text: if it is {name}, add --encoding={meant}, or remove its zero bytes")
    encoding = encoding or "utf-8"
    try:
        decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder(encoding)(), translate=True)
    except LookupError as error:
        raise UserError(f"{path} says that its encoding is {shown(encoding)}, which is unknown: mend that") from error
    before = 0
    for chunk in itertools.chain(chunks, [None]):  # the end is None, because b"" may come from an empty frame
        raw = chunk or b""
        try:
            yield decoder.decode(raw, final=chunk is None)
        except UnicodeError as error:
            raise _not_in(encoding, path, error, before + len(raw), head) from error
        before += len(raw)


def _not_in(encoding, path, error, read, head):
    """The UserError for a text that is not in its encoding, after so many bytes were `read`."""
    if b"\0" in head and not encoding.lower().startswith(("utf-16", "utf-32")):
        return UserError(f"{path} is no text, but binary: remove it")
    if not isinstance(error, UnicodeDecodeError):
        return UserError(f"{path} is not {encoding} text: {first_line(error)}")
    at = read - len(error.object) + error.start  # the decoder may hold bytes of earlier chunks
    remedy = "if it is Western European, add --encoding=cp1252 (of Windows) or latin-1, otherwise convert it to UTF-8"
    return UserError(
        f"{path} is not {encoding.removesuffix('-sig').upper()} text: {error.reason} at byte {at:,}; {remedy}"
    )


def whole(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """All text as one document, in fragments as those of a corpus."""
    anything = False
    for block in blocks:
        if block:
            yield block, False
            anything = True
    if anything:
        yield "", True


def paragraphs(blocks: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Each paragraph as a document, in fragments as those of a corpus. Those of blanks alone are left out."""
    # a paragraph may go on in the next block, so keep its line ends, and what is blank so far, until then
    line_ends, blanks, within = "", "", False
    for block in blocks:
        text = (line_ends + block).rstrip("\n")
        line_ends = (line_ends + block)[len(text) :][:2]  # two are enough, and there may be a billion
        *complete, rest = re.split("\n{2,}", text)
        for paragraph in complete:
            if within or (blanks + paragraph).strip():
                yield blanks + paragraph, True
            blanks, within = "", False
        blanks += rest
        if within or blanks.strip() or len(blanks) > HEAD:  # more blanks are text, because there may be a billion
            if blanks:
                yield blanks, False
            blanks, within = "", True
    if within:
        yield "", True
