"""Train a GPT, on one device or, under torchrun, on many.

    python train.py config/train_shakespeare_char.py --batch_size=32
    torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

Every setting is a field of Settings (fusedgpt/settings.py); config files and --name=value flags set them.
"""

import contextlib
import dataclasses
import functools
import gc
import pathlib
import sys
import time
from collections.abc import Callable

from configurator import COMMAND_LINE, answer_help, assigned, changed
from fusedgpt.attention.table import is_own, located
from fusedgpt.machine import waiting
from fusedgpt.settings import Settings, as_built, require_learning, validate

if __name__ == "__main__":
    answer_help(Settings(), sys.argv[1:], __doc__)  # before PyTorch, which takes seconds to import
    waiting.announce(sys.stdout)

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.data import dataset
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.estimates import fits
from fusedgpt.machine import determinism, files, memory, timing
from fusedgpt.machine.device import autocast, cuda_graphs, graphs_compiled, resolve_device, resolve_dtype
from fusedgpt.machine.signals import catch_signals
from fusedgpt.parallel import distributed
from fusedgpt.runs import budget, checkpoint, resume, run_folder
from fusedgpt.runs.logger import Logger
from fusedgpt.runs.progress import is_reported, reading_line, run_record, settings_lines
from fusedgpt.runs.run import Run, TrainState
from fusedgpt.runs.run_folder import Checkpoints
from fusedgpt.training import evaluation, samples, tuning
from fusedgpt.training.optimizer import TWIN, build_optimizer, learning_rate, update_weights
from fusedgpt.training.step_results import StepResults
from model import GPT, GPTConfig

WITH_LESS = (  # advice if memory runs out
    " Halve --batch_size (and double --gradient_accumulation_steps and --eval_iters: steps and evaluations"
    " stay the same), take a fused --attention or --recompute=block, or share the model with --parallel=fsdp."
)


def read_settings(args: list[str]) -> Settings:
    """The settings of the command line. A resumed run has its saved settings, changed by config files and flags."""
    given = assigned(Settings(), args)
    flags = {name for name, _, where in given if where == COMMAND_LINE}
    s = changed(Settings(), given)
    if earlier := resume.earlier_config(s):
        was, path = earlier
        kept = [(name, was[name], path) for name in was if name in vars(s) and name not in resume.reaching_out(was)]
        s = changed(changed(Settings(), kept), given)
        resume.require_given_again(s, was, {name for name, _, _ in given})
        if "lr_decay_iters" not in flags:
            s = resume.prolonged(s, was)
    if "max_iters" in flags and "minutes" not in flags:
        s = dataclasses.replace(s, minutes=None)  # of a file or an earlier run: they would override max_iters
    resume.require_right_flag(s)
    otherwise = ["scratch", *(value for name, value, _ in given if name == "init_from" and value != "auto")][-1]
    return resume.where_to_start(dataclasses.replace(s, attention=located(s.attention)), otherwise)


def train_step(state: TrainState, s: Settings, micro_steps: range) -> dict[str, Tensor]:
    """One step on the clipped mean gradient of all micro-batches of all ranks. On CUDA it does not wait for the device.

    Returns numbers by name, on the device: the mean of this rank's losses and the norm of the gradient. Any single
    number that you add to them reaches the console, metrics.jsonl and the figures, as its mean over the ranks. If the
    norm is not finite, no weight changes.
    """
    for group in state.optimizer.param_groups:
        group["lr"] = learning_rate(state.iteration, s)
    loss_sum = torch.zeros((), device=state.clock.device)
    for micro_step in micro_steps:
        if s.dropout:  # the mask follows from seed, step and micro-step, not from the rank or from what ran before
            determinism.seed(s.seed, "dropout", state.iteration, micro_step)
        with distributed.gradient_sync(state.parallel, enabled=micro_step == micro_steps[-1]):
            with state.cast:
                _, loss = state.parallel(*state.batch, logits=False)
            state.batch = next(state.batches)  # read and copied while the device computes
            # average over this rank's micro-steps here; DDP or FSDP averages over the ranks
            state.scaler.scale(loss / len(micro_steps)).backward()
        loss_sum += loss.detach()
    state.scaler.unscale_(state.optimizer)  # before clipping: the limit is for unscaled gradients
    norm = distributed.gradient_norm(state.model)
    update_weights(state.optimizer, norm, s.grad_clip)  # clips, and steps if the norm is finite, as scaler.step would
    state.scaler.update()  # in float16, lowers the scale if a gradient overflowed
    state.optimizer.zero_grad(set_to_none=True)
    if s.ema_decay:
        average_weights(state.optimizer, s.ema_decay)
    return {"loss": loss_sum / len(micro_steps), "grad_norm": norm}


