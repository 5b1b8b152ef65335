"""Which files are read of those that lie in folders, and what an option says of some of them."""

import pathlib

import pytest

from fusedgpt.data.inputs import per_file
from fusedgpt.data.texts import Files
from fusedgpt.errors import UserError
from tests.fusedgpt.data.test_texts import documents


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
    assert [file.name for file in Files([tmp_path], tmp_path / "out").files] == ["a.txt", "meta.json"]
    monkeypatch.chdir(tmp_path)
    files = Files([pathlib.Path(".")], tmp_path / "book" / "..")
    assert [file.name for file in files.files] == ["a.txt"] and files.source == tmp_path.name  # which was empty


def test_an_option_can_be_of_some_files(tmp_path):
    files = [tmp_path / name for name in ("mail.csv", "b.csv", "rows.jsonl")]
    for given, values in {
        "mail.csv:body,b.*:dc:title": ["body", "dc:title", "text"],
        "mail.csv:a,*.csv:b,c": ["a", "b", "c"],
        "body, cleaned": ["body, cleaned"] * 3,  # a comma in a name
        None: ["text"] * 3,
    }.items():
        assert [*per_file("text_column", given, "text", files).values()] == values
    with pytest.raises(UserError, match=r"names 'mial.csv', which no file matches: there are mail.csv, b.csv, rows"):
        per_file("text_column", "mial.csv:body", "text", files)
