"""Read documents from every kind of file, compressed or not. A bad file is refused in one sentence."""

import csv
import errno
import gzip
import importlib.metadata
import json
import os
import struct
import sys

import pyarrow
import pytest
from pyarrow import parquet

from fusedgpt.data import corpus, decoding, encoding, tables
from fusedgpt.data.corpus import Files
from fusedgpt.errors import UserError
from tests.documents import pdf

zstandard = pytest.importorskip("zstandard")

TEXTS = ["one\nline more", 'with "quotes", commas', "", "äöü 漢字", "007", "NA", "2020-01-01", "null"]

SKIPPED = struct.pack("<II", 0x184D2A50, 4) + b"size"  # pzstd writes such a frame before each of its own


def documents(paths, **options):
    """The documents of a corpus, joined from their fragments."""
    found, text = [], ""
    for fragment, last in Files(paths, **options).fragments():
        text += fragment
        if last:
            found.append(text)
            text = ""
    assert not text
    return found


def table(path):
    """A file of TEXTS, one a row, in the format that its name says, written by another library."""
    rows = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
    kind = path.suffixes[0]
    if kind == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=3)
    elif kind == ".csv":
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["id", "text"])
            writer.writeheader()
            writer.writerows(rows)
    elif kind == ".json":
        path.write_text(json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pack(path)
    return path


def pack(path):
    raw = path.read_bytes()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(raw))
    elif path.suffix == ".zst":  # a frame for each byte, because a parallel compressor may split anywhere
        frames = (zstandard.compress(raw[at : at + 1]) for at in range(len(raw)))
        path.write_bytes(SKIPPED.join([b"", *frames, b""]))


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".csv", ".json", ".jsonl", ".parquet"])
def test_a_row_is_a_document_and_its_text_stays_as_it_is(tmp_path, monkeypatch, kind, packed):
    # `datasets` made 7.0 of a column of 007, None of NA, and a datetime of 2020-01-01
    file = table(tmp_path / f"table{kind}{packed}")
    assert documents([file]) == TEXTS
    monkeypatch.setattr(decoding, "CHUNK", 5)
    assert documents([file]) == TEXTS


@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 2**20])
def test_text_is_that_of_text_mode_without_its_bom(tmp_path, monkeypatch, packed, chunk):
    monkeypatch.setattr(decoding, "CHUNK", chunk)
    file = tmp_path / f"a.txt{packed}"
    file.write_bytes("\ufeffone\r\ntwo\rthree\n\r\n\r\rfour é 漢字\r".encode())
    want = file.read_text(encoding="utf-8-sig")
    pack(file)
    assert documents([file]) == [want] and "\r" not in want


