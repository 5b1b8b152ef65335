"""How a run resumes: whether there is one, with which settings, and how its state is restored."""

import contextlib
import dataclasses
import math
import pathlib
from typing import Any

from fusedgpt.attention import functions
from fusedgpt.attention.table import is_own
from fusedgpt.data import dataset
from fusedgpt.errors import UserError, shown
from fusedgpt.interchange import tokenizer_json
from fusedgpt.parallel import distributed
from fusedgpt.runs import checkpoint, run_folder
from fusedgpt.runs.run_folder import Say
from fusedgpt.settings import Settings, validate
from fusedgpt.training.optimizer import TWIN, exchange

SETTLED = ("max_iters", "lr_decay_iters")  # settings that `minutes` sets
# settings that a resumed run does not take over
NOT_RESUMED = ("init_from", "out_dir", "eval_only", "profile")
# settings that a process has used before it reads the checkpoint
IN_USE = ("device", "backend", "timeout", "parallel", "shard_size", "deterministic")


def where_to_start(s: Settings, otherwise: str = "scratch") -> Settings:
    """`s` with init_from resolved. 'auto' resumes a run in out_dir, and so does a restarted process; or `otherwise`."""
    there = bool(run_folder.checkpoints(s.out_dir))
    own = run_folder.is_this_launch(s.out_dir, distributed.launch(), distributed.restarted())
    if there and (own or s.init_from == "auto"):
        return dataclasses.replace(s, init_from="resume")
    return dataclasses.replace(s, init_from=otherwise) if s.init_from == "auto" else s


def earlier_config(s: Settings) -> tuple[dict[str, Any], str] | None:
    """The settings of the run that `s` resumes, without those in NOT_RESUMED, and the file that has them.

    None if `s` starts a new run. Raises UserError if that is invalid, or no checkpoint can be read.
    """
    if where_to_start(s).init_from != "resume":
        validate(s)  # a resumed run has its own settings beside these: they are checked together
        return None
    saved, path = run_folder.load_latest(s.out_dir, say=lambda line: None, verify=False)
    return {name: value for name, value in saved["config"].items() if name not in NOT_RESUMED}, str(path)


def reaching_out(config: dict[str, Any]) -> dict[str, str]:
    """The settings of a checkpoint that reach outside of its folder, and what each of them does.

    A checkpoint may come from a stranger, so they count only if the command line or its config files give them again.
    """
    attention, data, prompts = (str(config.get(name) or "") for name in ("attention", "dataset", "sample_prompts"))
    path = pathlib.PurePath(data)
    known = {
        "attention": (is_own(attention), "runs the code of a file"),
        "dataset": (path.is_absolute() or ".." in path.parts, "is a path outside of data/"),
        "sample_prompts": (prompts.startswith("FILE:"), "reads a file"),
        "eval_tasks": (config.get("eval_tasks"), "loads data, and may run code"),
        "wandb_log": (config.get("wandb_log"), "sends the run to a server"),
    }
    return {name: what for name, (reaches, what) in known.items() if reaches}


def require_given_again(s: Settings, was: dict[str, Any], given: set[str]) -> None:
    """Raise UserError if `given` lacks the kernel or the data of the run that `s` resumes, whose settings `was` has."""
    for name, what in reaching_out(was).items():
        if name in ("attention", "dataset") and name not in given:
            how = f"if you trust it, give --{name}={was[name]} again"
            raise UserError(f"the checkpoint in {s.out_dir} has {name}={shown(was[name])}, which {what}: {how}")


def require_right_flag(s: Settings) -> None:
    """Raise UserError if init_from names a run of ours, or a checkpoint in it."""
    if s.init_from in ("scratch", "resume", "auto"):  # a folder may have one of these names too
        return
    named = pathlib.Path(s.init_from)
    run = named.parent if named.is_file() else named
    if run_folder.checkpoints(run):
        new = f"for a new run from its weights, export it first: python export.py {run}"
        raise UserError(f"{run} is a run: to train it on, give --init_from=resume --out_dir={run}; {new}")


def prolonged(s: Settings, was: dict[str, Any]) -> Settings:
    """`s` with a schedule that ends with the run, if that is so in `was`, the settings of the run that `s` resumes.

    Otherwise a run that is trained on with a larger max_iters would go on at min_lr, which may be 0, or would begin the
    longer schedule of its config file, at a higher learning rate than that of its last step.
    """
    ended = was.get("lr_decay_iters") == was.get("max_iters")
    return dataclasses.replace(s, lr_decay_iters=s.max_iters) if ended else s


