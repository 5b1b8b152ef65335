"""Read documents from every kind of file that people have. What cannot be read is one sentence."""

import bz2
import gzip
import io
import json
import lzma
import pathlib
import re
import zipfile

import pyarrow
import pyarrow.csv
import pytest
from pyarrow import parquet

from fusedgpt.data import documents as from_documents
from fusedgpt.data.texts import Files, Hub
from fusedgpt.errors import UserError

zstandard = pytest.importorskip("zstandard")

TEXTS = ["one\nline more", 'with "quotes", commas', "äöü 漢字", "007", "NA", "2020-01-01", "null"]


def documents(paths, corpus=None, **options):
    """The documents of files, joined from their fragments."""
    found, text = [], ""
    corpus = corpus or Files(paths, **options)
    for file in corpus.files:
        for fragment, last in corpus.read(file):
            text += fragment
            if last:
                found.append(text)
                text = ""
    assert not text
    return found


def zipped(raw):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", raw)
    return file.getvalue()


def frames(raw):  # a parallel compressor may end a frame anywhere
    return b"".join(zstandard.compress(raw[at : at + 5]) for at in range(0, len(raw), 5))


PACK = {"": bytes, ".gz": gzip.compress, ".zst": frames, ".xz": lzma.compress, ".bz2": bz2.compress, ".zip": zipped}


def table(kind):
    """TEXTS, one a row, in the format of a suffix, written by another library."""
    rows = [{"id": n, "text": text} for n, text in enumerate(TEXTS)]
    if kind in (".parquet", ".csv"):
        write = {".parquet": parquet.write_table, ".csv": pyarrow.csv.write_csv}[kind]
        write(pyarrow.Table.from_pylist(rows), file := io.BytesIO())
        return file.getvalue()
    if kind == ".json":
        return json.dumps(rows, indent=2, ensure_ascii=False).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("kind", "packed"),
    [(".csv", ""), (".json", ".xz"), (".jsonl", ".gz"), (".jsonl", ".zst"), (".json", ".zip"), (".parquet", "")],
)
def test_a_row_is_a_document_and_its_text_stays_as_it_is(tmp_path, kind, packed):
    # `datasets` made 7.0 of a column of 007, None of NA, and a datetime of 2020-01-01
    (tmp_path / f"a{kind}{packed}").write_bytes(PACK[packed](table(kind)))
    assert documents([tmp_path / f"a{kind}{packed}"]) == TEXTS


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_text_has_unix_line_ends_and_no_byte_order_mark(tmp_path, monkeypatch, packed, chunk):
    monkeypatch.setattr(from_documents, "CHUNK", chunk)
    raw = "\ufeffone\r\ntwo\rthree\n\r\n\r\rfour é 漢字\r\ufefffive".encode()
    (tmp_path / f"a.txt{packed}").write_bytes(PACK[packed](raw))
    assert documents([tmp_path / f"a.txt{packed}"]) == ["one\ntwo\nthree\n\n\n\nfour é 漢字\nfive"]


PEOPLE_HAVE = {  # name: content, options, documents, what is said of what is left out
    "a.tsv": ('nr\ttext\n1\tIt rained\n2\t"Come in\n3\tand sit"\n', {}, ["It rained", '"Come in', 'and sit"'], ""),
    "a.csv": ('id,text\n1,"To be"\n2,\n3,"  "\n4,or not\n', {}, ["To be", "or not"], "2 rows without text"),
    "excel.csv": ("id;text\n1;eins, zwei\n2;drei\n", {}, ["eins, zwei", "drei"], ""),
    "a.jsonl": ('{"text": "a"}\n{"text": null}\n\n{"text": "b"}', {}, ["a", "b"], "1 rows without text"),
    "half a pair.jsonl": ('{"text": "a \\udbc0 b"}', {}, ["a \ufffd b"], ""),
    "null.jsonl": ('{"t": null}\n{"t": {"en": "a"}}', {"column": "t.en"}, ["a"], "1 rows without text"),
    "lists.jsonl": ('{"text": ["one", "two"]}', {}, ["one\ntwo"], ""),
    "lines.json": ('{"text": "a"}\n{"text": "b"}\n', {}, ["a", "b"], ""),
    "telegram.json": (  # the objects were left out, without a word
        '[{"text": ["See ", {"type": "bold", "text": "me"}]}, {"text": ["a", "b"]}, {"text": "c", "text.lang": "de"}]',
        {"skip": True},
        ["a\nb", "c"],
        "1 rows that cannot be read",
    ),
    "stories.txt": ("one<|endoftext|>two\n", {}, ["one<|endoftext|>two\n"], "which ends no document there"),
    "texts.json": ('["one", "5", "null", ""]', {}, ["one", "5", "null"], "1 rows without text"),  # were parsed twice
    "nested.jsonl": ('{"t": {"en": "hello", "de": "hallo"}}', {"column": "t.en"}, ["hello"], ""),
    "dotted.jsonl": ('{"t.en": "hello"}', {"column": "t.en"}, ["hello"], ""),
    "chat.jsonl": ('{"m": [{"w": "a", "t": "Speak"}, {"w": "b", "t": "No"}]}', {"column": "m.t"}, ["Speak\nNo"], ""),
    "bad.jsonl": ('{"text": "a"}\n{"text": 5}\n{"tex\n{"b": "x"}', {"skip": True}, ["a"], "3 rows that cannot be read"),
}


