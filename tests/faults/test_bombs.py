"""Give prepare scripts small files that unpack to gigabytes, and texts that never end.

Each file is read in its own process, which reports its peak memory.
"""

import gzip
import hashlib
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.documents import zip_of
from tests.launch import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in Linux's /proc")]

MIB = 2**20
READ = """
import pathlib, sys
import pyarrow.parquet, zstandard
from fusedgpt.data.corpus import Files
from fusedgpt.errors import one_sentence
try:
    with one_sentence():
        files = Files([pathlib.Path(sys.argv[1])], paragraphs=sys.argv[2] == "paragraphs")
        print("characters", sum(len(text) for text, _ in files.fragments()))
finally:
    print(*(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def gz(part, count, head=b"", tail=b""):
    return gzip.compress(head) + gzip.compress(part) * count + gzip.compress(tail)


def zst(part, count, head=b"", tail=b""):
    """Everything in one frame, because several frames would be unpacked one by one."""
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join(map(packer.compress, [head, *[part] * count, tail])) + packer.flush()


def parquet(path, value, rows):
    """`value` in each of `rows` rows, which the file holds once."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), [value])
    pages = dict(dictionary_pagesize_limit=2**30, data_page_size=2**30)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=rows, **pages)


def office(body):
    """A Word file with so much XML that it is made of bytes."""
    return zip_of({"word/document.xml": b'<w:document xmlns:w="w">' + body + b"</w:document>"})