@pytest.mark.parametrize("chunk", [1, 3, 2**20])
def test_paragraphs(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(decoding, "CHUNK", chunk)
    (tmp_path / "a.txt").write_bytes(b" \n\none\ntwo\r\n\r\n\n \t\n\n  three\n\n\n\nfour\n \nfive\n\n \n \n")
    # paragraphs of blanks were documents too
    assert documents([tmp_path / "a.txt"], paragraphs=True) == ["one\ntwo", "  three", "four\n \nfive"]


def test_the_position_goes_from_nothing_to_the_size(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 3 * decoding.CHUNK)
    text = Files([tmp_path])
    positions = [text.position for _ in text.fragments()]
    assert positions == sorted(positions) and 0 < positions[0] < positions[-1] <= text.size == 6 * decoding.CHUNK


@pytest.mark.parametrize(
    ("name", "raw", "sentence"),
    [
        ("a.txt", b"x" * 3_000_000 + b"\xff", "not UTF-8 text: invalid start byte at byte 3,000,000"),
        ("a.txt", "\ufeffé".encode() + b"\xe9", "not UTF-8 text: unexpected end of data at byte 5"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}', "row 2 of .* has None in 'text'"),
        ("a.jsonl", b'{"text": "a"}\n"b"', "row 2 of .* is 'b': it must be an object"),
        ("a.jsonl", b'{"text": "\\ud800"}', "row 1 of .* has half of a surrogate pair"),
        ("a.jsonl", b'{"text": "a"', r"cannot read /.*JSONDecodeError: Expecting ',' delimiter\)"),
        ("a.json", b'[{"text": "a"}, {"te', "cannot read after row 1 of .*JSONDecodeError"),
        ("a.json", b'[{"text": "a"}, ', "cannot read after row 1 of .*EOFError: the file ends within an array"),
        ("a.json", b'[{"text": "a"}]\n' * 2000 + b"[", "the file ends within an array"),
        ("a.jsonl", b'{"text": "a"}\n' * 2000 + b"{", r"after row 2,000 of .*property name.*double quotes\)"),
        ("a.csv", b"id,words\n1,two", "row 1 of .* has no 'text', but 'id', 'words'"),
        ("a.csv", b"id,text\n1,two\n3", "row 2 of .* has None in 'text'"),
        ("a.csv", b"id,text\n1,one, two", "row 1 of .* has more cells than the first line"),  # it was "one"
        # it was called damaged
        ("a.tsv", b'text\none\n"two\nthree\nfour\n', "cannot read row 2 of .*unexpected end of data.*must close it"),
        ("a.csv", b'text\none\n"two\nthree "quoted" word\n', "cannot read row 2 of .*expected after.*doubled"),
        ("a.jsonl", b'{"id": 12345, "word": "a"}', "as --text_column=a.jsonl:word does"),  # it was id, as the longest
        ("a.jsonl", b'{"id": 5, "none": null}', r"has no 'text', and no text in another column \('id', 'none'\)"),
        ("a.tar.gz", b"x", "is an archive: unpack it and name the folder"),  # its headers are UTF-8
        ("a.parquet", b"PAR1", "cannot read .*ArrowInvalid"),
        ("a.txt.gz", gzip.compress(b"text" * 1000, mtime=0)[:-20], "cannot read .*EOFError"),
        ("a.txt.gz", b"text", "cannot read .*Not a gzipped file"),
        ("a.txt.zst", zstandard.compress(bytes(range(256)) * 100)[:-9], "cannot read .*EOFError"),
        ("a.txt.zst", b"text", "cannot read .*ZstdError"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, monkeypatch, name, raw, sentence):
    monkeypatch.setattr(decoding, "CHUNK", 4096)
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError, match=sentence):
        documents([tmp_path / name])


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO])
def test_a_file_that_the_system_does_not_give_is_not_called_damaged(tmp_path, monkeypatch, code):
    def refused(path, mode):
        raise OSError(code, os.strerror(code), str(path))

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(corpus, "open", refused, raising=False)
    with pytest.raises(UserError, match=f"cannot read .*a.txt: {os.strerror(code)}$"):
        documents([tmp_path / "a.txt"])


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("a.jsonl.zst", "zstandard")])
def test_a_file_whose_package_is_missing_is_not_called_damaged(tmp_path, monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"cannot read .*{name} without the package {package}: pip install {package}"):
        documents([table(tmp_path / name)])


def test_zstandard_with_the_longest_window(tmp_path):
    # `zstd --long=31` writes such a header; the file used to be called damaged
    header = struct.pack("<IBB", 0xFD2FB528, 0, (31 - 10) << 3)  # magic number, no flags, a window of 2**31 bytes
    raw_block = (1 | len(b"text") << 3).to_bytes(3, "little") + b"text"  # the last one, not compressed
    (tmp_path / "a.txt.zst").write_bytes(header + raw_block)
    assert documents([tmp_path / "a.txt.zst"]) == ["text"]