@torch.no_grad()
def average_weights(optimizer: Optimizer, decay: float) -> None:
    """Move the average of each weight, in that weight's state, by 1 - `decay` of the way to the weight."""
    for p, state in optimizer.state.items():
        if TWIN not in state:  # after the first step
            state[TWIN] = p.detach().clone()
    averages = [distributed.local(state[TWIN]) for state in optimizer.state.values()]
    if averages:  # none if the first step was skipped on the host
        get_ema_multi_avg_fn(decay)(averages, [distributed.local(p) for p in optimizer.state], None)


def training_loop(run: Run) -> None:
    """Step until max_iters, the run's deadline or a signal; evaluate, report and save on the way."""
    state, ranks, time_is_up = run.state, run.ranks, False
    while True:
        s = run.s  # a report may shorten a run of so many minutes
        last = state.iteration >= s.max_iters or time_is_up or s.eval_only
        evaluates = state.iteration % s.eval_interval == 0 or last
        if evaluates or state.iteration % s.check_interval == 0:
            distributed.require_same_weights(state.model, ranks, state.iteration)
        evaluated = not evaluates or run.evaluate_and_save()  # False: a signal has ended the evaluation
        last = last or (evaluates and run.overfits())
        samples_now = s.sample_interval and (state.iteration % s.sample_interval == 0 or last)
        if samples_now and evaluated:
            run.sample()
        # a signal that came meanwhile ends the run before the next step; a resumed run evaluates and samples here again
        if last or ((evaluates or samples_now) and any(ranks.gather(bool(run.stopped_by)))):
            return

        state.clock.start()  # time the step alone, without evaluations and files
        try:
            with distributed.others_needed():
                results = train_step(state, s, run.micro_steps)
        except Exception as error:
            # another process, the data or the user's kernel has failed, and our weights are sound
            if isinstance(error, (UserError, OSError)) or is_own(s.attention):
                run.save_whole_steps()
            raise
        # results.add sums the flags over the ranks, so that all stop at the same step
        flags = {"time is up": time.perf_counter() > run.deadline, "stopped": bool(run.stopped_by)}
        state.results.add(results, flags, lr=state.optimizer.param_groups[0]["lr"])  # what the step has used
        state.clock.stop()
        state.iteration += 1
        if is_reported(state.iteration, s) or (ranks.world == 1 and any(flags.values())):
            time_is_up, signalled = run.report()  # if the time is up, the next round evaluates and is the last
            if signalled:
                return


def join(s: Settings) -> tuple[Settings, distributed.Ranks, torch.device]:
    """Connect to the other processes. Returns the settings of all of them, this process's rank, and its device."""
    validate(s)
    ranks = distributed.ranks(s.parallel, s.shard_size, s.timeout)
    ranks.micro_steps(s.gradient_accumulation_steps)  # raises before any rank waits for another
    device = resolve_device(s.device, ranks.local_rank)
    if device.type == "mps" and s.dropout and s.recompute != "none":
        raise UserError("on mps PyTorch recomputes with other dropout (pytorch#194478): give --recompute=none")
    distributed.join(ranks, s.backend, device)
    if device.type == "cpu":
        memory.keep_freed_memory(ranks.shards == 1)
    s = ranks.broadcast(resume.where_to_start(s))  # rank 0 decides, because nodes may see different files
    if s.deterministic:
        determinism.require_deterministic()
    return s, ranks, device


def find_data(s: Settings) -> tuple[pathlib.Path, dict]:
    """The folder of the data set, and its meta. Raises UserError if bins are missing, before anything is built."""
    folder = dataset.find_folder(s.dataset)
    meta = dataset.read_meta(folder, s.vocab_size)
    for split in dataset.SPLITS:
        dataset.TokenFile(folder, split, meta)
    return folder, meta