ZEROS, LETTERS, SPACES, LINE_ENDS, COMMAS = (each * MIB for each in (b"\0", b"a", b" ", b"\n", b","))
LINES = (b"a" * 127 + b"\n") * 2**13
# name of the file: its bytes, the most MB that reading it may hold, and part of the error or the number of characters
FILES = {
    "zeros.txt.gz": (lambda: gz(ZEROS, 128), 100, 128 * MIB),
    "zeros.txt.zst": (lambda: zst(ZEROS, 1024), 150, 1024 * MIB),  # took 2.5 GB: 4 bytes stand for 131,072
    "line ends.csv.zst": (lambda: zst(LINE_ENDS, 16), 150, 0),  # of 400 MB, took 1.8 GB, and was a row that is too long
    "a line.csv": (lambda: b"text," * (3 * MIB // 5) * 20, 150, "(a row is longer"),  # took 1.1 GB
    "cells.csv.zst": (lambda: zst(b"ab," * 2**18, 60, b"text\n"), 250, "(a row is longer"),  # took 1.8 GB
    "blanks.json.zst": (lambda: zst(SPACES, 400, b"[", b"]"), 150, 0),  # took 264 MB
    "blanks in it.json.zst": (lambda: zst(SPACES, 60, b'[{"text":', b'"a"}]'), 300, 1),
    "line ends.txt.gz": (lambda: gz(LINE_ENDS, 128), 150, 0),  # took the square of its length in time
    "spaces.jsonl.gz": (lambda: gz(SPACES, 128), 150, 0),  # the same, and all of it was kept in memory
    "a line.jsonl.zst": (lambda: zst(LETTERS, 1024, b'{"text": "', b'"}\n'), 600, "JSONDecodeError: Unterminated"),
    "zeros.jsonl.zst": (lambda: zst(ZEROS, 1024), 600, "JSONDecodeError: Expecting value"),
    "deep.jsonl": (lambda: b'{"text":' * 10**5 + b"1" + b"}" * 10**5, 150, "RecursionError"),
    "deep.json": (lambda: b'{"text":' + b"[" * 10**5 + b"]" * 10**5 + b"}", 150, "RecursionError"),
    "digits.jsonl": (lambda: b'{"text":' + b"9" * 3 * MIB + b"}", 150, "ValueError: Exceeds the limit"),
    "a cell.csv.zst": (lambda: zst(LETTERS, 500, b'text\n"', b'"\n'), 300, "(a row is longer"),
    "a cell of lines.csv.zst": (lambda: zst(LINES, 500, b'text\n"', b'"\n'), 300, "(a row is longer"),
    "commas.csv.zst": (lambda: zst(COMMAS, 1024, b"text\n", b"\n"), 300, "(a row is longer"),
    "cells of lines.csv.zst": (
        lambda: zst(b'"\n",' * 2**18, 256, b"text\n"),
        300,
        "(a row has more than 1,048,576 times",
    ),
    "a zip.txt": (lambda: b"PK\x03\x04\x14\0\0\0\x08\0" + bytes(range(256)), 150, "BadZipFile: File is not a zip file"),
    "scripts.html.gz": (lambda: gz(LETTERS, 128, b"<html><script>"), 250, "ValueError: a tag, a script or a comment"),
    "a page.html.gz": (lambda: gz(b"<p>" + LETTERS, 128, b"<html>"), 200, 128 * MIB + 2 * 127),
    "open.html.zst": (lambda: zst(b"<div>" * 2**18, 8, b"<html>"), 150, 0),
    "a word.docx": (lambda: office(b"<w:t>" + LETTERS * 128 + b"</w:t>"), 200, 128 * MIB),
    "open.docx": (lambda: office(b"<w:p>" * 20 * MIB), 150, "ValueError: more than 65,536 elements are open"),
    "a tag.docx": (lambda: office(b"<w:" + LETTERS * 128), 250, "ValueError: a tag or a comment is longer"),
    "a list.epub": (lambda: zip_of({"META-INF/container.xml": SPACES * 128}), 150, "is longer than 16,777,216 bytes"),
}


def read(path, how="files"):
    """What reading a file says, its one sentence or how many characters it has, and the MB of memory at the peak."""
    command = [sys.executable, "-c", READ, path, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert "Traceback" not in done.stderr and len(done.stderr) < 1000, done.stderr[-2000:]
    said = done.stderr or re.search(r"characters (\d+)", done.stdout)[1]
    return said, int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) / 1000


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_or_refused_in_bounded_memory(tmp_path, tell, name):
    # without bounds on an unpacked chunk, a line and a row, the whole file was held until no memory was left
    make, most, expected = FILES[name]
    (tmp_path / name).write_bytes(make())
    assert (tmp_path / name).stat().st_size < 70 * MIB
    said, peak = read(tmp_path / name, "paragraphs" if name == "line ends.txt.gz" else "files")
    if isinstance(expected, str):
        assert said.startswith("error: ") and said.count("\n") == 1 and expected in said
    else:
        assert int(said) == expected
    assert peak < most
    tell(f"{name}: {peak:.0f} MB")


def test_a_parquet_file_that_repeats_a_long_text(tmp_path, tell):
    # 2 kB on the disk; a batch of 1,000 rows took 2 GB
    parquet(tmp_path / "a.parquet", "a" * MIB, 1000)
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    said, peak = read(tmp_path / "a.parquet")
    assert int(said) == 1000 * MIB and peak < 250
    tell(f"1,000 MB of one text in Parquet: {peak:.0f} MB")


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def prepare(path, out_dir):
    """Run prepare.py with 500 MB of memory."""
    limited = ["bash", "-c", 'ulimit -d 500000; exec "$@"', "bash", sys.executable]
    command = [*limited, "data/text/prepare.py", "--tokenizer=byte", f"--input={path}", f"--out_dir={out_dir}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_what_memory_cannot_hold_is_no_data_set(tmp_path):
    # such files used to be called damaged; only memory bounds a cell of Parquet
    good, out_dir = tmp_path / "good.txt", tmp_path / "data"
    good.write_text("some text\n" * 1000)
    done = prepare(good, out_dir)
    assert done.returncode == 0, done.stderr
    before = hashes(out_dir)
    assert {"meta.json", "train.bin", "val.bin"} <= before.keys()
    parquet(tmp_path / "cell.parquet", "a" * 300 * MIB, 2)
    (tmp_path / "objects.jsonl.zst").write_bytes(zst(b"{}," * 2**18, 256, b'{"text": "a"}\n{"text": ['))
    for bomb in ("cell.parquet", "objects.jsonl.zst"):
        for folder in (out_dir, tmp_path / "new"):
            done = prepare(tmp_path / bomb, folder)
            assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr[-2000:]
            assert "because memory ran out: cut its long texts" in done.stderr
        assert hashes(out_dir) == before
        assert {path.name for path in (tmp_path / "new").iterdir()} <= {".prepare"}