def test_a_comma_at_the_end_of_a_row_loses_nothing(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,one,\n")
    assert documents([tmp_path / "a.csv"]) == ["one"]


def test_two_columns_of_one_name_are_not_one(tmp_path):
    # the texts were those of the last
    parquet.write_table(pyarrow.table([["one"], ["two"]], names=["text", "text"]), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text("text,,,text\none,,,two\n")
    (tmp_path / "b.csv").write_text("id,text,id\n1,one,2\n")
    for name in ("a.csv", "a.parquet"):
        with pytest.raises(UserError, match=f"cannot read .*{name} .*: 2 columns are called 'text'"):
            documents([tmp_path / name])
    assert documents([tmp_path / "b.csv"]) == ["one"]


def test_a_file_that_changes_while_it_is_read_is_no_text(tmp_path, monkeypatch):
    # the beginning of one text and the end of another were one document
    monkeypatch.setattr(decoding, "CHUNK", 4)
    (tmp_path / "a.txt").write_text("the first text")
    files = Files([tmp_path / "a.txt"])
    reading = files.fragments()
    assert next(reading) == ("the ", False)
    (tmp_path / "a.txt").write_text("another text, which is longer")
    with pytest.raises(UserError, match=r"a\.txt has changed while it was read: run this again"):
        list(reading)
    with pytest.raises(UserError, match="has changed"):  # the characters may have been those of before
        files.check()
    assert documents([tmp_path / "a.txt"]) == ["another text, which is longer"]


def test_other_content_has_another_key(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = Files([tmp_path]).key
    assert Files([tmp_path]).key == before != Files([tmp_path], paragraphs=True).key
    (tmp_path / "b.txt").write_text("two")
    assert Files([tmp_path]).key != before


def test_another_pypdf_is_another_key_whatever_a_pdf_is_called(tmp_path, monkeypatch):
    # only files named .pdf counted, and a preparation went on with another reading of the same text
    (tmp_path / "a.txt").write_bytes(pdf(["a page"]))
    before = Files([tmp_path]).key
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0")
    assert Files([tmp_path]).key != before


def test_halves_are_cut_by_characters(tmp_path, monkeypatch):
    monkeypatch.setattr(decoding, "CHUNK", 4)
    text = "äbcdéfghij" * 5
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for share in (0.9, 0.5, 0.31, 0.2, 0.6):  # with 0.2 and 0.6 a fragment ends at the cut
        parts = ["", ""]
        at = 0
        for fragment, last in corpus.Halves(Files([tmp_path]), share).fragments():
            parts[at] += fragment
            at += last
        assert parts == [text[: int(share * 50)], text[int(share * 50) :]]


def test_halves_of_a_table_do_not_join_its_rows(tmp_path):
    # the last word of a row and the first of the next were one word
    file = table(tmp_path / "a.csv")
    text = "".join(fragment for fragment, _ in corpus.Halves(Files([file]), 0.5).fragments())
    assert text == "\n\n".join(TEXTS)


def test_parquet_is_read_in_small_batches_without_reading_ahead(tmp_path, monkeypatch):
    made, original = [], parquet.ParquetFile
    monkeypatch.setattr(parquet, "ParquetFile", lambda *args, **how: made.append(how) or original(*args, **how))
    monkeypatch.setattr(tables, "ROWS", 3)
    with open(table(tmp_path / "a.parquet"), "rb") as file:
        assert [row["text"] for row in tables.parquet_rows(file, "text")] == TEXTS
    assert made == [{"buffer_size": tables.BUFFER, "pre_buffer": False}]


def test_a_data_set_of_the_hub_is_its_column_text(tmp_path):
    table(tmp_path / "a.parquet")
    for streaming in (False, True):
        options = dict(path="parquet", data_files=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path / "cache"))
        hub = corpus.Hub("x", streaming, **options)
        for _ in range(2):
            assert list(hub.fragments()) == [(text, True) for text in TEXTS]
            assert hub.position == len("".join(TEXTS).encode())  # it used to stay 0, for hours
    with pytest.raises(UserError, match="cannot read x"):
        list(corpus.Hub("x", True, path="parquet", data_files=str(tmp_path / "none.parquet")).fragments())


BAD = {"1.docx": b"PK\3\4", "2.txt": b"caf\xe9", "4.csv": b"id,body\n1,x", "5.jsonl": b"{", "7.pdf": b"%PDF-1.4"}


@pytest.fixture
def mixed(tmp_path):
    """A folder with two texts, and a file of each kind that cannot be read."""
    for name, raw in (BAD | {"3.txt": b"three", "6.md": b"six"}).items():
        (tmp_path / name).write_bytes(raw)
    return tmp_path


@pytest.mark.parametrize("large", [False, True])
def test_all_unreadable_files_are_named_at_once(mixed, capsys, monkeypatch, large):
    # each cost a round of mending and trying again
    pytest.importorskip("pypdf")
    monkeypatch.setattr(corpus, "CHECKED_FIRST", 0 if large else 2**28)
    files = Files([mixed])
    with pytest.raises(UserError, match=r"5 of 7 files cannot be read, .* --skip_unreadable=True"):
        files.fragments().send(None) if large else files.check()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unreadable: ")]
    assert len(said) == len(BAD) and all(str(mixed / name) in line for name, line in zip(sorted(BAD), said))


def test_the_search_for_other_unreadable_files_is_shown(mixed, capsys, monkeypatch):
    # after the first of them, all other files were read to their ends without a word: hours for 100 GB
    pytest.importorskip("pypdf")
    monkeypatch.setattr(corpus, "CHECKED_FIRST", 0)
    monkeypatch.setattr(encoding, "SECONDS_BETWEEN_LINES", -1)
    (mixed / "0.txt").write_text("zero")
    files = Files([mixed])
    with pytest.raises(UserError, match="5 of 8 files"):
        list(files.fragments())
    said = capsys.readouterr().out
    assert f"checking the other files too, because cannot read {mixed / '1.docx'}" in said.partition("checking: ")[0]
    assert "MB read" in said and files.position == len("zero" + "three" + "six")  # the bar does not begin again at 0


def test_unreadable_files_are_left_out_as_a_whole_if_asked(mixed, capsys):
    pytest.importorskip("pypdf")
    (mixed / "8.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{')  # its first rows are fine
    files = Files([mixed], skip_unreadable=True)
    files.check()
    assert documents([mixed], skip_unreadable=True) == ["three", "six"]
    assert {path.name for path in files.skipped} == {*BAD, "8.jsonl"}
    assert f"skipped: cannot read {mixed / '1.docx'}" in capsys.readouterr().out
    assert files.key != Files([mixed]).key and files.size == 8  # a run that is continued reads what the first one read
    with pytest.raises(UserError, match="none of the 1 files can be read"):
        Files([mixed / "5.jsonl"], skip_unreadable=True)


def test_many_unreadable_files_are_counted(tmp_path, capsys):
    for n in range(50):
        (tmp_path / f"{n}.json").write_text("{")
    with pytest.raises(UserError, match="50 of 50 files cannot be read"):
        Files([tmp_path]).check()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22 and lines[-1] == "unreadable: 30 more"


def test_one_unreadable_file_of_several_is_named_in_the_sentence(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(UserError, match=r"cannot read .*b\.json .*; --skip_unreadable=True goes on without this file"):
        Files([tmp_path]).check()


def test_an_encoding_of_seven_bits_is_not_taken_for_utf8(tmp_path, capsys):
    # --encoding changed nothing, and the text was "\x1b$BF|K\\8l"
    (tmp_path / "1.txt").write_bytes("日本語 text".encode("iso-2022-jp"))
    (tmp_path / "2.txt").write_bytes("日本語 UTF-8".encode())
    (tmp_path / "3.txt").write_bytes(b"plain")
    assert documents([tmp_path], encoding="iso-2022-jp") == ["日本語 text", "日本語 UTF-8", "plain"]
    assert f"reading {tmp_path / '2.txt'} as UTF-8, because it is not iso-2022-jp" in capsys.readouterr().out
    for name in ("hz", "utf-7"):
        (tmp_path / "4.txt").write_bytes("中文 text".encode(name))
        assert documents([tmp_path / "4.txt"], encoding=name) == ["中文 text"]


def test_other_encodings_are_taken_by_name_alone(tmp_path, capsys):
    (tmp_path / "1.txt").write_bytes("naïve UTF-8".encode())
    (tmp_path / "2.txt").write_bytes("naïve “Windows”".encode("cp1252"))
    (tmp_path / "3.csv").write_bytes("text\nnaïve table\n".encode("cp1252"))
    (tmp_path / "4.txt").write_bytes("naïve UTF-16".encode("utf-16"))
    (tmp_path / "5.html").write_bytes("<p>naïve page".encode("cp1252"))
    want = ["naïve UTF-8", "naïve “Windows”", "naïve table", "naïve UTF-16", "naïve page"]
    assert documents([tmp_path], encoding="cp1252") == want
    said = capsys.readouterr().out
    assert said.count("as cp1252, because it is not UTF-8") == 3 and "1.txt" not in said
    (tmp_path / "6.txt").write_bytes(b"\x7fELF\0\0\xff")  # any bytes are Latin-1
    with pytest.raises(UserError, match=r"6\.txt is no text: it has zero bytes"):
        documents([tmp_path], encoding="latin-1")
    (tmp_path / "7.txt").write_bytes("no BOM".encode("utf-16-le"))
    assert documents([tmp_path / "7.txt"], encoding="utf-16-le") == ["no BOM"]
    (tmp_path / "8.txt").write_bytes("“No BOM”".encode("utf-16-le"))  # valid UTF-8, and was read as that
    assert documents([tmp_path / "8.txt"], encoding="utf-16-le") == ["“No BOM”"]
