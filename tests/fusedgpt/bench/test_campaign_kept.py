"""What another machine takes over from a campaign: a copy of its results and of the graphs that were compiled."""

import os

import pytest

from fusedgpt.bench import campaign
from fusedgpt.errors import UserError
from tests.fusedgpt.bench.test_campaign import CPU, Machine


def test_another_machine_goes_on_with_what_was_kept(tmp_path, monkeypatch):
    keep = tmp_path / "keep"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "one" / "graphs"))
    (tmp_path / "one" / "graphs" / "aa").mkdir(parents=True)
    (tmp_path / "one" / "graphs" / "aa" / "code.py").write_text("compiled")
    machine = Machine(monkeypatch, tmp_path / "one" / "h200", rows_a_step=10)
    machine.run(keep=str(keep))
    written = (tmp_path / "one" / "h200" / "tests.json").read_bytes()

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "two" / "graphs"))
    (tmp_path / "two" / "h200").mkdir(parents=True)
    (tmp_path / "two" / "h200" / "tests.json").write_text("{}")  # of an older checkout
    monkeypatch.setattr(campaign, "folder", lambda *_: tmp_path / "two" / "h200")
    said, ran = machine.run(keep=str(keep))
    assert [path.name for path in keep.iterdir()] == [f"{campaign.short_name(CPU)}.tar.gz"]
    assert ran == [] and said.endswith("nothing is missing")  # machine.rows stand for rows.jsonl
    assert (tmp_path / "two" / "h200" / "tests.json").read_bytes() == written
    assert (tmp_path / "two" / "graphs" / "aa" / "code.py").read_text() == "compiled"


def kept(monkeypatch, tmp_path, name):
    """What another campaign on the same machine keeps, with results in a folder called `name`."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "graphs"))
    return campaign.Kept(tmp_path / "keep", "h200", tmp_path / name)


def test_a_copy_replaces_results_only_if_it_is_later(tmp_path, monkeypatch):
    # the larger file won: rows of an older PyTorch replaced the few new ones
    def write(name, text):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "rows.jsonl").write_text(text)

    def read(name):
        return (tmp_path / name / "rows.jsonl").read_text()

    write("one", "many old rows")
    kept(monkeypatch, tmp_path, "one").write()
    kept(monkeypatch, tmp_path, "two").write()  # goes on from them
    assert read("two") == "many old rows"
    write("two", "few")
    kept(monkeypatch, tmp_path, "two")  # an interrupted call kept nothing of these
    assert read("two") == "few"
    kept(monkeypatch, tmp_path, "two").write()
    kept(monkeypatch, tmp_path, "one")
    assert read("one") == "few"
    write("three", "measured without a copy")
    write("four", "")  # a fresh checkout
    kept(monkeypatch, tmp_path, "three")
    kept(monkeypatch, tmp_path, "four")
    assert read("three") == "measured without a copy" and read("four") == "few"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_a_copy_that_was_cut_is_set_aside(tmp_path, monkeypatch, capsys, share):
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "rows.jsonl").write_bytes(os.urandom(9999))
    kept(monkeypatch, tmp_path, "one").write()
    tar = tmp_path / "keep" / "h200.tar.gz"
    tar.write_bytes(tar.read_bytes()[: int(share * tar.stat().st_size)])
    again = kept(monkeypatch, tmp_path, "two")
    assert f"{tar} is damaged" in capsys.readouterr().out and not (tmp_path / "two").exists()
    assert (tmp_path / "keep" / "h200.tar.gz.damaged").exists() and not tar.exists()
    again.write()
    assert tar.exists()


def test_a_folder_that_cannot_be_written_is_refused_at_once_and_later_only_said(tmp_path, monkeypatch, capsys):
    # the first step ran for nine minutes, and then the campaign ended
    keep = tmp_path / "keep"
    keep.write_text("a file")
    machine = Machine(monkeypatch, tmp_path / "results", rows_a_step=10)
    with pytest.raises(UserError, match=r"cannot write .*keep"):
        machine.run(keep=str(keep))
    assert machine.ran == []
    keep.unlink()

    def lose(*step):
        if keep.is_dir():
            keep.rmdir()
            keep.write_text("the disk is gone")
        return machine.step(*step)

    monkeypatch.setattr(campaign, "_step", lose)
    assert machine.run(keep=str(keep))[0].endswith("; nothing is missing")
    assert "== not kept: cannot write " in capsys.readouterr().out
