"""The whole state of a run in one file, or, if ranks share the model, in a file and a folder.

A checkpoint is nanoGPT's dict (model, optimizer, model_args, iter_num, best_val_loss, config) and more: the scaler's
state, `extra_model_args` (fields of GPTConfig that nanoGPT does not have), the meta of the data, the attention,
dtype and compile that ran, and `best_iter` (the iteration of best_val_loss). It holds no random state, because batches
and dropout follow from (seed, iteration). Loading runs no code.

The folder, which `shards` names, lies beside the file and holds the tensors (shard_files.py).
"""

import errno
import os
import pathlib
import zipfile

import torch
from torch.optim import Optimizer

from fusedgpt.dimensions import COUNTED, IMPLEMENTATION, GPTConfig
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.machine.files import atomic
from fusedgpt.training.optimizer import TWIN

NO_DAMAGE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE, errno.EACCES, errno.EPERM)  # not the file's fault
NANOGPTS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias")  # fields of its GPTConfig
NANOGPTS_ACTIVATION = (
    "nanoGPT's checkpoints do not name their activation: taking the exact GELU, which nanoGPT has had since May 2023."
    " An older one needs --activation=gelu_tanh, and activation_function gelu_new in the config.json of its export"
)


def save(path: str | os.PathLike, state: dict) -> None:
    """Write `state`, whole or not at all. Raises UserError if the disk is full or cannot be written."""
    with atomic(path) as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch.save's exception for a write that failed
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            if "writ" not in str(error):
                raise
            raise OSError(errno.ENOSPC, "no space left, or the disk refuses") from error


def load(path: str | os.PathLike, verify: bool = True, whole: bool = True, optimizer: bool = True) -> dict:
    """The state in `path`, on the CPU. Raises UserError if it is missing, damaged, or no checkpoint of a GPT.

    Tensors are mapped from the file and read when they are used: copy those that must outlive it.

    verify: compare the checksums, which reads the whole file. Without it, do not use the tensors.
    whole: with `verify`, read each tensor in a folder of shards in one piece. Without it, `read_shards` reads them.
    optimizer: with `whole`, read the optimizer's tensors too.
    """
    if not os.path.isfile(path):
        raise UserError(f"{path} does not exist, or is no file: train first, or name the folder of another run")
    try:
        # PyTorch writes checksums but does not compare them. The older format, which is no zip file, has none
        zipped = zipfile.is_zipfile(path)
        if zipped and verify and (torn := zipfile.ZipFile(path).testzip()):
            raise ValueError(f"the checksum of {torn} is wrong")
        mapped = zipped and os.fspath(path).isprintable()  # PyTorch cannot map a file whose name is not UTF-8
        state = _checked(torch.load(path, map_location="cpu", weights_only=True, mmap=mapped))
    except Exception as error:  # a damaged file can raise anything
        if out_of_memory(error) or getattr(error, "errno", None) in NO_DAMAGE or "mmap" in str(error):
            raise
        why = f"{type(error).__name__}: {first_line(error)[:120]}"
        raise UserError(f"{path} is damaged or no checkpoint of a GPT ({why})") from error
    if "shards" in state:
        from fusedgpt.parallel import shard_files  # PyTorch's reader takes a second to import

        folder = pathlib.Path(path).parent / state["shards"]["folder"]
        if verify:
            shard_files.verify(folder, state["shards"]["files"])
        if verify and whole:
            state["model"], state["optimizer"]["state"] = shard_files.read_whole(folder, optimizer)
        state["shards"] = {**state["shards"], "path": str(folder)}
    return state