@pytest.mark.parametrize("name", PEOPLE_HAVE)
def test_tables_as_people_have_them(tmp_path, capsys, name):
    content, options, expected, said = PEOPLE_HAVE[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert documents([tmp_path / name], **options) == expected
    assert said in capsys.readouterr().out


def test_a_zip_is_what_is_in_it(tmp_path):
    # Kaggle's archive.zip was one text, with the commas and quotation marks of its table
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("train.csv", 'id,text\n1,"one, ""two"""\n2,three\n')
    assert documents([tmp_path]) == ['one, "two"', "three"]


REFUSED = [
    ("a.txt", b"abc" * 9999 + "ä".encode() * 9 + b"\xff", "is UTF-8 but for byte 30,015 (invalid start byte): mend it"),
    ("a.txt", "über die Bäche, ß".encode()[:-1], "is UTF-8 but for byte 18 (unexpected end of data)"),
    ("a.txt", b"\x89PNG\r\n\0\0\0\rIHDR" + bytes(range(256)), "it has zero bytes. Remove it, or say --encoding"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 5}', "row 2 of {} cannot be read: it has no text at 'text'"),
    ("a.jsonl", b'{"text": "a"\n', "row 1 of {} cannot be read: Expecting ',' delimiter"),
    ("a.jsonl", b'{"text": ["a", 5]}', "row 1 of {} cannot be read: it has no text at 'text'"),
    ("a.jsonl", b'{"id": 12345, "word": "a", "t": {"en": "abc"}}', "name another column, as in --text_column=t.en"),
    ("a.json", b'{"type": "chat", "m": [{"t": "abc"}, {"t": "de"}]}', "name another column, as in --text_column=m.t"),
    ("a.json", b'{"text": ["a", {"t": "b"}]}', "at 'text' alone, but below it too: name another column, as in"),
    ("a.json", b'[{"text": "a"}, {"te', "cannot read {} (JSONDecodeError: Unterminated string"),
    ("a.csv", b"id,words\n1,two", "it has no text at 'text': name another column, as in --text_column=words"),
    ("a.csv", b"id,text\n1,one, two", "row 1 of {} cannot be read: it has more cells than"),  # it was "one"
    ("a.csv", b'text\none\n"two\nthree\n', "cannot read {} (Error: unexpected end of data): is its suffix right"),
    ("a.parquet", b"PAR1", "cannot read {} (ArrowInvalid"),
    ("a.txt.gz", gzip.compress(b"text" * 1000)[:-20], "cannot read {} (OSError: Truncated compressed stream"),
    ("a.txt.xz", lzma.compress(b"text" * 999)[:-9], "cannot read {} (EOFError: Compressed file ended"),
    ("a.txt.zip", zipped(b"text")[:-9], "cannot read {} (BadZipFile"),
    ("a.mbox.gz", gzip.compress(b"From a\n\ntext\n"), "unpack it, and name the mailbox"),  # gave no mail, in silence
]


@pytest.mark.parametrize(("name", "raw", "sentence"), REFUSED, ids=lambda x: x[:50] if isinstance(x, str) else "")
def test_what_cannot_be_read_is_one_sentence(tmp_path, capsys, name, raw, sentence):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError) as error:
        documents([tmp_path / name])
    assert sentence.format(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "b.txt").write_text("sound")  # one bad file never costs the others
    assert documents([tmp_path], skip=True)[-1] == "sound"
    assert re.search(f"left out.*{tmp_path / name}", capsys.readouterr().out)


def test_a_data_set_of_the_hub_is_read_file_by_file(tmp_path):
    for n in range(3):
        rows = {"text": [f"document {n} {m}" for m in range(5)], "url": ["x"] * 5}
        parquet.write_table(pyarrow.table(rows), tmp_path / f"train-{n:05}-of-00003.parquet")
    hub = Hub("someone/texts", f"{tmp_path}/train-*.parquet")
    assert len(hub.files) == 3
    assert documents([], hub) == [f"document {n} {m}" for n in range(3) for m in range(5)]
    (tmp_path / "train-00001-of-00003.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot read someone/texts, run this again, or give --input=PATH: "):
        documents([], hub)


