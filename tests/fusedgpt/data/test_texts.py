"""Read documents from every kind of file that people have. What cannot be read is one sentence."""

import bz2
import csv
import gzip
import io
import json
import lzma
import pathlib
import zipfile

import pyarrow
import pytest
from pyarrow import parquet

from fusedgpt.data import documents as from_documents
from fusedgpt.data.documents import encoding_of
from fusedgpt.data.texts import Files, Hub, per_file
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
    if kind == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), file := io.BytesIO(), row_group_size=3)
        return file.getvalue()
    if kind == ".csv":
        writer = csv.DictWriter(file := io.StringIO(newline=""), ["id", "text"])
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue().encode()
    if kind == ".json":
        return json.dumps(rows, indent=2, ensure_ascii=False).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", [".csv", ".json", ".jsonl", ".parquet"])
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


def test_paragraphs(tmp_path):
    # paragraphs of blanks were documents too
    (tmp_path / "a.txt").write_bytes(b" \n\none\ntwo\r\n\r\n\n \t\n\n  three\n\n\n\nfour\n\n \n \n")
    assert documents([tmp_path / "a.txt"], paragraphs=True) == ["one\ntwo", "  three", "four"]


PEOPLE_HAVE = {  # name: content, options, documents, what is said of what is left out
    "a.tsv": ('nr\ttext\n1\tIt rained\n2\t"Come in\n3\tand sit"\n', {}, ["It rained", '"Come in', 'and sit"'], ""),
    "a.csv": ('id,text\n1,"To be"\n2,\n3,"  "\n4,or not\n', {}, ["To be", "or not"], "2 rows without text"),
    "excel.csv": ("id;text\n1;eins, zwei\n2;drei\n", {}, ["eins, zwei", "drei"], ""),
    "a.jsonl": ('{"text": "a"}\n{"text": null}\n\n{"text": "b"}', {}, ["a", "b"], "1 rows without text"),
    "half a pair.jsonl": ('{"text": "a \\udbc0 b"}', {}, ["a \ufffd b"], ""),
    "lists.jsonl": ('{"text": ["one", "two"]}', {}, ["one\ntwo"], ""),
    "lines.json": ('{"text": "a"}\n{"text": "b"}\n', {}, ["a", "b"], ""),
    "nested.jsonl": ('{"t": {"en": "hello", "de": "hallo"}}', {"column": "t.en"}, ["hello"], ""),
    "dotted.jsonl": ('{"t.en": "hello"}', {"column": "t.en"}, ["hello"], ""),
    "chat.jsonl": (
        '{"messages": [{"role": "user", "content": "Speak"}, {"role": "bot", "content": "No"}]}',
        {"column": "messages.content"},
        ["Speak\nNo"],
        "",
    ),
    "some bad.jsonl": (
        '{"text": "a"}\n{"text": 5}\n{"tex\n{"other": "x"}\n{"text": "b"}',
        {"skip_unreadable": True},
        ["a", "b"],
        "3 rows that cannot be read, as row 2 of ",
    ),
    "wide.csv": (
        "id,text\n1,a\n2,b, c\n3,d\n",
        {"skip_unreadable": True},
        ["a", "d"],
        "1 rows that cannot be read, as",
    ),
}


