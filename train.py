"""Train a GPT, on one device or, under torchrun, on many.

    python train.py config/train_shakespeare_char.py --batch_size=32
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

Every setting is a field of Settings (fusedgpt/settings.py); config files and --name=value flags set them.
"""

import signal
import sys

if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a background job ignores Ctrl-C
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is something to save, Ctrl-C ends the program at once

import dataclasses
import functools
import gc
import math
import pathlib
import time
from collections.abc import Callable, Iterator

from configurator import adopt, answer_help, configure
from fusedgpt.settings import Settings, as_built, validate

if __name__ == "__main__":
    answer_help(Settings(), sys.argv[1:], __doc__)  # before PyTorch, which takes seconds to import

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from fusedgpt import (
    checkpoint,
    dataset,
    determinism,
    distributed,
    evaluation,
    files,
    memory,
    nonfinite,
    resume,
    run_folder,
    samples,
    timing,
    tuning,
)
from fusedgpt.case import Case
from fusedgpt.dataloader import Batch, DataLoader
from fusedgpt.device import autocast, graphs_compiled, resolve_device, resolve_dtype
from fusedgpt.errors import TRAIN_WITH_LESS, UserError, one_sentence
from fusedgpt.logger import Logger
from fusedgpt.optimizer import build_optimizer, learning_rate, update_weights
from fusedgpt.receipt import contradiction, observe
from fusedgpt.reporting import dry_run, is_reported, report, run_record, settings_line
from fusedgpt.saver import Saver
from fusedgpt.signals import catch_signals
from model import GPT, GPTConfig

Say = Callable[[str], None]  # prints a line
ROOT = pathlib.Path(__file__).resolve().parent
WARM_UP = 5  # the summary of times leaves out this many first steps: they still fill caches


@dataclasses.dataclass
class TrainState:
    """What the training loop owns. Its first six fields are what a checkpoint has to hold."""

    model: GPT
    optimizer: Optimizer
    scaler: GradScaler
    iteration: int  # steps done
    best_val_loss: float
    best_iter: int | None  # iteration of best_val_loss
    parallel: torch.nn.Module | None  # `model`, but backward averages gradients over the ranks
    batches: Iterator[Batch]  # the training batches from here on
    batch: Batch  # the next batch, read ahead
    clock: timing.StepClock
    unread: list[Tensor] = dataclasses.field(default_factory=list)  # results of steps, still on the device
    loss: float = 0.0  # loss of the last reported step
    bad_steps: int = 0  # reported steps in a row without a finite gradient
    step_ms: list[float] = dataclasses.field(default_factory=list)
    evaluation_s: float = 0.0  # seconds of the last evaluation, 0 before the first
    estimated: bool = False  # whether the run has said how long it will take

    @property
    def sound(self) -> bool:
        """Whether this state is worth saving: its last step had a finite loss and gradient.

        In float16, a bad gradient is forgiven while the loss scale is above 1: the scale may be what overflowed.
        """
        return math.isfinite(self.loss) and (self.bad_steps == 0 or self.scaler.get_scale() > 1)


def read_settings(args: list[str]) -> Settings:
    """The settings of the command line. A resumed run starts from its own, which config files and flags change.

    Raises UserError for bad input.
    """

    def earlier(s):
        found = resume.earlier_config(s)
        return dataclasses.replace(adopt(Settings(), *found), out_dir=s.out_dir) if found else None

    return resume.where_to_start(configure(Settings(), args, __doc__, earlier=earlier))