def keep_settled(s: Settings, saved: dict, say: Say) -> Settings:
    """`s` with the max_iters and lr_decay_iters of the run of `saved`, if `s` has minutes, which settled them.

    The run goes on as the same command began it, whatever max_iters its config file has. A flag --max_iters gives the
    minutes up.
    """
    if s.minutes is None or s.eval_only:
        return s
    numbers = {name: saved["config"].get(name, getattr(s, name)) for name in SETTLED}
    if any(getattr(s, name) != value for name, value in numbers.items()) or s.minutes != saved["config"].get("minutes"):
        kept = " and ".join(f"{name}={value}" for name, value in numbers.items())
        say(f"minutes={s.minutes:g} settles the length of a new run only, and this one has {kept}: give --max_iters")
    return dataclasses.replace(s, **numbers)


def keep_finished(s: Settings, saved: dict, say: Say) -> Settings:
    """`s`, but if the run of `saved` has no step left to make, with the settings that it was made with."""
    if saved["iter_num"] < s.max_iters or s.eval_only:
        return s
    say(f"all {saved['iter_num']} iterations are done: raise --max_iters above that to train on")
    others = {*NOT_RESUMED, *IN_USE, *reaching_out(saved["config"])}
    kept = {name: was for name, was in saved["config"].items() if name not in others and hasattr(s, name)}
    return dataclasses.replace(s, **kept | {"max_iters": saved["iter_num"]})  # it may have been stopped before its end


def check_ids(s: Settings, meta: dict, saved: dict | None, ranks: distributed.Ranks, say: Say) -> None:
    """Raise UserError if the weights were trained on other ids than the data's; if that is unknown, say why.

    If the ids are the same but the text is another, say so. saved: the checkpoint with the weights; None if they are
    new, or come from the model that init_from names.
    """
    refusal = None
    if ranks.main and s.init_from != "scratch":  # the other ranks may not see tiktoken's files
        try:
            trained_on = _trained_on(s, saved, say)
            dataset.check_same_ids(meta, trained_on, say)
            for split in dataset.SPLITS:
                if saved and not dataset.same_text(meta, trained_on, split):
                    say(f"resuming with another {split}.bin: losses from here on cannot be compared with those before")
        except UserError as error:
            refusal = error
    if refusal := ranks.broadcast(refusal):
        raise refusal


def _trained_on(s, saved, say):
    """The meta of what the weights were trained on, as far as it is known."""
    if saved:
        return saved.get("meta") or dataset.UNKNOWN
    with contextlib.suppress(UserError):
        if meta := tokenizer_json.own(s.init_from)[0]:
            return meta
    say(f"cannot tell whether {s.init_from} was trained on the data's ids: it has no tokenizer for GPTs")
    return dataset.UNKNOWN


def meant_by_auto(saved: dict | None) -> dict[str, Any] | None:
    """What 'auto' chose in the run of the checkpoint `saved`: attention, dtype, compile; None for a new run."""
    if not saved:
        return None
    names = ("attention", "dtype", "compile")
    return {name: saved[name] for name in names if name in saved and saved["config"].get(name) == "auto"}


def restore(saved: dict, s: Settings, state: Any, meta: dict, say: Say) -> None:
    """Restore optimizer and scaler of `state`, a TrainState, from `saved`; say which settings changed.

    Another mask, other windows or another val.bin change what a validation loss means. `saved` then forgets the best
    loss, so that the next evaluation is the best. meta: the data's. If ranks share the model, this restores its weights
    too; otherwise the model has them already. Raises UserError if `saved` does not fit.
    """
    if saved["model"]:
        checkpoint.restore_optimizer(saved, state.optimizer)
    else:
        checkpoint.read_shards(saved, state.optimizer, state.model)
    exchange(state.model, state.optimizer)  # the model of a checkpoint is the average
    if not s.ema_decay:
        for each in state.optimizer.state.values():
            each.pop(TWIN, None)
    elif not saved["config"].get("ema_decay"):
        for p, each in state.optimizer.state.items():
            each[TWIN] = p.detach().clone()  # now, and not after the first step: a save may come before it
    was = {"mask": "causal", "eval_iters": s.eval_iters, "batch_size": s.batch_size, **saved["config"]}
    same = was["eval_iters"] * was["batch_size"] == s.eval_iters * s.batch_size and was["mask"] == s.mask
    same = same and dataset.same_text(meta, saved.get("meta") or {}, "val")
    if not same or checkpoint.is_nanogpts(saved):  # nanoGPT draws windows at random
        saved |= {"best_val_loss": math.inf, "best_iter": None}
        say("evaluations have another text, mask or windows (eval_iters x batch_size): the next replaces best.pt")
    if saved["scaler"]:
        state.scaler.load_state_dict(saved["scaler"])
    for name, was in saved["config"].items():
        if name not in NOT_RESUMED and getattr(s, name, was) != was:
            say(f"resuming with {name}={getattr(s, name)!r}; it was {was!r}")
    if saved.get("attention_sha256") not in (None, functions.digest(s.attention)):
        say(f"resuming with a changed file: attention={s.attention} has another SHA-256 than before")