def build_model(s: Settings, meta: dict, saved: dict | None, ranks, device: torch.device, say: Callable):
    """Build a new model, or load the checkpoint `saved` or pretrained weights.

    Returns the model, on `device`, and `s` with its dimensions. If ranks will share it, loaded weights stay on the CPU,
    and a model without weights is on the meta device, which has no storage. Raises UserError if the model cannot be
    loaded, cannot fit into memory, or has fewer ids than the data.
    """
    estimate_memory = functools.partial(fits.check_run, s, ranks.world, say, device)
    changes = {"dropout": s.dropout, "loss": s.loss, "recompute": s.recompute}
    changes["document_start"] = dataset.separator(meta, s.dataset) if s.mask == "document" else None
    if s.activation:
        changes["activation"] = s.activation
    empty = torch.device("meta" if ranks.shards > 1 else "cpu")
    if s.init_from == "scratch":
        determinism.seed(s.seed, "init")
        config = GPTConfig.of(s, vocab_size=s.vocab_size or meta["vocab_size"], **changes)
        estimate_memory(config)
        with empty:
            model = GPT(config)
    elif saved:
        if checkpoint.is_nanogpts(saved) and not s.activation:
            say(checkpoint.NANOGPTS_ACTIVATION)
        with empty:
            model = GPT.from_checkpoint(saved, **changes)
    else:
        model = GPT.from_pretrained(s.init_from, changes | {"vocab_multiple": s.vocab_multiple})
        if s.block_size != model.config.block_size:
            model.crop_block_size(s.block_size)
    if s.init_from != "scratch":
        estimate_memory(model.config)
    if ranks.shards == 1:
        model.to(device)
    s = as_built(s, model.config, say)
    remedy = f"set --vocab_size={meta['vocab_size']}, or leave it out; loaded weights need data of their own tokenizer"
    dataset.check_fit(meta, s.vocab_size, f"dataset={s.dataset}", remedy)
    return model, s


def build(s: Settings, ranks: distributed.Ranks, device: torch.device, logger: Logger, writes: bool = True) -> Run:
    """The run that `s` describes, ready to step. writes: whether to lock out_dir. Raises UserError for bad input."""
    out_dir, micro_steps = pathlib.Path(s.out_dir), ranks.micro_steps(s.gradient_accumulation_steps)

    # data and weights
    folder, meta = find_data(s)
    prompts = samples.prompts(s, meta, ranks)
    logger.lock = lock = files.lock(out_dir) if writes and ranks.main and not s.eval_only else None
    saved = path = None
    if s.init_from == "resume":
        saved, path = run_folder.load_latest(out_dir, logger.say, whole=ranks.shards == 1)
        s = resume.keep_finished(resume.keep_settled(s, saved, logger.say), saved, logger.say)
    require_learning(s)
    model, s = build_model(s, meta, saved, ranks, device, logger.say)
    resume.check_ids(s, meta, saved, ranks, logger.say)
    loader = DataLoader(folder, meta, s.block_size, s.batch_size, s.seed, device, ranks.rank, ranks.world)
    dataset.check_bins(loader.files, meta, s.check_data)
    dataset.require_same_data(loader.files, meta, ranks.gather)
    start = saved["iter_num"] if saved else 0
    batches = loader.batches(start, micro_steps)
    batch = next(batches)

    # choose kernel, dtype and compilation: where a setting is auto, attention/choose.py and others time what can run
    logger.status("timing attention and dtype")
    dtype, dropout = resolve_dtype(s.dtype, device), 0.0 if s.eval_only else s.dropout
    cases = Case.of_layers(model.config, s.batch_size, device, dtype, dropout=dropout, backward=not s.eval_only)
    decide = functools.partial(tuning.settle, s, model, cases, batch, resume.meant_by_auto(saved))
    chosen = ranks.from_main(decide)  # ranks that time on their own could disagree about what is fastest
    model.use_attention(chosen.attention)

    # what a step changes, and what saves it
    parallel = distributed.parallelize(model, ranks, device, chosen.dtype, chosen.compiled)
    optimizer = build_optimizer(model, s, device.type, chosen.dtype)
    # float16 rounds gradients below 3e-8 to 0, so the loss is scaled up for backward; bfloat16 has float32's range
    scaler = GradScaler(device.type, enabled=chosen.dtype == torch.float16)
    state = TrainState(
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        iteration=start,
        parallel=parallel,
        cast=autocast(device, chosen.dtype),
        batches=batches,
        batch=batch,
        clock=timing.StepClock(device),
        results=StepResults(ranks),
    )
    checkpoints = Checkpoints(out_dir, s.keep_checkpoints, lock, logger.say, ranks)
    if saved:
        resume.restore(saved, s, state, meta, logger.say)
        checkpoints.resume(saved, path)
        saved = None  # drop its tensors: they are mapped from a file that may be replaced
    if len(starts := set(ranks.gather(start))) > 1:
        raise UserError(f"nodes have different checkpoints in {out_dir}, of iterations {starts}: share that folder")
    run = Run(s, state, ranks, micro_steps, loader, meta, prompts, checkpoints, logger)
    rehearse(run, chosen, cases[0])
    return run


