"""Give prepare scripts small files that unpack to hundreds of megabytes, and texts that never end.

Each file is read in its own process, which reports how much its memory has grown at the peak.
"""

import gzip
import pathlib
import sys

import pyarrow
import pyarrow.parquet
import pytest

from fusedgpt.data.texts import Files
from fusedgpt.errors import UserError
from tests.launch import FORKS

zstandard = pytest.importorskip("zstandard")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in Linux's /proc")

MIB = 2**20


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


ZEROS, LETTERS, LINE_ENDS = (each * MIB for each in (b"\0", b"a", b"\n"))
LINES = (b"a" * 127 + b"\n") * 2**13
# name of the file: its bytes, the most MB that memory may grow, and part of the error or the number of characters
FAST = "zeros.txt.zst"
FILES = {
    FAST: (lambda: zst(ZEROS, 256), 60, "is no text: it has zero bytes"),  # of 1 GB, took 2.5 GB
    "letters.txt.zst": (lambda: zst(LETTERS, 256), 60, 256 * MIB),
    "line ends.txt.gz": (lambda: gz(LINE_ENDS, 64), 60, 64 * MIB),
    "a cell of lines.csv.zst": (lambda: zst(LINES, 300, b'text\n"', b'"\n'), 500, "field larger than field limit"),
}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name != FAST)) for name in FILES]


def _memory(field):
    """The kB of this process in a field of Linux's status."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def _read(path, pipe):
    before = _memory("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    try:
        said = sum(len(text) for text, _ in Files([path]).read(path))
    except UserError as error:
        said = str(error)
    pipe.send((said, (_memory("VmHWM") - before) / 1000))


def read(path):
    """What reading a file comes to, its error or how many characters it has; and the MB that memory grew by."""
    ours, theirs = FORKS.Pipe()
    child = FORKS.Process(target=_read, args=(path, theirs))
    child.start()
    theirs.close()
    answer = ours.recv()
    child.join()
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_read_or_refused_in_bounded_memory(tmp_path, name):
    # without bounds on an unpacked chunk and a cell, the whole file was held until no memory was left
    make, most, expected = FILES[name]
    (tmp_path / name).write_bytes(make())
    assert (tmp_path / name).stat().st_size < 70 * MIB
    said, grown = read(tmp_path / name)
    if isinstance(expected, str):
        assert expected in said and "\n" not in said and len(said) < 1000
    else:
        assert said == expected
    assert grown < most


@pytest.mark.slow
def test_a_parquet_file_that_repeats_a_long_text_is_read_in_bounded_memory(tmp_path):
    # 2 kB on the disk; a batch of 1,000 rows took 2 GB
    parquet(tmp_path / "a.parquet", "a" * MIB, 500)
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    said, grown = read(tmp_path / "a.parquet")
    assert said == 500 * MIB and grown < 200