@pytest.mark.parametrize("name", PEOPLE_HAVE)
def test_tables_as_people_have_them(tmp_path, capsys, name):
    content, options, expected, said = PEOPLE_HAVE[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    assert documents([tmp_path / name], **options) == expected
    assert said in capsys.readouterr().out


REFUSED = [
    ("a.txt", b"abc" * 9999 + "ä".encode() * 9 + b"\xff", "is UTF-8 but for byte 30,015 (invalid start byte): mend it"),
    ("a.txt", "über die Bäche, ß".encode()[:-1], "is UTF-8 but for byte 18 (unexpected end of data)"),
    ("a.txt", b"\x89PNG\r\n\0\0\0\rIHDR" + bytes(range(256)), "is no text: it has zero bytes"),
    ("a.jsonl", b'{"text": "a"}\n{"text": 5}', "row 2 of {} cannot be read: it has 5 where its text should be"),
    ("a.jsonl", b'{"text": "a"}\n"b"', "row 2 of {} cannot be read: "),
    ("a.jsonl", b'{"text": "a"\n', "row 1 of {} cannot be read: Expecting ',' delimiter"),
    ("a.jsonl", b'{"id": 12345, "word": "a", "t": {"en": "abc"}}', "as in --text_column=t.en"),
    ("a.json", b'{"type": "chat", "m": [{"t": "abc"}, {"t": "de"}]}', "as in --text_column=m.t"),
    ("a.json", b'[{"text": "a"}, {"te', "cannot read {} (JSONDecodeError: Unterminated string"),
    ("a.csv", b"id,words\n1,two", "row 1 of {} cannot be read: it has no 'text': name another column, as in"),
    ("a.csv", b"id,text\n1,one, two", "it has more cells than the first line"),  # it was "one"
    ("a.csv", b'text\none\n"two\nthree\n', "cannot read {} (Error: unexpected end of data): is its suffix right"),
    ("a.parquet", b"PAR1", "cannot read {} (ArrowInvalid"),
    ("a.txt.gz", gzip.compress(b"text" * 1000)[:-20], "cannot read {} (OSError: Truncated compressed stream"),
    ("a.txt.zst", zstandard.compress(bytes(range(1, 128)) * 100)[:-9], "cannot read {} (OSError: Truncated"),
    ("a.txt.xz", lzma.compress(b"text" * 999)[:-9], "cannot read {} (EOFError: Compressed file ended"),
    ("a.txt.zip", zipped(b"text")[:-9], "cannot read {} (BadZipFile"),
]


def test_utf_8_with_a_bad_byte_is_read_as_nothing_else(tmp_path):
    # F40: --encoding=cp1252, and a page that names another encoding, made mojibake of all of it
    for name, begin in (("a.txt", b""), ("a.html", b"<meta charset=cp1252>")):
        (tmp_path / name).write_bytes(begin + "ä".encode() * 9 + b"\xff")
        with pytest.raises(UserError, match="is UTF-8 but for byte"):
            documents([tmp_path / name], encoding="cp1252")


@pytest.mark.parametrize(
    ("name", "raw", "sentence"), REFUSED, ids=lambda value: value[:50] if isinstance(value, str) else ""
)
def test_what_cannot_be_read_is_one_sentence(tmp_path, capsys, name, raw, sentence):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UserError) as error:
        documents([tmp_path / name])
    assert sentence.format(tmp_path / name) in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "b.txt").write_text("sound")  # one bad file never costs the others
    assert documents([tmp_path], skip_unreadable=True)[-1] == "sound"
    assert f"left out: {tmp_path / name}" in capsys.readouterr().out


def test_a_data_set_of_the_hub_is_read_file_by_file(tmp_path):
    # a local folder of the hub's layout
    for n in range(3):
        rows = {"text": [f"document {n} {m}" for m in range(5)], "url": ["x"] * 5}
        parquet.write_table(pyarrow.table(rows), tmp_path / f"train-{n:05}-of-00003.parquet")
    hub = Hub("someone/texts", f"{tmp_path}/train-*.parquet")
    assert len(hub.files) == 3
    assert documents([], hub) == [f"document {n} {m}" for n in range(3) for m in range(5)]
    (tmp_path / "train-00001-of-00003.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot read someone/texts, run this again, or give --input=PATH"):
        documents([], hub)
    with pytest.raises(UserError, match="names no file: give local texts with --input=PATH"):
        _ = Hub("someone/texts", f"{tmp_path}/val-*.parquet").files


# which files are read of those that lie in folders


