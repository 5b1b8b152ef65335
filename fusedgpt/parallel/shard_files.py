"""The tensors of a checkpoint that ranks share: a folder with a file per rank (torch.distributed.checkpoint).

The checkpoint itself, such as ckpt.pt, is then a small file that names the folder and has a checksum of each file in
it. It is replaced once the folder is complete, and counts from then on. Reading runs no code.
"""

import contextlib
import hashlib
import operator
import pathlib
import pickle
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, distributed
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from fusedgpt.errors import UserError, first_line

METADATA = ".metadata"
_DAMAGED = "cannot read {}: it is damaged, belongs to another model, or exceeds this machine's memory"
_WHATEVER = (CheckpointException, Exception)  # what a foreign folder may raise; CheckpointException is no Exception
_RECORDS = "Metadata TensorStorageMetadata BytesStorageMetadata TensorProperties ChunkStorageMetadata MetadataIndex"
# the classes in PyTorch's metadata. All others are refused, such as os.system through a module that imports os
_CLASSES = {
    "torch.distributed.checkpoint.metadata": {*_RECORDS.split(), "StorageMeta", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", "float32", "strided"},
    "torch.serialization": {"_get_layout"},
    "torch._utils": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}


def split(state: dict) -> tuple[dict, dict[str, Tensor]]:
    """A checkpoint without its tensors, and those tensors by name: 'model/NAME', 'optimizer/NUMBER/KEY'."""
    tied = {"lm_head.weight"} if state["extra_model_args"].get("tie_embeddings", True) else set()  # the weight of wte
    tensors = {f"model/{name}": w for name, w in state["model"].items() if name not in tied}
    for number, each in state["optimizer"]["state"].items():
        tensors |= {f"optimizer/{number}/{key}": value for key, value in each.items()}
    groups = state["optimizer"]["param_groups"]
    return {**state, "model": {}, "optimizer": {"state": {}, "param_groups": groups}}, tensors


def free_name(out_dir: pathlib.Path, iteration: int) -> str:
    """A folder name that is not taken yet."""
    names = (f"shards-{iteration}{f'-{n}' if n else ''}" for n in range(10_000))
    return next(name for name in names if not (out_dir / name).exists())


def write_together(folder: pathlib.Path, tensors: dict[str, Tensor], group: distributed.ProcessGroup) -> dict[str, str]:
    """Write `tensors`; each rank of `group` (gloo) has its part on the CPU. Returns each file's checksum.

    Raises UserError on every rank if one cannot write, or if rank 0 does not see what the others wrote.
    """
    with _failure_said(f"cannot write {folder}", CheckpointException):
        dcp.save(tensors, storage_writer=_writer(folder), process_group=group)
    rank, files = distributed.get_rank(group), {}
    written = [*folder.glob(f"__{rank}_*.distcp"), *[folder / METADATA] * (rank == 0)]
    for found in _from_all({file.name: _checksum(file) for file in written}, group):
        files |= found
    if unseen := _from_all([name for name in files if not (folder / name).exists()], group)[0]:
        raise UserError(f"rank 0 does not see {folder / unseen[0]}: all nodes have to share out_dir")
    return files


def _from_all(value, group=None):
    values = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(values, value, group=group)
    return values


def _writer(folder):
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)  # copying ahead is for tensors on a GPU
    # PyTorch's mkdir also makes parents: it would bring back a run's folder that was moved meanwhile
    writer.fs.mkdir = lambda path: pathlib.Path(path).mkdir(exist_ok=not pathlib.Path(path).is_symlink())
    return writer


def verify(folder: pathlib.Path, files: Mapping[str, str]) -> None:
    """Raise UserError unless every file has its checksum. If ranks read together, each checks some of the files."""
    together = distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if together else (0, 1)
    bad = [name for name in sorted(files)[rank::world] if not _is_whole(folder / name, files[name])]
    if together:
        bad = [name for names in _from_all(bad) for name in names]
    if bad:
        raise UserError(f"{folder / bad[0]} is damaged, or not there")


def read(folder: pathlib.Path, tensors: dict[str, Tensor]) -> None:
    """Fill `tensors` from a folder. A DTensor gets this rank's part. Raises UserError if they do not fit."""
    with _failure_said(_DAMAGED.format(folder), *_WHATEVER), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each rank reads alone on purpose: it knows its part
        dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)


def read_whole(folder: pathlib.Path, optimizer: bool) -> tuple[dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """The model's and, if asked for, the optimizer's tensors in a folder, each in one piece. Raises UserError."""
    model, state = {}, {}
    with _failure_said(_DAMAGED.format(folder), *_WHATEVER):
        there = _Reader(folder).read_metadata().state_dict_metadata
        for name, kind in there.items():
            part, rest = name.split("/", 1)
            tensor = torch.empty(kind.size, dtype=kind.properties.dtype)
            if part == "model":
                model[rest] = tensor
            elif optimizer:
                number, key = rest.split("/")
                state.setdefault(int(number), {})[key] = tensor
        own = {f"model/{name}": tensor for name, tensor in model.items()}
        own |= {f"optimizer/{number}/{key}": w for number, each in state.items() for key, w in each.items()}
        model.setdefault("lm_head.weight", model["transformer.wte.weight"])  # tied
    read(folder, own)
    return model, state


@contextlib.contextmanager
def _failure_said(what, *kinds):
    """Raise UserError with the cause for an exception of one of `kinds`. One of several ranks' says which rank's."""
    try:
        yield
    except kinds as error:
        rank, reason = 0, error
        if isinstance(error, CheckpointException):
            rank, (reason, _) = next(iter(error.failures.items()))
        why = f"{type(reason).__name__}: {first_line(reason):.150}"
        if "inline_container" in why:  # PyTorch's writer names the place in its code, not the cause
            why = "no space left, or the disk refuses"
        raise UserError(f"{what} (rank {rank}: {why})") from None


def _checksum(file):
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _is_whole(file, checksum):
    with contextlib.suppress(OSError):
        return _checksum(file) == checksum
    return False


class _Unpickler(pickle.Unpickler):
    def find_class(self, module, name):
        module = "pathlib" if module == "pathlib._local" else module  # Python 3.13's name for it
        if (module, name) == ("builtins", "getattr"):  # with it, Python before 3.11.4 names a member of an Enum
            return operator.getitem  # which gives that member, and no attribute of anything
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of a checkpoint")
        return super().find_class(module, name)


class _Reader(dcp.FileSystemReader):
    """PyTorch's reader, but with an unpickler that runs no code: PyTorch's would run what a foreign file names."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        with open(self.path / METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
