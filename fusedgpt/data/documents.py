"""The text of documents as people have them: pandoc reads all but PDF, pypdf reads that, `email` reads mail."""

import contextlib
import email
import email.message
import email.policy
import logging
import mailbox
import pathlib
import subprocess
from collections.abc import Callable, Iterator
from typing import BinaryIO

from fusedgpt.errors import UserError

LARGEST = 2**28  # most bytes of a document
MOST_SECONDS, MOST_MEMORY = 120, "2g"  # of pandoc for one document


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
