"""A training step waits for nothing, skips and clips on the device, and is timed alone."""

import itertools
import time

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.overrides import TorchFunctionMode

import train
from fusedgpt.machine import timing
from fusedgpt.machine.device import autocast
from fusedgpt.parallel import distributed
from fusedgpt.parallel.distributed import Ranks
from fusedgpt.runs import progress
from fusedgpt.training.optimizer import build_optimizer
from fusedgpt.training.step_results import StepResults
from model import GPT, GPTConfig
from tests.conftest import checkpoint_of, record, rows, run


class Waits(TorchFunctionMode):
    """Counts each time that Python reads a number from a tensor, for which it would have to wait for a GPU."""

    READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu", "nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += getattr(function, "__name__", "") in self.READS
        return function(*args, **(kwargs or {}))


def state_of(model, s, device, dtype):
    """The state of a run of `model` whose micro-batches are all the same."""
    optimizer = build_optimizer(model, s, device.type, torch.float32)
    # at the usual scale of 2 ** 16, the gradients of so few weights overflow for some seeds
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=dtype == torch.float16)
    batch = 2 * (torch.zeros(2, s.block_size, dtype=torch.long, device=device),)
    loop = (model, autocast(device, dtype), itertools.repeat(batch), batch, timing.StepClock(device))
    return train.TrainState(model, optimizer, scaler, 0, *loop, StepResults(Ranks()))


def test_nothing_waits_for_the_device_between_reported_steps(tmp_path, data, monkeypatch):
    # a step used to wait for the norm of the gradient
    waits, reports, loop = Waits(), [], train.training_loop
    options = dict(max_iters=20, eval_interval=10, dtype="float16", optimizer="muon", dropout=0.1)

    def outside(call):
        def called(*args, **options):
            before = waits.count
            try:
                return call(*args, **options)
            finally:
                waits.count = before

        return called

    def watched(run):
        def noted(**options):
            reports.append(run.state.iteration)
            return report(**options)

        report = run.report
        run.report = outside(noted)
        for name in ("evaluate_and_save", "save_whole_steps", "sample"):
            setattr(run, name, outside(getattr(run, name)))
        with waits:
            loop(run)

    monkeypatch.setattr(train, "training_loop", watched)
    run(tmp_path / "rare", data, log_interval=7, **options)
    assert waits.count == 0
    assert reports == [1, 8, 10, 15, 20]  # after steps 0, 7 and 14, which have a line, and before evaluations
    step = train.train_step

    def reads(*args):
        results = step(*args)
        results["grad_norm"].item()
        return results

    monkeypatch.setattr(train, "train_step", reads)
    run(tmp_path / "reads", data, log_interval=7, **options)
    assert waits.count == 20  # so a read in a step would have been seen


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_step_on_a_gpu_does_not_wait_and_skips_on_the_device(monkeypatch, dtype, optimizer):
    device = torch.device("cuda", 0)
    shape = dict(n_layer=1, n_head=2, n_embd=64, block_size=32)
    s = train.Settings(**shape, batch_size=2, warmup_iters=0, optimizer=optimizer)
    model = GPT(GPTConfig(block_size=32, vocab_size=65, n_layer=1, n_head=2, n_embd=64)).to(device)
    state = state_of(model, s, device, getattr(torch, dtype))

    def step():
        state.clock.start()
        results = train.train_step(state, s, range(2))
        state.clock.stop()
        return results

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        monkeypatch.setattr(distributed, "gradient_norm", lambda model: torch.full((), torch.nan, device=device))
        before = [p.detach().clone() for p in model.parameters()]
        norm = step()["grad_norm"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert norm.isnan() and all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert {each["step"].item() for each in state.optimizer.state.values() if "step" in each} == {3}
    times = state.clock.read()
    assert len(times) == 4 and min(times) > 0


def test_each_pass_of_a_rehearsal_begins_without_gradients(tmp_path, data, monkeypatch):
    # with CUDA graphs the second pass added to gradients that its own forward had overwritten: no run could start
    model, left, observe = [], [], train.observe
    monkeypatch.setattr(train, "GPT", lambda config: model.append(GPT(config)) or model[0])

    def profiled(call, *args):
        for each in (lambda: None, call):
            each()
            left.append([name for name, p in model[0].named_parameters() if p.grad is not None])
        return observe(call, *args)

    monkeypatch.setattr(train, "observe", profiled)
    run(tmp_path, data, max_iters=1)
    assert left == [[], []]


def test_times_are_true_of_steps_that_are_read_later(tmp_path, data, monkeypatch):
    # T10: nanoGPT's time includes evaluations; and no step's time may include the start of the program
    told = iter(n * (n + 1) / 2000 for n in itertools.count())  # between readings pass 1 ms, 2 ms, 3 ms, …
    monkeypatch.setattr(train.timing.StepClock, "_mark", lambda clock: next(told))
    monkeypatch.setattr(progress.flops, "peak_flops", lambda *_: (1e12, "of this test"))
    run(tmp_path, data, max_iters=6, log_interval=4, eval_interval=3, gradient_accumulation_steps=2)
    assert [row["ms"] for row in rows(tmp_path)] == pytest.approx([1, 3, 5, 7, 9, 11])
    flops = record(tmp_path)["mfu"]["flops_per_token"]
    for row in rows(tmp_path):  # both micro-batches count, 4 x 16 tokens each
        assert row["tokens_per_s"] == pytest.approx(1e3 * 2 * 4 * 16 / row["ms"])
        assert row["mfu"] == pytest.approx(flops * row["tokens_per_s"] / 1e12)


def test_a_signal_or_the_time_limit_does_not_wait_for_a_line(tmp_path, data, monkeypatch):
    steps, step, now = [], train.train_step, time.perf_counter
    monkeypatch.setattr(train, "train_step", lambda *args: steps.append(args) or step(*args))
    monkeypatch.setattr(train.time, "perf_counter", lambda: now() + 1e6 * (len(steps) > 2))  # the third takes 11 days
    never = dict.fromkeys(("max_iters", "log_interval", "eval_interval", "check_interval"), 10**9)
    run(tmp_path, data, max_seconds=1e5, **never)
    assert [row["iter"] for row in rows(tmp_path)] == [0, 1, 2]
    assert rows(tmp_path, "eval")[-1]["iter"] == checkpoint_of(tmp_path)["iter_num"] == 3


def test_one_graph_trains_and_one_evaluates(tmp_path, data, monkeypatch):
    made = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(train.tuning, "resolve_compile", lambda *_: (True, ""))
    monkeypatch.setattr(GPT, "compile", lambda self: torch.nn.Module.compile(self, backend=made))
    run(tmp_path, data, max_iters=2, eval_interval=1, gradient_accumulation_steps=2)  # three evaluations
    assert made.frame_count == 2
    assert record(tmp_path)["graphs"] == 1