def test_files_and_folders_keep_their_order(tmp_path, capsys):
    for name in ("b/2.txt", "b/1.md", "a.txt", "b/.git/3.txt", "b/4.png", "b/c/0.TXT", "b/5.txt", "b/~$6.docx"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("" if "5" in name else name)
    assert documents([tmp_path / "b", tmp_path / "a.txt"]) == ["b/1.md", "b/2.txt", "b/c/0.TXT", "a.txt"]
    assert "left out: 1 files of other kinds" in capsys.readouterr().out


def test_a_file_that_is_there_twice_is_read_once(tmp_path):
    # a document that is read twice may be in both splits
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "2.txt").write_text("two")
    for link, target in [("in/a.txt", "in/2.txt"), ("in/up", "in"), ("in/gone", "nowhere")]:
        (tmp_path / link).symlink_to(tmp_path / target)
    assert documents([tmp_path / "in", tmp_path / "in" / ".." / "in" / "2.txt"]) == ["two"]


def test_data_sets_in_a_folder_are_no_text_of_it(tmp_path, monkeypatch):
    # --input=data/text read the meta.json of the first preparation
    for name in ("a.txt", "meta.json", "book/meta.json", "book/train.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "b"}')
    monkeypatch.chdir(tmp_path)
    files = Files([pathlib.Path(".")])
    assert [file.name for file in files.files] == ["a.txt", "meta.json"] and files.source == tmp_path.name


ENGLISH = "“It’s fine” – he said…\n" * 9
GERMAN = "Die Straße führt über die Brücke, und der Müller grüßt schön. " * 3
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. " * 3
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастлива по-своему. " * 3
CHINESE = "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。" * 5
BY_LETTERS = [(ENGLISH, "cp1252"), (GERMAN, "cp1252"), (CZECH, "cp1250"), (RUSSIAN, "koi8_r"), (CHINESE, "gb18030")]
BY_LETTERS.append(pytest.param(f"a{CHINESE}\n" * 999, "gb18030", id="a character is cut"))  # it was refused


@pytest.mark.parametrize(("text", "encoding"), BY_LETTERS)
def test_a_text_that_is_not_utf8_is_read_by_its_letters_and_says_so(tmp_path, capsys, text, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert documents([tmp_path / "a.txt"]) == [text]
    assert f"a.txt as {encoding}, by its letters: say --encoding=NAME if it is another" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding, capsys):
    (tmp_path / "a.txt").write_bytes(GERMAN.encode(encoding))
    assert documents([tmp_path / "a.txt"]) == [GERMAN] and "reading" not in capsys.readouterr().out


def test_utf8_comes_first_and_each_file_can_have_its_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(GERMAN.encode())
    (tmp_path / "b.txt").write_bytes(ENGLISH.encode("cp1252"))  # latin-1 gave U+0093 and U+0094 for its quotation marks
    (tmp_path / "c.txt").write_bytes(RUSSIAN.encode("cp866"))
    assert documents([tmp_path], encoding="c.*:cp866,latin-1") == [GERMAN, ENGLISH, RUSSIAN]
    long = GERMAN.encode() + b"a" * 2**18  # the letters before were forgotten
    for raw in (GERMAN.encode() + b"\xff", "\ufeffa".encode() + b"\xff\xff", long + b"\x93", b"\0" + long):  # mojibake
        (tmp_path / "a.txt").write_bytes(raw)
        with pytest.raises(UserError, match=r"is UTF-8 but for (byte|zero)"):
            documents([tmp_path / "a.txt"], encoding="cp1252")


def test_what_is_surely_nothing_else_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 256)) * 9)
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 127 .*\), nor surely anything else: say --encoding=NAME"):
        documents([tmp_path / "a.txt"])
    (tmp_path / "a.txt").write_bytes(RUSSIAN.encode("cp1251"))  # charset-normalizer prefers koi8_r, with its capitals
    with pytest.raises(UserError, match="nor surely anything else"):
        documents([tmp_path / "a.txt"])
    with pytest.raises(UserError, match=r"cannot read .*a\.txt \(UnicodeDecodeError: 'gb18030' codec"):
        documents([tmp_path / "a.txt"], encoding="gb18030")
    (tmp_path / "a.txt").write_bytes(b"a" * 9_000_000 + b"\x81")  # the next document went on with what was read of it
    assert len(documents([tmp_path / "a.txt"], encoding="cp1252", skip=True)) == 1