def test_files_and_folders_keep_their_order(tmp_path, capsys):
    for name in ("b/2.txt", "b/1.md", "a.txt", "b/.git/3.txt", "b/4.png", "b/c/0.TXT", "b/5.txt", "b/~$6.docx"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("" if "5" in name else name)
    assert documents([tmp_path / "b", tmp_path / "a.txt"]) == ["b/1.md", "b/2.txt", "b/c/0.TXT", "a.txt"]
    said = capsys.readouterr().out
    assert "left out: 2 files that are empty or of another kind" in said


def test_a_file_that_is_there_twice_is_read_once(tmp_path, capsys):
    # a document that is read twice may be in both splits; folders behind links used to be left out in silence
    for name in ("apart/1.txt", "apart/.hidden.txt", "in/2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    for link, target in [("in/a", "apart"), ("in/b", "apart"), ("apart/up", "in"), ("in/gone", "nowhere")]:
        (tmp_path / link).symlink_to(tmp_path / target)
    again = [tmp_path / "in" / "2.txt", tmp_path / "apart" / ".." / "in" / "2.txt"]
    assert documents([tmp_path / "in", *again]) == ["in/2.txt", "apart/1.txt"]


def test_data_sets_in_a_folder_are_no_text_of_it(tmp_path, monkeypatch):
    # --input=data/text read the meta.json of the first preparation
    for name in ("a.txt", "meta.json", "book/meta.json", "book/train.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "b"}')
    monkeypatch.chdir(tmp_path)
    files = Files([pathlib.Path(".")])
    assert [file.name for file in files.files] == ["a.txt", "meta.json"] and files.source == tmp_path.name


def test_an_option_can_be_of_some_files(tmp_path):
    files = [tmp_path / name for name in ("mail.csv", "b.csv", "rows.jsonl")]
    for given, values in {
        "mail.csv:body,b.*:dc:title": ["body", "dc:title", "text"],
        "mail.csv:a,*.csv:b,c": ["a", "b", "c"],
        "body, cleaned": ["body, cleaned"] * 3,  # a comma in a name
        None: ["text"] * 3,
    }.items():
        assert [*per_file(given, "text", files).values()] == values


# which encoding a text is in

ENGLISH = "“It’s fine” – he said…\n" * 9
GERMAN = "Die Straße führt über die Brücke, und der Müller grüßt schön. " * 3
CZECH = "Příliš žluťoučký kůň úpěl ďábelské ódy. " * 3
RUSSIAN = "Все счастливые семьи похожи друг на друга, каждая несчастлива по-своему. " * 3
CHINESE = "道可道，非常道。名可名，非常名。无名天地之始；有名万物之母。" * 5


@pytest.mark.parametrize(
    ("text", "encoding"),
    [(ENGLISH, "cp1252"), (GERMAN, "cp1252"), (CZECH, "cp1250"), (RUSSIAN, "koi8_r"), (CHINESE, "gb18030")],
)
def test_a_text_that_is_not_utf8_is_read_by_its_letters_and_says_so(tmp_path, capsys, text, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert documents([tmp_path / "a.txt"]) == [text]
    assert f"a.txt as {encoding}, by its letters: say --encoding=NAME if it is another" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_a_byte_order_mark_says_the_encoding(tmp_path, encoding, capsys):
    (tmp_path / "a.txt").write_bytes(GERMAN.encode(encoding))
    assert documents([tmp_path / "a.txt"]) == [GERMAN] and "reading" not in capsys.readouterr().out


def test_quotation_marks_of_windows_are_no_control_characters(tmp_path):
    # --encoding=latin-1, which people mean by it, gave U+0093 and U+0094
    (tmp_path / "a.txt").write_bytes(ENGLISH.encode("cp1252"))
    assert documents([tmp_path / "a.txt"], encoding="latin-1") == [ENGLISH]


def test_utf8_comes_first_and_each_file_can_have_its_encoding(tmp_path):
    (tmp_path / "a.txt").write_bytes(GERMAN.encode())
    (tmp_path / "b.txt").write_bytes(GERMAN.encode("cp1252"))
    (tmp_path / "c.txt").write_bytes(RUSSIAN.encode("cp866"))
    (tmp_path / "d.txt").write_bytes("text".encode("utf-16-le"))
    assert documents([tmp_path], encoding="c.*:cp866,d.*:utf-16-le,cp1252") == [GERMAN, GERMAN, RUSSIAN, "text"]


def test_a_page_says_its_own_encoding(tmp_path):
    page = f'<html><meta charset="koi8-r"><p>{RUSSIAN}'.encode("koi8-r")
    (tmp_path / "a.html").write_bytes(page)
    assert encoding_of(tmp_path / "a.html")[0] == "koi8-r"


def test_what_is_surely_nothing_else_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(1, 256)) * 9)
    with pytest.raises(UserError, match=r"not UTF-8 \(byte 127 .*\), nor surely anything else: say --encoding=NAME"):
        encoding_of(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_bytes(RUSSIAN.encode("cp1251"))  # charset-normalizer prefers koi8_r, with its capitals
    with pytest.raises(UserError, match="nor surely anything else"):
        encoding_of(tmp_path / "a.txt")
    with pytest.raises(
        UserError, match=r"\(UnicodeDecodeError: 'gb18030' codec .*\): is its suffix right, and --encoding"
    ):
        documents([tmp_path / "a.txt"], encoding="gb18030")