def read_shards(saved: dict, optimizer: Optimizer, model: torch.nn.Module) -> None:
    """Fill a sharded model and its optimizer from the folder in `saved`. Raises UserError if they do not fit."""
    from fusedgpt.parallel import shard_files

    _require_same_optimizer(saved, optimizer)
    forms = _forms(optimizer, saved) if saved["iter_num"] else []
    state = {n: {key: torch.zeros_like(t) for key, t in form.items()} for n, (_, form) in enumerate(forms)}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    ours = {"model": weights, "optimizer": {"state": state, "param_groups": []}}
    _, tensors = shard_files.split(ours | {"extra_model_args": saved["extra_model_args"]})
    shard_files.read(pathlib.Path(saved["shards"]["path"]), tensors)
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _checked(state):
    """`state`, with all fields. Raises ValueError, or what a wrong type raises, if it is damaged."""
    extra = {"activation": "gelu"}  # of nanoGPT's
    # what nanoGPT lacks, or those who share its checkpoints leave out
    bare = {"optimizer": {"state": {}, "param_groups": []}, "iter_num": 0, "best_val_loss": torch.inf, "config": {}}
    state = bare | {"best_iter": None, "scaler": {}, "extra_model_args": extra, **state}
    state["model_args"] = dict(state["model_args"])
    state["best_val_loss"] = float(state["best_val_loss"])
    model = {name.removeprefix("_orig_mod."): w for name, w in state["model"].items()}
    # nanoGPT's older checkpoints hold the causal mask of each layer as if it were a weight
    state["model"] = {name: w for name, w in model.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
    for name, w in state["model"].items():
        _require(isinstance(w, torch.Tensor) and w.dtype == torch.float32, f"the weight {name} is not float32")
    if "shards" in state:
        folder, files = state["shards"]["folder"], state["shards"]["files"]
        _require(folder == os.path.basename(folder) != "..", "its shards are not beside it")
        _require(all(name == os.path.basename(name) for name in files), "its shards are not in their folder")
    return state


def _require(condition, why):
    if not condition:
        raise ValueError(why)


def restore_optimizer(saved: dict, optimizer: Optimizer) -> None:
    """Give `optimizer` its state in the checkpoint `saved`.

    Raises UserError if another kind of optimizer wrote it, or if a parameter lacks a tensor of its shape and dtype:
    AdamW's fused kernel does not check, and would read and write beyond a tensor that is too short.
    """
    groups = optimizer.state_dict()["param_groups"]  # weight decay and betas are settings of this run, not state
    _require_same_optimizer(saved, optimizer)
    state, theirs = saved["optimizer"]["state"], saved["optimizer"]["param_groups"]
    if not saved["iter_num"] and not state:
        return  # the optimizer has no state before its first step
    then, now = ([len(group["params"]) for group in each] for each in (theirs, groups))
    if then != now:
        how = "export the run before you freeze or add weights, and begin a new one with --init_from=FOLDER"
        raise UserError(f"the checkpoint trained {sum(then)} weights, and this model.py trains {sum(now)}: {how}")
    # a parameter that had no gradient yet, such as a head that the loss skips, has no state
    forms = {number: form for number, form in enumerate(_forms(optimizer, saved)) if number in state}
    found = {n: {key: _form(value) for key, value in each.items()} for n, each in state.items()}
    if not state or found != {n: {key: _form(t) for key, t in form.items()} for n, (_, form) in forms.items()}:
        why = "a tensor is missing, or has another shape or dtype. Take another checkpoint, such as best.pt"
        raise UserError(f"the optimizer's state in the checkpoint does not fit the model: {why}")
    # copy: the loaded tensors are mapped from the file
    copies = {n: {key: _copy_like(value, p) for key, value in state[n].items()} for n, (p, _) in forms.items()}
    optimizer.load_state_dict({"state": copies, "param_groups": groups})


def _require_same_optimizer(saved, optimizer):
    was = saved["config"].get("optimizer", "adamw")
    now = "muon" if any("momentum" in group for group in optimizer.param_groups) else "adamw"
    if was != now:
        how = f"resume with --optimizer={was}, or start anew with --init_from=scratch"
        raise UserError(f"optimizer={now} cannot use the state of {was}: {how}")


def _forms(optimizer, saved):
    """[(p, {key: a tensor like the state under that key})] for each parameter p in the checkpoint `saved`."""
    step, averaged = torch.zeros(()), [TWIN] * bool(saved["config"].get("ema_decay"))
    of_muon, of_adamw = ["momentum_buffer", *averaged], ["exp_avg", "exp_avg_sq", *averaged]
    return [
        (p, dict.fromkeys(of_muon, p) if "momentum" in group else {"step": step, **dict.fromkeys(of_adamw, p)})
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def _copy_like(value, p):
    """A copy of `value`, sharded like `p` if they have the same shape."""
    value = value.clone(memory_format=torch.contiguous_format)
    if hasattr(p, "device_mesh") and value.shape == p.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None)  # None: nothing is sent
    return value


def _form(value):
    return (str(value.dtype), tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__


def model_args(config: dict) -> dict[str, dict]:
    """The fields of a model's `config`, a GPTConfig as a dict, in a checkpoint: nanoGPT's, and ours beside them.

    A field that makes the model no GPT-2 is among nanoGPT's too, so that nanoGPT refuses the checkpoint.
    """
    beside = {name: value for name, value in config.items() if name not in (*NANOGPTS, *IMPLEMENTATION)}
    ours = {name: value for name, value in beside.items() if value is not None}  # None: as in a GPT-2
    other = {name: config[name] for name in COUNTED if config[name] != getattr(GPTConfig, name)}
    return {"model_args": {name: config[name] for name in NANOGPTS} | other, "extra_model_args": ours}


def is_nanogpts(state: dict) -> bool:
    """Whether a checkpoint was written by nanoGPT, which does not say its attention or activation."""
    return "attention" not in state
