"""Which files are read of those that lie in folders, and which column of which table."""

import os
import pathlib

import pytest

from fusedgpt.data.corpus import Files
from fusedgpt.errors import UserError
from tests.fusedgpt.data.test_corpus import documents


def test_files_and_folders_keep_their_order(tmp_path, capsys):
    for name in ("b/2.txt", "b/1.md", "a.txt", "b/.git/3.txt", "b/4.png", "b/c/0.TXT", "b/5.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("" if "5" in name else name)
    assert documents([tmp_path / "b", tmp_path / "a.txt"]) == ["b/1.md", "b/2.txt", "b/c/0.TXT", "a.txt"]
    said = capsys.readouterr().out
    assert "left out: 1 files of other kinds (1 .png): a text with another suffix is read if you name it\n" in said
    assert "left out: 1 empty files" in said


def test_folders_that_are_links_are_read_once(tmp_path, capsys):
    # folders behind links used to be left out in silence
    for name in ("apart/1.txt", "apart/.hidden.txt", "in/2.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "in" / "a").symlink_to(tmp_path / "apart")
    (tmp_path / "in" / "b").symlink_to(tmp_path / "apart")
    (tmp_path / "apart" / "up").symlink_to(tmp_path / "in")
    (tmp_path / "in" / "gone").symlink_to(tmp_path / "nowhere")
    assert documents([tmp_path / "in"]) == ["in/2.txt", "apart/1.txt"]
    assert "left out: 1 files of other kinds (1 without a suffix)" in capsys.readouterr().out


def test_a_file_that_is_named_twice_is_read_once(tmp_path, capsys):
    # of a folder and a file in it, the file was two documents, of which one could be in each split
    for name in ("in/a.txt", "in/sub/b.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    again = [tmp_path / "in", tmp_path / "c.txt", tmp_path / "link", tmp_path / "in" / "sub" / ".." / "a.txt"]
    assert documents([tmp_path / "c.txt", *again]) == ["c.txt", "in/a.txt", "in/sub/b.txt"]
    assert "left out: 4 files that --input names twice" in capsys.readouterr().out


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "secret").mkdir()
    (tmp_path / "a.txt").write_text("a")
    scandir = os.scandir

    def refusing(path):
        if os.fspath(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match=r"cannot read the folder .*secret: Permission denied"):
        Files([tmp_path])


def test_what_the_preparation_wrote_itself_is_left_out_however_the_folder_is_written(tmp_path, monkeypatch):
    # data/text/prepare.py --input=data/text used to read its own meta.json the second time
    (tmp_path / "folder").mkdir()
    for name in ("a.txt", "meta.json"):
        (tmp_path / "folder" / name).write_text("text")
    monkeypatch.chdir(tmp_path)
    for path in ("folder", "folder/../folder", tmp_path / "folder"):
        files = Files([pathlib.Path(path)], besides=tmp_path / "folder" / "meta.json")
        assert [file.name for file in files.files] == ["a.txt"] and files.source == "folder"
    monkeypatch.chdir(tmp_path / "folder")
    assert Files([pathlib.Path(".")]).source == "folder"  # it used to be empty


def test_the_data_sets_in_a_folder_are_no_text_of_it(tmp_path):
    # --input=. read the meta.json of an earlier preparation, "row 1 of book/meta.json has no 'text'"
    for name in ("a.txt", "meta.json", "book/meta.json", "book/train.bin", "shards/meta.json", "shards/train_0000.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "b"}')
    assert [file.name for file in Files([tmp_path]).files] == ["a.txt", "meta.json"]


def test_what_word_and_blanks_leave_in_a_folder_is_no_document(tmp_path, capsys):
    # the lock of an open document stopped the preparation, and a file of blanks became a document
    for name in ("a.txt", "~$b.docx", "c.doc", "d.png"):
        (tmp_path / name).write_text("text")
    (tmp_path / "blank.txt").write_text("\ufeff \n\t\n", encoding="utf-8")
    assert documents([tmp_path]) == ["text"]
    said = capsys.readouterr().out
    assert "left out: 2 files of other kinds (1 .doc, 1 .png): save .doc, .rtf and .pages as .docx; a text" in said
    assert "left out: 1 empty files" in said


def test_each_file_can_have_its_own_column(tmp_path):
    (tmp_path / "mail.csv").write_text("subject,body\nhello,text of the mail\n")
    (tmp_path / "b.csv").write_text("dc:title,id\ntitle,1\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "row", "body": "no"}')
    with pytest.raises(UserError, match=r"no 'text', but 'subject', 'body': .* as --text_column=mail\.csv:body does"):
        documents([tmp_path / "mail.csv"])
    paths = [tmp_path]
    assert documents(paths, column="mail.csv:body,b.*:dc:title") == ["title", "text of the mail", "row"]
    assert documents([tmp_path / "b.csv"], column="dc:title") == ["title"]
    with pytest.raises(
        UserError, match=r"names 'mial.csv', which no file matches: the tables are b.csv, mail.csv, rows"
    ):
        Files(paths, "mial.csv:body")
    with pytest.raises(UserError, match="names 2 columns for the same files: give one, and FILE:COLUMN for files"):
        Files(paths, "mail.csv:body,body,text")


def test_a_column_that_would_never_be_taken_is_refused(tmp_path):
    # the subject was read, and nothing said that the second pair counts for nothing
    for name in ("mail.csv", "b.csv"):
        (tmp_path / name).write_text("subject,body\nhello,text of the mail\n")
    with pytest.raises(UserError, match=r"names 'mail.csv', whose files have a column by what is before it: put 'mail"):
        Files([tmp_path], "*.csv:subject,mail.csv:body")
    assert documents([tmp_path], column="mail.csv:body,*.csv:subject") == ["hello", "text of the mail"]


def test_a_column_may_have_a_comma_in_its_name(tmp_path):
    # it was split into two columns for the same files
    (tmp_path / "a.csv").write_text('id,"body, cleaned"\n1,the text of a row\n')
    with pytest.raises(UserError, match=r"has no 'id,text', but .* as --text_column='body, cleaned' does"):
        documents([tmp_path], column="id,text")
    assert documents([tmp_path], column="body, cleaned") == ["the text of a row"]
