"""Checkpoints in shards: read whole, damaged, hostile, kept and removed."""

import io
import os
import pathlib
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from fusedgpt.errors import UserError
from fusedgpt.parallel import shard_files
from fusedgpt.runs import checkpoint, run_folder
from tests.conftest import assert_same_bytes, rows, run, tensors
from tests.launch import script


def into_shards(path):
    """Move the tensors of the checkpoint `path` into a folder of shards."""
    saved, tensors = shard_files.split(checkpoint.load(path))
    folder = shard_files.free_name(path.parent, saved["iter_num"])
    with warnings.catch_warnings():  # there are no other ranks on purpose
        warnings.simplefilter("ignore")
        dcp.save(tensors, storage_writer=shard_files._writer(path.parent / folder), no_dist=True)
    files = {file.name: shard_files._checksum(file) for file in (path.parent / folder).iterdir()}
    saved["shards"] = {"folder": folder, "files": files}
    checkpoint.save(path, saved)


@pytest.fixture
def folder(small_run, tmp_path):
    """A finished run in shards: ckpt.pt of iteration 10, which is best.pt too, and ckpt-5.pt."""
    folder = shutil.copytree(small_run, tmp_path / "run")
    into_shards(folder / "ckpt-5.pt")
    into_shards(folder / "best.pt")
    os.remove(folder / "ckpt.pt")  # a copy has lost the second name
    os.link(folder / "best.pt", folder / "ckpt.pt")
    return folder


def test_shards_are_read_as_the_file_was(folder, small_run):
    assert not torch.load(folder / "ckpt.pt", weights_only=True)["model"]  # the tensors are elsewhere
    assert sorted(path.name for path in folder.glob("shards-*")) == ["shards-10", "shards-5"]
    for name in ("ckpt.pt", "ckpt-5.pt", "best.pt"):
        saved, before = checkpoint.load(folder / name), checkpoint.load(small_run / name)
        assert_same_bytes(tensors(saved), tensors(before))
        same = before.keys() - {"model", "optimizer"}
        assert {key: saved[key] for key in same} == {key: before[key] for key in same}
        assert saved["optimizer"]["param_groups"] == before["optimizer"]["param_groups"]


def test_what_reads_a_run_reads_shards(folder, small_run, exported, tmp_path, data):
    draws = ("--num_samples=1", "--start=a", "--max_new_tokens=20")
    text = [script("sample.py", f"--out_dir={out}", *draws).stdout.split("\n", 1)[1] for out in (folder, small_run)]
    assert text[0] == text[1]  # after the line that names the checkpoint
    script("export.py", folder, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
    run(folder, data, init_from="resume", max_iters=12)
    assert [row["iter"] for row in rows(folder)] == list(range(12))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_damaged_shards_fall_back_to_the_checkpoint_before(folder, name, capsys):
    damaged = folder / "shards-10" / name
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    saved, path = run_folder.load_latest(folder)
    assert path.name == "ckpt-5.pt" and saved["iter_num"] == 5
    assert f"ckpt.pt is damaged or gone. Taking {path}, of iteration 5, instead" in capsys.readouterr().out
    shutil.rmtree(folder / "shards-5")
    with pytest.raises(UserError, match=f"{name} is damaged, or not there"):
        run_folder.load_latest(folder)


def test_metadata_that_would_run_code_is_refused(folder, tmp_path):
    # PyTorch's reader unpickles it, and an unpickled object may be a call of any function
    class Call:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "it ran",)

    # in protocol 4, a dotted name leads from PyTorch's own module to os, which that module imports
    module = b"torch.distributed.checkpoint.metadata"
    command = f"touch '{tmp_path / 'it ran'}'".encode()
    names = b"".join(b"\x8c" + bytes([len(name)]) + name for name in (module, b"os.system"))
    through_os = b"\x80\x04" + names + b"\x93\x8c" + bytes([len(command)]) + command + b"\x85R."
    metadata = folder / "shards-10" / ".metadata"
    saved = torch.load(folder / "ckpt.pt", weights_only=True)
    for hostile in (pickle.dumps(Call()), through_os):
        metadata.write_bytes(hostile)
        saved["shards"]["files"][".metadata"] = shard_files._checksum(metadata)  # as an attacker would write it
        torch.save(saved, folder / "ckpt.pt")
        with pytest.raises(UserError, match=r"cannot read .*which is no part of a checkpoint"):
            checkpoint.load(folder / "ckpt.pt")
        assert not (tmp_path / "it ran").exists()
    pickle.loads(through_os)
    assert (tmp_path / "it ran").exists()  # PyTorch's reader runs it
    for outside in ("../elsewhere", "/etc"):
        saved["shards"]["folder"] = outside
        torch.save(saved, folder / "ckpt.pt")
        with pytest.raises(UserError, match="its shards are not beside it"):
            checkpoint.load(folder / "ckpt.pt")


def test_shards_that_nothing_names_are_removed_and_those_of_a_run_set_aside_go_with_it(folder):
    (folder / "shards-7").mkdir()  # left by a save that was killed
    whole = (folder / "best.pt").read_bytes()
    os.unlink(folder / "best.pt")
    (folder / "best.pt").write_bytes(b"damaged")  # it might name any shards
    run_folder.remove_unused_shards(folder)
    assert (folder / "shards-7").exists()
    (folder / "best.pt").write_bytes(whole)
    shutil.copy(folder / "ckpt-5.pt", folder / "before the change.pt")
    os.unlink(folder / "ckpt-5.pt")
    run_folder.remove_unused_shards(folder)
    assert sorted(path.name for path in folder.glob("shards-*")) == ["shards-10", "shards-5"]  # a copy counts
    os.replace(folder / "before the change.pt", folder / "ckpt-5.pt")
    before = tensors(checkpoint.load(folder / "ckpt.pt"))
    run_folder.set_aside(folder, print)
    assert not list(folder.glob("shards-*")) and not run_folder.checkpoints(folder)
    assert_same_bytes(tensors(checkpoint.load(folder / "previous-1" / "ckpt.pt")), before)


def test_shards_that_do_not_fit_the_model_are_refused(folder):
    for name in ("transformer.wte.weight", "nothing"):
        with pytest.raises(UserError, match=r"cannot read .*: it is damaged, belongs to another model"):
            shard_files.read(folder / "shards-10", {f"model/{name}": torch.zeros(3, 3)})


def test_shards_that_python_3_13_wrote_are_read_by_any():
    # only there, a path is pickled with the module name pathlib._local: no shard could be read
    written = b"cpathlib._local\nPosixPath\n(Vfolder\ntR."
    assert shard_files._Unpickler(io.BytesIO(written)).load() == pathlib.PosixPath("folder")


def test_shards_that_python_3_11_2_wrote_are_read_by_any():
    # Debian 12's Python names a member of an Enum by getattr: no shard could be read there
    member = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nV%b\ntR."
    found = shard_files._Unpickler(io.BytesIO(member % b"TORCH_PRESERVE_FORMAT")).load()
    assert found is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT
    with pytest.raises(KeyError):  # it is no way to what a class has besides, such as __init_subclass__.__globals__
        shard_files._Unpickler(io.BytesIO(member % b"__init_subclass__")).load()
