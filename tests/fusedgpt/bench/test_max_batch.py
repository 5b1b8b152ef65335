"""The largest micro-batch: the search, the estimate, and the limit of memory."""

import sys
import types

import pytest
import torch

from fusedgpt.bench import child, max_batch
from fusedgpt.errors import UserError
from fusedgpt.machine.device import why_no_compiler
from tests.fusedgpt.bench.small import rows_of, run, settings

CPU = torch.device("cpu")


def tried(most, guess):
    """(what `largest` returns, the numbers that it tried) if numbers up to `most` fit."""
    asked = []
    found = max_batch.largest(lambda n: asked.append(n) or n <= most, guess)
    return found, asked


def test_the_largest_is_found_from_any_guess():
    for most in [*range(70), 127, 128, 129, 250, 1000]:
        for guess in [*range(-1, 140), 250, 999, 5000]:
            found, asked = tried(most, guess)
            assert found == most, guess
            assert most + 1 in asked and (most in asked or most == 0)  # neither is concluded from others
            assert len(asked) == len(set(asked)) <= 2 * max(most, guess, 1).bit_length() + 2


@pytest.mark.parametrize(("off", "at_most"), [(0.02, 6), (0.1, 8)])
def test_a_good_guess_takes_few_trials(off, at_most):
    # by doubling and bisection a guess of 250 took 9 or 10 trials, of a minute each on a GPU
    for most in range(30, 300):
        for guess in range(round(most * (1 - off)) + 1, round(most * (1 + off))):
            assert len(tried(most, guess)[1]) <= at_most, (most, guess)


def test_the_estimate_is_near_a_hand_count(tmp_path, data):
    # what the hand-written attention alone keeps for backward in float32: the softmax of its scores, in every layer
    s = settings("max_batch", tmp_path, data, block_size=128, n_embd=32, dtype="float32")
    each = {}
    for name in ("manual", "flash"):
        s.attention = name
        fixed, each[name] = max_batch.estimate(s, CPU, torch.float32)
        weights = 4 * 4 * (12 * 2 * 32**2 + (128 + 128) * 32)  # float32, gradient, AdamW's two; LayerNorms aside
        assert 0.75 * weights < fixed < 1.5 * weights
    kept = 2 * 2 * 128 * 128 * 4
    assert 0.9 * kept < each["manual"] - each["flash"] < 2.5 * kept


def test_the_estimate_is_of_the_run_that_is_tried(tmp_path, data):
    # with --recompute=block or --loss=chunked it was of a run without, and the title said that it was far too low
    def estimate(**changes):
        s = settings("max_batch", tmp_path, data, **dict(block_size=128, n_embd=32, dtype="float32") | changes)
        s.attention = "manual"
        return max_batch.estimate(s, CPU, torch.float32)

    fixed, each = estimate()
    assert estimate(recompute="block")[1] < 0.8 * each
    assert estimate(vocab_size=4096, loss="chunked")[1] < 0.5 * estimate(vocab_size=4096)[1]
    assert estimate(mask="document")[1] > each  # the mask of each sequence
    assert fixed - estimate(optimizer="muon")[0] == 4 * 12 * 2 * 32**2  # one mean of the blocks' matrices, not two
    assert estimate(vocab_size=None) == (fixed, each)  # the data's 65 ids, not 256
    with pytest.raises(FileNotFoundError, match="is no folder"):  # no refusal: it may be prepared later
        estimate(vocab_size=None, dataset="nowhere")


def test_each_kind_of_layer_is_proved_before_a_trial(tmp_path, data, monkeypatch, stand_in):
    proved = []
    monkeypatch.setattr(max_batch, "prove_kernel", lambda name, case: proved.append(case.window) or {})
    monkeypatch.setattr(max_batch, "estimate", lambda *_: (0, 2**28))
    monkeypatch.setattr(max_batch, "largest", lambda fits, guess: int(fits(1)))
    changes = dict(only="manual", block_size=16, window=8, window_pattern="SL")
    run("max_batch", tmp_path, data, **changes)
    assert proved == [8, None]