def build_model(s: Settings, meta: dict, saved: dict | None, check_memory: Callable, ranks, say: Say) -> GPT:
    """The model on the CPU: new, from the checkpoint `saved`, or pretrained. Raises UserError if it cannot load.

    A new model that ranks will share is on the meta device, without storage. check_memory(config) raises UserError
    before a new model is built that cannot fit.
    """
    changes = {"dropout": s.dropout, "loss": s.loss, "recompute": s.recompute}
    changes |= {"activation": s.activation} if s.activation else {}
    where = "meta" if ranks.shards > 1 else "cpu"
    if saved:
        if checkpoint.is_nanogpts(saved) and not s.activation:
            say(checkpoint.NANOGPTS_ACTIVATION)
        with torch.device(where):
            return GPT.from_checkpoint(saved, **changes)
    changes["vocab_multiple"] = s.vocab_multiple
    if s.init_from == "scratch":
        determinism.seed(s.seed, "init")
        dimensions = {name: getattr(s, name) for name in ("block_size", "n_layer", "n_head", "n_embd", "bias")}
        config = GPTConfig(vocab_size=s.vocab_size or meta["vocab_size"], **dimensions, **changes)
        check_memory(config)
        with torch.device(where):
            model = GPT(config)
    else:
        model = GPT.from_pretrained(s.init_from, changes)
    if s.block_size != model.config.block_size:
        model.crop_block_size(s.block_size)
    return model


def settle(s: Settings, model: GPT, case: Case, batch: Batch, calls: int, saved: dict | None, ranks) -> tuning.Settled:
    """What auto means in `s`, or meant in `saved`: the same on all ranks. Raises UserError as tuning.settle does."""
    names = ("attention", "dtype", "compile")
    before = {n: saved[n] for n in names if n in saved and saved["config"].get(n) == "auto"} if saved else None
    decide = functools.partial(tuning.settle, s, model, case, batch, calls, before)
    if "auto" not in (getattr(s, name) for name in names):
        return decide()
    return ranks.broadcast(decide() if ranks.main else None)  # ranks could disagree about what is fastest


def rehearse(state: TrainState, cast, trace: pathlib.Path | None) -> tuple[dict, int]:
    """The kernel receipt of a training step and the number of its graphs, from two dry runs. The second is profiled.

    Weights and random streams are unaffected. The profile is written to `trace`, if given.
    """

    def forward_backward():
        with distributed.gradient_sync(state.parallel, enabled=True):  # or FSDP keeps the gradient for the first step
            with cast:
                _, loss = state.parallel(*state.batch, logits=False)
            loss.backward()

    before = graphs_compiled()
    forward_backward()
    graphs = graphs_compiled() - before
    receipt = observe(forward_backward, trace)
    state.optimizer.zero_grad(set_to_none=True)
    return receipt, graphs


def save(state: TrainState, saver: Saver, record: dict, meta: dict, say: Say) -> None:
    """Hand the whole state to `saver`, unless the run has diverged. Raises UserError if a weight is not finite."""
    advice = saver.last_good()
    if not state.sound:
        say(f"iteration {state.iteration} is not saved, because the run has diverged: {advice}")
        return
    if not distributed.finite_weights(state.model):
        raise UserError(f"the weights are not finite after {state.iteration} steps and were not saved: {advice}")
    config = dict(record["model"])
    attention, *_ = config.pop("attention"), config.pop("loss"), config.pop("recompute")
    extra = {name: config.pop(name) for name in ("vocab_multiple", "activation")}  # unknown to nanoGPT's GPTConfig
    content = {"model": state.model.state_dict(), "model_args": config, "extra_model_args": extra}
    content |= {"optimizer": state.optimizer.state_dict(), "scaler": state.scaler.state_dict()}
    content |= {"iter_num": state.iteration, "best_val_loss": state.best_val_loss, "best_iter": state.best_iter}
    content |= {"config": record["settings"], "meta": meta, "attention": attention}
    content |= {"dtype": record["dtype"], "compile": record["compile"]}  # auto keeps these when the run is resumed
    saver.save(content)


def evaluate_and_save(state: TrainState, s: Settings, evaluate, save, saver: Saver, logger: Logger) -> bool:
    """Evaluate, log the losses, and save if it is time to. Returns False if a signal ended the evaluation."""
    unsaved, began = state.iteration > saver.saved_at and not s.eval_only, time.perf_counter()
    try:
        losses = evaluate()
    except BaseException:
        if unsaved and not saver.together:
            save()  # a failing evaluation must not lose the steps before it
        raise
    if losses is None:
        return False
    state.evaluation_s = time.perf_counter() - began
    logger.evaluation({"iter": state.iteration, **losses}, in_full=s.eval_only)
    saver.wait()
    if saver.failed:  # the best since the last save was never written
        state.best_val_loss, state.best_iter = saver.best
    improved = state.iteration > 0 and losses["val_loss"] < state.best_val_loss and not s.eval_only
    if improved and state.sound:
        state.best_val_loss, state.best_iter = losses["val_loss"], state.iteration
    if improved or (unsaved and s.always_save_checkpoint):
        save()
    return True


