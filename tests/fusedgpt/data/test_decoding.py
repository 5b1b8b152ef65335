"""Which encoding a text is in."""

import pytest

from fusedgpt.data.decoding import encoding_of
from fusedgpt.errors import UserError
from tests.fusedgpt.data.test_texts import documents

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