ALLOCATES = """
import pathlib, sys
try:
    held = bytearray(2**28)
except MemoryError:
    sys.exit("Cannot allocate memory")
out_dir = pathlib.Path(next(arg for arg in sys.argv if arg.startswith("--out_dir=")).partition("=")[2])
out_dir.mkdir()
(out_dir / "run.json").write_text("{}")
(out_dir / "metrics.jsonl").touch()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit of data")
def test_a_run_may_hold_so_many_bytes_and_no_more(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(ALLOCATES)
    monkeypatch.setattr(child, "TRAIN", tmp_path / "train.py")
    assert child.run({"profile": False}, tmp_path / "run", memory=2**30) == ({}, [])
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        child.run({"profile": False}, tmp_path / "run", memory=2**27)


@pytest.mark.slow  # processes that import PyTorch
def test_a_budget_ends_an_allocation_on_a_cpu(tmp_path, data):
    pytest.importorskip("tyro")  # which train.py reads its command line with
    s = settings("max_batch", tmp_path, data, batch_size=4096, block_size=64)
    held, resident = child.held_by_pytorch()
    assert resident > 0
    asked = child.settings(s, max_batch.Settings)
    with pytest.raises(MemoryError):
        child.run(asked, tmp_path / "run", held + 2**28)


@pytest.mark.slow  # to compile steps takes seconds
def test_the_estimate_is_of_compiled_steps_if_the_run_compiles(tmp_path, data, device):
    # two eager steps told what a run that never makes them would hold
    if reason := why_no_compiler(device):
        pytest.skip(reason)
    s = settings("max_batch", tmp_path, data, n_layer=1, n_embd=32, n_head=2, block_size=128, dtype="float32")
    s.attention = "manual"
    eager = max_batch.estimate(s, device, torch.float32)
    s.compile = True
    compiled = max_batch.estimate(s, device, torch.float32)
    scores = 2 * 128 * 128 * 4  # (nh, T, T): Inductor fuses mask, scale and softmax, but must keep one for backward
    assert scores < compiled[1] < eager[1]


STEP = {"kind": "train", "ms": 100.0, "peak_memory": 7, "loss": 1.0, "mfu": 0.5, "tokens_per_s": 10.0}
ONE_ROW = dict(only="flash", block_size=16)


@pytest.fixture
def stand_in(monkeypatch):
    """A stand-in for child.run: the settings of its calls, and `end(settings)`, which a test may replace."""
    seen = types.SimpleNamespace(calls=[], end=lambda settings: None)

    def run(settings, out_dir, memory=None, trace=None):
        seen.calls.append(settings)
        seen.end(settings)
        ran = dict.fromkeys(child.RAN) | {"dtype": "float32"}
        record = {"tokens_per_step": 64, "mfu": {"peak_flops": 1.0, "peak_source": ""}, "receipt": {}, **ran}
        return record, [*[STEP] * 6, {"kind": "eval", "val_loss": 2.5}]

    monkeypatch.setattr(child, "run", run)
    monkeypatch.setattr(child, "held_by_pytorch", lambda: (100, 50))
    monkeypatch.setattr(max_batch, "estimate", lambda *_: (2**28, 2**28 // 6))  # 6 fit into TINY's half GiB
    monkeypatch.setattr(max_batch, "prove_kernel", lambda *_: {})
    monkeypatch.setattr(max_batch, "figures", lambda *_: iter(()))
    return seen


def sizes(stand_in):
    """The batch sizes of the calls since the last look."""
    found = [settings["batch_size"] for settings in stand_in.calls]
    stand_in.calls.clear()
    return found


def up_to(most, reason=None):
    """An `end` of child.run for batches beyond `most`: out of memory, or for another `reason`."""

    def end(settings):
        if settings["batch_size"] > most:
            raise RuntimeError(reason) if reason else MemoryError("full")

    return end


def test_max_batch_searches_then_trains_for_its_time(tmp_path, data, stand_in):
    stand_in.end = lambda settings: up_to(4 if settings["max_seconds"] else 5)(settings)
    s = settings("max_batch", tmp_path, data, train_seconds=60, max_seconds=1e9, eval_iters=10)
    row = max_batch.measure({"attention": "manual"}, s, CPU, tmp_path)
    assert [call["max_seconds"] for call in stand_in.calls] == [None, None, 60, 60]  # the budget is not a run's
    assert stand_in.calls[-1]["eval_interval"] == 50 and stand_in.calls[-1]["eval_iters"] == 10
    assert sizes(stand_in) == [6, 5, 5, 4]  # from the estimate; and the longer run had no room at 5
    assert row["largest"] == 4 and row["curve"] == [[pytest.approx(0.6), 2.5]]
    assert row["estimate"]["largest"] == 6 and [t["fits"] for t in row["trials"]] == [False, True]


def test_the_articles_largest_batches_stand_beside_ours(tmp_path, data, stand_in):
    stand_in.end = up_to(5)
    run("max_batch", tmp_path, data, only="manual,flash,math", block_size=16)
    text = (tmp_path / "results" / "max_batch" / "report.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, *lines = cells[next(n for n, (first, *_) in enumerate(cells) if first == "attention") :]
    column = next(n for n, name in enumerate(head) if name.startswith("the article"))
    assert {line[0]: line[column] for line in lines} == {"manual": "24", "math": "", "flash": "39"}
    assert all(len(line) == len(head) for line in lines)


def test_trials_of_a_row_that_was_interrupted_are_not_made_again(tmp_path, data, stand_in):
    def end(settings):
        if len(stand_in.calls) == 4:  # 6, 5, 3, and then a kill in the middle of 4
            raise KeyboardInterrupt
        up_to(3)(settings)

    stand_in.end = end
    with pytest.raises(KeyboardInterrupt):
        run("max_batch", tmp_path, data, **ONE_ROW)
    assert sizes(stand_in) == [6, 5, 3, 4]
    stand_in.end = up_to(3)
    (row,) = run("max_batch", tmp_path, data, **ONE_ROW)
    assert sizes(stand_in) == [4, 3]  # 4 again, and the timed run
    assert [(t["batch_size"], t["fits"]) for t in row["trials"]] == [(6, False), (5, False), (3, True), (4, False)]
    assert row["largest"] == 3
    # a row that is measured again, here for its profile, takes up its trials too
    run("max_batch", tmp_path, data, **ONE_ROW, profile=True)
    assert sizes(stand_in) == [3]
    run("max_batch", tmp_path, data, only="manual", block_size=16)
    assert sizes(stand_in) == [6, 5, 3, 4, 3]  # trials are one kernel's


def test_trials_count_if_as_much_memory_is_free(tmp_path, data, stand_in, monkeypatch):
    # another process held half of the GPU while they were made
    stand_in.end = up_to(5)
    s, spec = settings("max_batch", tmp_path, data), {"attention": "manual"}
    for free, made in ((2**29, [6, 5, 5]), (2**28, [1, 2, 4, 8, 6, 5, 5]), (2**29 + 2**20, [5])):
        monkeypatch.setattr(max_batch, "_free", lambda *_, free=free: free)
        assert max_batch.measure(spec, s, CPU, tmp_path)["largest"] == 5
        assert sizes(stand_in) == made


def test_the_budget_is_looked_at_before_each_trial(tmp_path, data, stand_in, monkeypatch, capsys):
    stand_in.end = up_to(3)
    monkeypatch.setattr(max_batch, "time_is_up", lambda max_seconds: len(stand_in.calls) == 1)  # time for one in each
    for size in (6, 5, 3, 4):
        with pytest.raises(UserError, match="was over before any row of max_batch: give more seconds"):
            run("max_batch", tmp_path, data, **ONE_ROW, max_seconds=1e9)
        assert "1 of 1 rows are missing" in capsys.readouterr().out and sizes(stand_in) == [size]
    assert run("max_batch", tmp_path, data, **ONE_ROW, max_seconds=1e9)[0]["largest"] == 3
    assert sizes(stand_in) == [3]


@pytest.mark.parametrize(
    "said", ["RuntimeError: canUse32BitIndexMath", "AcceleratorError: CUDA error: an illegal memory access"]
)
def test_a_trial_that_fails_otherwise_does_not_fit_and_says_why(tmp_path, data, stand_in, said):
    # a batch that a kernel cannot index ended the row, and its smaller batches were never tried
    stand_in.end = up_to(3, said)
    (row,) = run("max_batch", tmp_path / "three", data, **ONE_ROW)
    assert row["largest"] == 3 and [t.get("reason") for t in row["trials"]] == [said, said, None, said]
    report = (tmp_path / "three" / "results" / "max_batch" / "report.md").read_text()
    assert f"Something other than memory ended a batch of 4 with `flash`: {said}." in report
    stand_in.end = up_to(0, said)
    with pytest.raises(UserError, match="no row of max_batch could be measured"):
        run("max_batch", tmp_path, data, **ONE_ROW)
    assert rows_of("max_batch", tmp_path)[-1]["status"] == "failed"
    stand_in.end = up_to(3)  # a failure may have been a machine's: like a failed row, it is tried again
    sizes(stand_in)
    run("max_batch", tmp_path, data, **ONE_ROW)
    assert sizes(stand_in) == [6, 5, 3, 4, 3]


@pytest.mark.gpu
def test_max_batch_on_a_gpu_stops_at_real_memory(tmp_path, data):
    pytest.importorskip("tyro")  # which train.py reads its command line with
    changes = dict(device="cuda", dtype="bfloat16", n_embd=256, block_size=1024, batch_size=10**5)
    s = settings("max_batch", tmp_path, data, **changes)
    with pytest.raises(MemoryError):
        child.run(child.settings(s, max_batch.Settings), tmp_path / "run")


def measured(attention, largest, ms, guess, losses, **more):
    found = dict(attention=attention, status="measured", largest=largest, median_ms=ms, tokens_per_s=1e6 / ms)
    found |= dict(estimate={"fixed": 0, "each": 2**20, "largest": guess}, memory=2**30, ran={"dtype": "float32"})
    found |= dict(
        peak_memory=largest * 2**21 + 5, held_by_pytorch=5, curve=[[10.0 * n, y] for n, y in enumerate(losses)]
    )
    return found | more


def test_the_titles_say_what_fits_and_who_learns_more_in_the_same_time(tmp_path, data):
    # the figures showed an estimate twice as high, and the kernel with the larger batch behind, and gave no reason
    s = vars(settings("max_batch", tmp_path, data))
    manual, flash = (
        measured("manual", 10, 100.0, 20, [5.0, 3.0, 2.0]),
        measured("flash", 20, 400.0, 30, [5.0, 4.0, 3.0]),
    )
    (_, largest, why, _), (_, curves, steps, _) = max_batch.figures([manual, flash], s)
    assert largest == "Sequences that fit: manual 10, flash 20; the estimate says 1.5 to 2 times as many"
    assert "The estimate counts tensors; a run held 2 times as much at its largest batch (the process keeps" in why
    assert curves == "After 20 s of training manual has the lower validation loss: 2.00, flash 3.00"
    assert "manual about 200 steps of 10 sequences (10,000 tokens/s), flash about 50 steps of 20" in steps
    assert max_batch.finding_of_curves([flash]) == "After 20 s of training flash has a validation loss: 3.00"
    # each run evaluates windows of its own, which make 0.02 before the first step: 0.01 was called a lower loss
    near = measured("flash", 20, 400.0, 30, [5.02, 3.0, 2.01])
    title, windows = next(rest[:2] for name, *rest in max_batch.figures([manual, near], s) if name == "curves")
    open_ = "After 20 s of training it is open which kernel has the lower validation loss: manual 2.00, flash 2.01"
    assert title == open_ and windows.endswith("losses before the first step do, by 0.02")
    third = measured("math", 5, 100.0, 5, [5.0, 2.0, 1.0])
    assert max_batch.finding_of_curves([manual, flash, third]).endswith(
        "math has the lowest validation loss: 1.00, manual 2.00, flash 3.00"
    )
    refused = {"attention": "cudnn", "status": "refused", "reason": "on GPUs only"}
    figures = list(max_batch.figures([manual | {"disturbed": True}, refused], s))
    assert len(figures) == 1 and "Refused here: cudnn (on GPUs only)." in figures[0][2]
    on_a_gpu = max_batch.figures([manual | {"held_by_pytorch": 0}], s)
    assert "libraries" not in next(on_a_gpu)[2]