def train_step(state: TrainState, s: Settings, micro_steps: range, cast) -> tuple[Tensor, Tensor]:
    """One step on the clipped mean gradient of all micro-batches of all ranks. Does not wait for the device.

    Returns the sum of this rank's losses and the norm of the gradient, both on the device. If the norm is not finite,
    no weight changes.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(state.iteration, s)
    loss_sum = torch.zeros((), device=state.clock.device)
    for micro_step in micro_steps:
        if s.dropout:  # the mask follows from seed, step and micro-step, not from the rank or from what ran before
            determinism.seed(s.seed, "dropout", state.iteration, micro_step)
        with distributed.gradient_sync(state.parallel, enabled=micro_step == micro_steps[-1]):
            with cast:
                _, loss = state.parallel(*state.batch, logits=False)
            state.batch = next(state.batches)  # read and copied while the device computes
            # average over this rank's micro-steps here; DDP or FSDP averages over the ranks
            state.scaler.scale(loss / len(micro_steps)).backward()
        loss_sum += loss.detach()
    state.scaler.unscale_(state.optimizer)  # unscale before clipping: the limit holds for unscaled gradients
    norm = distributed.gradient_norm(state.model)
    update_weights(state.optimizer, norm, s.grad_clip)
    state.scaler.update()  # in float16, lowers the scale if a gradient overflowed
    state.optimizer.zero_grad(set_to_none=True)
    return loss_sum, norm


def training_loop(
    state: TrainState,
    s: Settings,
    micro_steps: range,
    cast,
    ranks: distributed.Ranks,
    saver: Saver,
    *,
    deadline: float,
    stopped_by: list[int],
    evaluate_now: Callable,
    report_now: Callable,
    save_now: Callable,
    sample_now: Callable,
) -> None:
    """Step until max_iters, the `deadline` (of time.perf_counter) or a signal; evaluate, report and save on the way."""
    time_is_up, alone, reported = False, ranks.world == 1, time.perf_counter()
    while True:
        stopped = False
        last = state.iteration >= s.max_iters or time_is_up or s.eval_only
        if state.iteration % s.check_interval == 0 or state.iteration % s.eval_interval == 0 or last:
            distributed.require_same_weights(state.model, ranks, state.iteration)
        if state.iteration % s.eval_interval == 0 or last:
            stopped = not evaluate_now()
            last |= stopped
        # if ranks share the model, all draw or none does, so a signal to one of them skips no sample
        draws = not (stopped or (stopped_by and ranks.shards == 1))
        if s.sample_interval and (state.iteration % s.sample_interval == 0 or last) and draws:
            sample_now()
        if last:
            return

        state.clock.start()  # time the step alone, without evaluations and files
        try:
            loss_sum, norm = train_step(state, s, micro_steps, cast)
        except UserError:  # another process or the data is gone; the last step was complete
            report_now(explain=None)
            if state.iteration > saver.saved_at and not saver.together:
                save_now()
            raise
        # sum the stop flags over the ranks, so that all stop at the same step
        mine = (time.perf_counter() > deadline, len(stopped_by))
        flags = (torch.full_like(norm, flag) for flag in mine)
        state.unread.append(ranks.all_reduce(torch.stack((loss_sum, norm, *flags))))
        state.clock.stop()
        state.iteration += 1
        silent_s = time.perf_counter() - reported if alone and state.clock.device.type == "cpu" else 0.0
        if is_reported(state.iteration, s, silent_s) or (alone and any(mine)):
            reported = time.perf_counter()
            time_is_up, stop = report_now()
            if stop:
                return


def leave(state: TrainState, ranks: distributed.Ranks, logger: Logger) -> None:
    """Disconnect from the other ranks and close the logger. Raises UserError if one of the two fails."""
    state.parallel = None  # frees DDP: as last holder of the process group it would end the group itself, and may hang
    distributed.leave(ranks)
    logger.close()


def finish(state: TrainState, s: Settings, ranks, logger: Logger, saver: Saver, save, stopped_by: list[int]) -> None:
    """Save, disconnect from the other ranks, and wait for the disk. After a signal, exit with status 128 + its number.

    Raises UserError if the last state could not be saved.
    """
    saver.wait()
    unsaved = state.iteration > saver.saved_at and not s.eval_only
    if (unsaved and state.sound) or saver.failed:
        save()
    if saver.together:
        saver.wait()  # before the ranks disconnect, because each writes its own tensors
    if len(state.step_ms) > WARM_UP and ranks.main:
        logger.times(timing.summary(state.step_ms[WARM_UP:]))
    try:
        leave(state, ranks, logger)
    finally:
        saver.close()
    if unsaved and not state.sound:
        raise UserError(f"the run has diverged and ends after {state.iteration} steps: {saver.last_good()}")
    if stopped_by:
        how = "saved: go on with the same command and --init_from=resume" if saver.saved_at else "with nothing to save"
        logger.say(f"stopped after {state.iteration} iterations, {how}")
        sys.exit(128 + stopped_by[0])


def main(s: Settings) -> None:
    """Train as `s` says. Raises UserError for bad input. Signals end it with status 128 + their number."""
    validate(s)
    began = time.perf_counter()

    # the machine, and this process's place among the others
    ranks = distributed.ranks(s.parallel, s.shard_size, s.timeout)
    ranks.micro_steps(s.gradient_accumulation_steps)  # raises before any rank waits for another
    device = resolve_device(s.device, ranks.local_rank)
    distributed.join(ranks, s.backend, device, s.timeout)
    if device.type == "cpu":
        memory.keep_freed_memory(ranks.shards == 1)
    s = ranks.broadcast(resume.where_to_start(s))  # nodes may see different files
    micro_steps = ranks.micro_steps(s.gradient_accumulation_steps)
    if s.deterministic:
        determinism.require_deterministic()
    out_dir, writes = pathlib.Path(s.out_dir), not (s.eval_only or s.dry_run)
    logger = Logger(ranks.main)
    logger.say(settings_line(s))

    # data, model and attention kernel
    folder = dataset.find_folder(ROOT, s.dataset)
    meta = dataset.read_meta(folder, s.vocab_size)
    draws_samples = s.sample_interval and not s.eval_only
    prompts = samples.Prompts(s.sample_prompts, meta) if draws_samples and ranks.main else None
    prompts = ranks.broadcast(prompts) if ranks.shards > 1 else prompts  # ranks that share the model draw together
    lock = files.lock(out_dir) if ranks.main and writes else None
    how = {"whole": ranks.shards == 1}
    saved, path = run_folder.load_latest(out_dir, logger.say, **how) if s.init_from == "resume" else (None, None)

    fit = dict(batch_size=s.batch_size, device=device, dtype=resolve_dtype(s.dtype, device), backward=not s.eval_only)
    check_memory = functools.partial(memory.check_run, s, ranks.world, logger.say, **fit)
    model = build_model(s, meta, saved, check_memory, ranks, logger.say)
    if s.init_from != "scratch":
        check_memory(model.config)
    if ranks.shards == 1:
        model.to(device)
    s = as_built(s, model.config, logger.say)
    remedy = "prepare the data with the tokenizer of the weights"
    remedy = f"set --vocab_size={meta['vocab_size']}, or leave it out" if s.init_from == "scratch" else remedy
    dataset.check_fit(meta, s.vocab_size, f"dataset={s.dataset}", remedy)
    resume.check_ids(s, meta, saved, ranks, logger.say)
    loader = DataLoader(folder, meta, s.block_size, s.batch_size, s.seed, device, ranks.rank, ranks.world)
    dataset.require_same_data(loader.files, meta, ranks.gather)
    # what auto means, settled by timing
    logger.status("timing attention, dtype and compile")
    start, best = (saved["iter_num"], (saved["best_val_loss"], saved["best_iter"])) if saved else (0, (math.inf, None))
    batches = loader.batches(start, micro_steps)
    batch = next(batches)
    dropout = 0.0 if s.eval_only else s.dropout
    case = Case.of_model(s, s.batch_size, device, fit["dtype"], dropout=dropout, backward=not s.eval_only)
    chosen = settle(s, model, case, batch, (s.max_iters - start) * len(micro_steps), saved, ranks)
    cast = autocast(device, chosen.dtype)
    model.use_attention(chosen.attention)

    # what the loop owns
    parallel = distributed.parallelize(model, ranks, device, chosen.dtype, chosen.compiled, s.seed)
    optimizer = build_optimizer(model, s, device.type)
    # float16 rounds gradients below 3e-8 to 0, so the loss is scaled up for backward; bfloat16 has float32's range
    scaler = GradScaler(device.type, enabled=chosen.dtype == torch.float16)
    saver = Saver(out_dir, s.keep_checkpoints, lock, logger.say, ranks)
    if saved:
        resume.restore(saved, s, optimizer, scaler, model, logger.say)
        saver.resume(saved, path)
        saved = None  # drop its tensors: they are mapped from a file that may be replaced
    if len(starts := set(ranks.gather(start))) > 1:
        raise UserError(f"nodes have different checkpoints in {out_dir}, of iterations {starts}: let them share it")
    clock = timing.StepClock(device)
    state = TrainState(model, optimizer, scaler, start, *best, parallel, batches, batch, clock)
    del parallel  # the state holds the only reference, so that DDP can be freed at the end

    # take the receipt; print and write down what is about to run
    logger.status("compiling" if chosen.compiled else "looking at the kernels")
    trace = out_dir / ".trace.json" if s.profile and ranks.main and writes else None  # renamed once the folder is open
    receipt, graphs = (None, None) if s.eval_only else rehearse(state, cast, trace)
    if receipt and (reason := contradiction(chosen.attention, receipt, case)):
        raise UserError(reason)
    record = run_record(s, model, device, ranks, chosen, receipt=receipt, graphs=graphs)
    logger.announce(record, chosen.why_eager)
    if ranks.main and writes:
        logger.open(out_dir, start, record, lock)
        if trace:
            trace.replace(out_dir / "trace.json")

    stopped_by = catch_signals(ranks.main) if writes else []
    save_now = functools.partial(save, state, saver, record, meta, logger.say)
    token_bytes = evaluation.token_bytes(meta, ranks, device, logger.status, logger.say)
    losses = functools.partial(evaluation.evaluate, model, loader, cast, ranks, token_bytes, stopped_by, logger.status)
    losses_now = functools.partial(losses, s.eval_iters * s.batch_size)
    evaluate_now = functools.partial(evaluate_and_save, state, s, losses_now, save_now, saver, logger)
    explain = functools.partial(nonfinite.explain, model, loader, s.seed, micro_steps, cast, scaler, ranks)
    report_now = functools.partial(report, state, s, record, logger, saver, explain=explain)
    sample_now = functools.partial(samples.log, prompts, state, s.seed, cast, logger, stopped_by)
    if chosen.compiled:
        losses(s.batch_size)  # compile the evaluation graph now, so that no evaluation's time includes the compiler's
    memory.reset_peak_memory(device)  # compilation and the rehearsal are over
    gc.collect()
    gc.freeze()  # freeze long-lived objects so that garbage collection does not stall a step
    if s.dry_run:
        dry_run(state, s, functools.partial(train_step, state, s, micro_steps, cast), losses, loader, logger.say)
        return leave(state, ranks, logger)
    deadline = math.inf if s.max_seconds is None else began + s.max_seconds
    ways_out = dict(deadline=deadline, stopped_by=stopped_by)
    calls = dict(evaluate_now=evaluate_now, report_now=report_now, save_now=save_now, sample_now=sample_now)
    training_loop(state, s, micro_steps, cast, ranks, saver, **ways_out, **calls)
    finish(state, s, ranks, logger, saver, save_now, stopped_by)


if __name__ == "__main__":
    with one_sentence(TRAIN_WITH_LESS):
        main(read_settings(sys.argv[1:]))
