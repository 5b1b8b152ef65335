"""Bytes become text in the encoding that they say, or are refused with what to do."""

import pathlib

import pytest

from fusedgpt.data import decoding
from fusedgpt.errors import UserError

zstandard = pytest.importorskip("zstandard")

PATH = pathlib.Path("a.txt")


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le bom", "utf-16-be bom"])
def test_a_byte_order_mark_says_the_encoding(encoding, size):
    # the .txt of Windows' Notepad and PowerShell was "not UTF-8 text"
    text = "\ufeff" * encoding.endswith("bom") + "naïve 漢字 🙂\r\nline"
    raw = text.encode(encoding.removesuffix(" bom"))
    chunks = [raw[at : at + size] for at in range(0, len(raw), size)]
    assert "".join(decoding.decoded(PATH, chunks)) == "naïve 漢字 🙂\nline"


@pytest.mark.parametrize(
    ("raw", "encoding", "sentence"),
    [
        ("café".encode("latin-1"), None, r"is not UTF-8 text: .* at byte 3; if .* add --encoding=cp1252 .* or latin-1"),
        ("text".encode("utf-16-le"), None, "if it is UTF-16, add --encoding=utf-16-le"),
        ("text".encode("utf-16-be"), None, "if it is UTF-16, add --encoding=utf-16-be"),
        # these were valid UTF-8, and went into the bins as control characters
        ("“A text”".encode("utf-16-le"), None, "if it is UTF-16, add --encoding=utf-16-le"),
        ("“A text”".encode("utf-16-be"), None, "if it is UTF-16, add --encoding=utf-16-be"),
        ("Привет мир".encode("utf-16-le"), None, "if it is UTF-16, add --encoding=utf-16-le"),
        ("a text".encode("utf-32-be"), None, "if it is UTF-32, add --encoding=utf-32-be"),
        ("a text".encode("utf-32-le"), None, "if it is UTF-32, add --encoding=utf-32-le"),
        (b"ELF\0\0\xff\xff", None, "is no text, but binary: remove it"),
        (b"a\x81", "cp1252", "is not CP1252 text: .* at byte 1"),
        ("text".encode("utf-16")[:-1], None, "is not UTF-16 text: truncated data"),
        (b"text", "utf-16", "is not utf-16 text: UTF-16 stream does not start with BOM"),
        (b"text", "klingon", "its encoding is 'klingon', which is unknown"),
    ],
)
def test_bytes_in_another_encoding_are_refused_with_the_option_to_add(raw, encoding, sentence):
    with pytest.raises(UserError, match=sentence):
        list(decoding.decoded(PATH, [raw], encoding))


@pytest.mark.parametrize("part", [b"\0", b"\n", b"x" * 100 + b"\n"])
def test_what_a_zst_unpacks_to_comes_in_small_chunks(tmp_path, part):
    # 2 KiB of a .zst became 64 MiB at once
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(part * (2**26 // len(part))))
    with open(path, "rb") as file:
        sizes = [len(chunk) for chunk in decoding.unpacked(path, file)]
    assert sum(sizes) == len(part) * (2**26 // len(part)) and max(sizes) <= decoding.CHUNK