def rehearse(run: Run, chosen: tuning.Settled, case: Case) -> None:
    """Make two forward and backward passes, the second under the profiler, and print what is about to run.

    No weight changes. A run that only evaluates makes no pass. Raises UserError if the profiler saw another kernel than
    the one that was asked for, or if CUDA graphs were asked for and a step could not use them.
    """
    s, state, ranks, logger = run.s, run.state, run.ranks, run.logger

    def forward_backward():
        # without the sync, FSDP would add this gradient to the first step's
        with distributed.gradient_sync(state.parallel, enabled=True):
            with state.cast:
                _, loss = state.parallel(*state.batch, logits=False)
            loss.backward()
        # gradients of CUDA graphs lie in the graphs' memory, and the next forward frees them (pytorch#169545)
        state.optimizer.zero_grad(set_to_none=True)

    logger.status("compiling" if chosen.compiled else "looking at the kernels")
    receipt = graphs = None
    if not s.eval_only:
        if cuda_graphs(case.device) and len(run.micro_steps) > 1:  # they overwrite gradients (pytorch#96693)
            raise UserError("TORCHINDUCTOR_CUDAGRAPHS=1 works with one micro-step for each process alone: unset it")
        before = graphs_compiled()
        forward_backward()
        graphs = graphs_compiled() - before
        receipt = observe(forward_backward, run.trace, state.model.config.padded_vocab_size)
        if reason := contradiction(chosen.attention, receipt, case):
            raise UserError(reason)
    run.record = run_record(s, state.model, case.device, ranks, chosen, receipt=receipt, graphs=graphs)
    logger.announce(run.record, chosen.why_eager)


@distributed.others_needed()
def main(s: Settings) -> None:
    """Train as `s` says. Raises UserError for bad input. A signal ends the script with status 128 + its number."""
    began = time.perf_counter()
    s, ranks, device = join(s)
    with contextlib.ExitStack() as stack, Logger(ranks.main) as logger:
        logger.say("\n".join(settings_lines(s)))
        run = build(s, ranks, device, logger)
        run.token_bytes = evaluation.token_bytes(run.meta, ranks, device, logger.status, logger.say)
        if run.record["compile"]:
            run.losses(s.batch_size)  # compile the evaluation graph now, so that no evaluation's time includes it
        if s.eval_tasks:
            from fusedgpt.interchange.harness import Scorer  # lm_eval takes seconds to import

            run.scorer = Scorer(s.eval_tasks, run.state.model, run.state.cast, run.meta, ranks, s.batch_size)
        budget.settle(run, functools.partial(train_step, run.state, run.s, run.micro_steps), began)
        if run.s.init_from != "resume" and not s.eval_only:
            logger.say(reading_line(run.s, len(run.loader.files["train"]), run.record["parameters"]))
        memory.reset_peak_memory(device)  # compilation, the rehearsal and the timing are over
        gc.collect()
        gc.freeze()  # freeze long-lived objects so that garbage collection does not stall a step
        stack.callback(gc.unfreeze)  # a compiled model is a cycle, which a notebook would keep
        if not s.eval_only:
            run.open_log()
            run.stopped_by = stack.enter_context(catch_signals(ranks.main))
        if s.max_seconds is not None:
            run.deadline = began + s.max_seconds
        training_loop(run)
        run.finish()


if __name__ == "__main__":
    with one_sentence(WITH_LESS):
        main(read_settings(sys.argv[1:]))
