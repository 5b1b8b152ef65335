"""Does a test or a gate notice if the project computes something else? Plants one mistake after another and counts.

    python tests/mutants.py [WORD ...]

Each mutant is a small change to one file in a copy of the project. It is dead if a test that is named beside it then
fails. With words, only mutants that have one of them in their description are planted. The exit status is 1 if a mutant
lives. If one cannot be planted, because its text or test is gone or its tests fail without it, a sentence says so.
"""

import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in tests/conftest.py, which is imported after PyTorch here
ROOT = pathlib.Path(__file__).resolve().parent.parent
COPIED = ("fusedgpt", "tests", "config", "pyproject.toml", *(file.name for file in ROOT.glob("*.py")))
PROCESSES = 2
LIMIT_S = 600.0  # tests that take longer count as hanging
# slow to import: forked processes inherit them
PRELOADED = ("torch._dynamo", "torch.distributed", "torch.profiler", "hypothesis", "tyro", "typeguard")
PRELOADED += ("transformers.models.gpt2.modeling_gpt2", "pytest")
PASSED, FAILED = 0, 1  # exit codes of pytest; any other: a test could not be run


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A mistake: `old`, which occurs once in `file`, becomes `new`. `tests` should notice it."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, root: pathlib.Path) -> str:
        """The text of its file in `root`, with the mistake. Exits if `old` does not occur exactly once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            sys.exit(f"error: the mutant no longer applies: {self.what}. {self.file} has {self.old!r} not exactly once")
        return text.replace(self.old, self.new)


def mutants(file: str, test: str, *changes: tuple[str, str, str]) -> list[Mutant]:
    """Mutants of `file`, each as (what, old, new), that `test`, a file in tests/ and a name, should notice."""
    return [Mutant(what, file, old, new, (f"tests/{test}",)) for what, old, new in changes]


# the first 8 lived until attention's tests and the gate were made to notice them
MUTANTS = [
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_parity.py::test_the_gate_lets_attention_pass[blocked-torch.float32-64]",
        (
            "a last block that is not full sees one key less",
            "last = Tk - T + stop",
            "last = Tk - T + stop - (start > 0 and stop - start < BLOCK)",
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_functions.py::test_dropout_drops_single_weights_and_scales_the_rest[manual-cpu-4]",
        (
            "dropout at p/2",
            "_product(F.dropout(weights, dropout_p), v)",
            "_product(F.dropout(weights, dropout_p / 2), v)",
        ),
        (
            "dropout of the values in place of the weights",
            "_product(F.dropout(weights, dropout_p), v)",
            "_product(weights, F.dropout(v, dropout_p))",
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_parity.py::test_the_gate_lets_attention_pass[manual-torch.float32-64]",
        ("scores clamped at 60", "weights = scores.masked_fill", "weights = scores.clamp(max=60).masked_fill"),
        ("scores clamped at 8", "weights = scores.masked_fill", "weights = scores.clamp(max=8).masked_fill"),
        (
            "scores are not scaled",
            "_product(q, k.transpose(-2, -1)) * q.size(-1) ** -0.5",
            "_product(q, k.transpose(-2, -1))",
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_parity.py::test_the_gate_lets_attention_pass[manual-torch.bfloat16-64]",
        (
            "dk 2 % off in bfloat16",
            "    return _weighted(_product(q, k",
            "    k = k + 0.02 * (k.dtype == torch.bfloat16) * (k - k.detach())\n    return _weighted(_product(q, k",
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_functions.py::test_within_documents_output_and_gradients_equal_float64"
        "[blocked-cpu-torch.float32]",
        (
            "a token sees all earlier documents",
            "documents[:, None, -T:, None] == documents",
            "documents[:, None, -T:, None] >= documents",
        ),
        (
            "a block of queries has the first keys' documents",
            "documents[:, None, -T:, None]",
            "documents[:, None, :T, None]",
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_functions.py::test_flex_within_documents_equals_float64_on_cpu",
        ("flex sees all earlier documents", "(documents[b, i + past] == doc", "(documents[b, i + past] >= doc"),
    ),
    *mutants(
        "model.py",
        "test_model.py::test_each_document_is_computed_as_if_it_were_alone[manual]",
        (
            "a document begins after its first id",
            "(ids == start).cumsum(dim=-1)",
            "(ids == start).cumsum(dim=-1).roll(1, -1)",
        ),
    ),
    *mutants(
        "fusedgpt/generation/generate.py",
        "fusedgpt/generation/test_generate.py::test_cached_equals_uncached_within_documents[manual]",
        (
            "a cache forgets where documents began",
            "self.ids[:, self.length : stop] = idx",
            "self.ids[:, : idx.size(1)] = idx",
        ),
    ),
    *mutants(
        "fusedgpt/generation/generate.py",
        "fusedgpt/generation/test_generate.py::test_every_family_generates_with_a_cache_what_it_does_without[pattern]",
        ("a window's cache moves older keys", "x[:, :, held - self.window : held].clone()", "x[:, :, : self.window]"),
        ("a token sees one key too few", "self.window - 1) if self.window", "self.window - 2) if self.window"),
    ),
    *mutants(
        "fusedgpt/generation/engines.py",
        "fusedgpt/generation/test_engines.py::test_static_shapes_compute_what_growing_ones_do_in_every_family[pattern-3]",
        ("a static step sees one key beyond the window", "every > slot - window", "every >= slot - window"),
        (
            "documents are where positions are",
            "_rotated(documents, -1 - slot)",
            "_rotated(documents, -1 - self.position)",
        ),
    ),
    *mutants(
        "fusedgpt/generation/packed.py",
        "fusedgpt/generation/test_packed.py::test_a_layer_that_computes_something_else_is_not_packed",
        ("a layer of a class of its own is packed", "type(child) is nn.Linear", "isinstance(child, nn.Linear)"),
    ),
    *mutants(
        "fusedgpt/generation/engines.py",
        "fusedgpt/generation/test_engines.py::test_if_calls_are_held_up_those_on_one_thread_count",
        ("calls that were held up decide", "return first | alone,", "return first | least,"),
    ),
    *mutants(
        "fusedgpt/attention/parity.py",
        "fusedgpt/attention/test_parity.py::test_the_gate_sees_what_is_wrong",
        ("the gate compares at round lengths only", "ODD_LENGTHS = (127, 300)", "ODD_LENGTHS = (128, 256)"),
    ),
    *mutants(
        "fusedgpt/attention/choose.py",
        "fusedgpt/attention/test_parity.py::test_auto_has_the_same_gate",
        (
            "auto compares two heads at the model's own length",
            "in parity.checks(as_run(self.name, self.case), self.compared):",
            'in [("", parity.compare(self.attend, parity.shortened(self.case), heads=2))]:',
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_functions.py::test_with_shared_keys_and_a_window_output_and_gradients_equal_float64",
        ("a window one token wider", ".triu(Tk - T + 1 - window)", ".triu(Tk - T - window)"),
        ("blocked begins a window one key late", "Tk - T + start + 1 - window", "Tk - T + start + 2 - window"),
        (
            "rows of a group in another order",
            "k.size(1), -1, q.size(-1))  # (B",
            "k.size(1), -1, q.size(-1)).flip(1)  # (B",
        ),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_functions.py::test_future_tokens_move_no_earlier_output[manual-cpu]",
        ("queries see the next key", ".tril(Tk - T)", ".tril(Tk - T + 1)"),
    ),
    *mutants(
        "fusedgpt/attention/functions.py",
        "fusedgpt/attention/test_functions.py::test_fewer_queries_than_keys_see_what_came_before[5-sdpa-cpu]",
        (
            "the mask of cached queries is aligned to the top left",
            "mask = _lower_right(T, Tk)",
            "mask = torch.ones(T, Tk, dtype=torch.bool, device=q.device).tril()",
        ),
    ),
    *mutants(
        "fusedgpt/attention/parity.py",
        "fusedgpt/attention/test_parity.py::test_parity_refuses_a_wrong_kernel",
        ("not-a-number counts as exact", "nan_to_num(nan=torch.inf)", "nan_to_num(nan=0.0)"),
    ),
    *mutants(
        "fusedgpt/attention/receipt.py",
        "fusedgpt/attention/test_receipt.py::test_contradiction_is_found",
        (
            "a receipt is read forward only",
            'for direction in ("forward", "backward") if case.backward else ("forward",):',
            'for direction in ("forward",):',
        ),
    ),
    *mutants(
        "model.py",
        "test_model.py::test_dropout_is_off_outside_training",
        ("attention drops weights in evaluation", "self.dropout if self.training else 0.0", "self.dropout"),
    ),
    *mutants(
        "model.py",
        "test_model.py::test_padding_starts_equal_and_stays_out",
        ("the first padded id can be sampled", "device=z.device) >= vocab_size", "device=z.device) > vocab_size"),
    ),
    *mutants(
        "fusedgpt/loss.py",
        "fusedgpt/test_loss.py::test_it_does_not_rely_on_autocast[dtype0]",
        ("log-probabilities in bfloat16", "z.to(torch.promote_types(z.dtype, torch.float32))", "z"),
    ),
    *mutants(
        "fusedgpt/loss.py",
        "test_model.py::test_padding_starts_equal_and_stays_out",
        ("padding takes part in the loss", "z[..., :vocab_size].flatten(0, -2)", "z.flatten(0, -2)"),
    ),
    *mutants(
        "fusedgpt/loss.py",
        "test_model.py::test_each_loss_equals_float64",
        (
            "targets of -1 count",
            "targets.flatten(), ignore_index=-1",
            "targets.flatten().clamp(min=0), ignore_index=-1",
        ),
        ("a chunked loss is a mean over all targets, with those of -1", "/ (targets >= 0).sum()", "/ targets.numel()"),
    ),
    *mutants(
        "model.py",
        "test_model.py::test_optimizer_decays_matrices_only",
        ("biases and LayerNorms decay", '"weight_decay": 0.0}', '"weight_decay": weight_decay}'),
    ),
    *mutants(
        "model.py",
        "test_model.py::test_nanogpt_interface",
        (
            "FLOPs count attention at half",
            "+ 12 * c.n_head * c.head_channels * seen",
            "+ 6 * c.n_head * c.head_channels * seen",
        ),
    ),
    *mutants(
        "train.py",
        "test_train.py::test_splits_of_a_step_give_the_same_loss_and_gradient",
        (
            "gradients are summed over the micro-steps",
            "state.scaler.scale(loss / len(micro_steps))",
            "state.scaler.scale(loss)",
        ),
    ),
    *mutants(
        "train.py",
        "test_train.py::test_dropout_differs_from_step_to_step_and_from_micro_batch_to_micro_batch",
        (
            "each micro-batch has the same dropout",
            'determinism.seed(s.seed, "dropout", state.iteration, micro_step)',
            'determinism.seed(s.seed, "dropout")',
        ),
    ),
    *mutants(
        "fusedgpt/training/optimizer.py",
        "test_train.py::test_one_step_is_adamw_on_the_clipped_mean_gradient",
        (
            "gradients are clipped by the square of their norm",
            "(norm / limit).clamp(min=1) if limit else None",
            "(norm * norm / limit).clamp(min=1) if limit else None",
        ),
        ("beta1 and beta2 are swapped", "(s.beta1, s.beta2)", "(s.beta2, s.beta1)"),
    ),
    *mutants(
        "fusedgpt/training/optimizer.py",
        "fusedgpt/training/test_optimizer.py::test_a_step_that_is_not_finite_changes_nothing_to_the_bit",
        (
            "a step without a finite gradient changes weights",
            "optimizer.found_inf = 1 - norm.isfinite().float()",
            "optimizer.found_inf = torch.zeros_like(norm)",
        ),
    ),
    *mutants(
        "fusedgpt/parallel/owners.py",
        "fusedgpt/parallel/test_owners.py::test_each_matrix_is_whole_on_one_rank_and_goes_back_as_it_came[two]",
        (
            "a shared matrix is put together with its rows in the wrong order",
            "zip(pieces, self.rows)",
            "zip(pieces[::-1], self.rows[::-1])",
        ),
        (
            "a shared matrix gets the update of another",
            "received.view(sum(self.owned), held, whole.size(2))",
            "received.view(sum(self.owned), held, whole.size(2)).flip(0)",
        ),
    ),
    *mutants(
        "fusedgpt/training/optimizer.py",
        "test_train.py::test_learning_rate_warms_up_and_decays",
        ("warm-up starts at a learning rate of 0", "* (it + 1) / (s.warmup_iters + 1)", "* it / s.warmup_iters"),
        ("the cosine is a step ahead", "done = (it - s.warmup_iters) /", "done = (it + 1 - s.warmup_iters) /"),
        (
            "min_lr is ignored",
            "return s.min_lr + share * (s.learning_rate - s.min_lr)",
            "return share * s.learning_rate",
        ),
    ),
    *mutants(
        "fusedgpt/data/dataloader.py",
        "fusedgpt/data/test_dataloader.py::test_every_sample_has_its_own_place_however_the_step_is_split",
        (
            "batches depend on the rank",
            "first = micro_step * self.batch_size",
            "first = (micro_step + self.rank) * self.batch_size",
        ),
    ),
    *mutants(
        "fusedgpt/data/dataloader.py",
        "fusedgpt/data/test_dataloader.py::test_seeds_iterations_and_micro_steps_differ",
        ("each iteration draws the same windows", "counter=[0, 0, 0, iteration]", "counter=[0, 0, 0, 0]"),
    ),
    *mutants(
        "fusedgpt/data/dataloader.py",
        "fusedgpt/data/test_dataloader.py::test_evaluation_is_fixed_windows_shared_by_the_ranks",
        (
            "evaluation leaves out the last window",
            "starts = np.arange(chosen) * fit",
            "starts = np.arange(chosen - 1) * fit",
        ),
        ("evaluation windows overlap", "// chosen * self.block_size", "// chosen * (self.block_size - 1)"),
    ),
    *mutants(
        "fusedgpt/training/evaluation.py",
        "fusedgpt/training/test_evaluation.py::test_all_of_a_split_against_a_sum_in_float64",
        ("evaluation in training mode", "    model.eval()\n", "    model.train()\n"),
    ),
    *mutants(
        "fusedgpt/machine/timing.py",
        "fusedgpt/machine/test_timing.py::test_samples_leave_warm_up_out",
        ("the 95th percentile is called p90", "[10, 50, 90]", "[10, 50, 95]"),
        ("the mean is called median", '{"median_ms": median', '{"median_ms": float(np.mean(ms))'),
    ),
    *mutants(
        "fusedgpt/runs/progress.py",
        "test_step.py::test_times_are_true_of_steps_that_are_read_later",
        (
            "tokens per second leave out the micro-steps",
            '1e3 * record["tokens_per_step"] / ms',
            "1e3 * s.batch_size * s.block_size / ms",
        ),
    ),
    *mutants(
        "fusedgpt/runs/budget.py",
        "fusedgpt/runs/test_budget.py::test_a_run_with_the_numbers_that_it_settled_is_the_same_to_the_bit",
        ("the optimizer remembers the steps that minutes timed", "    state.optimizer.state.clear()\n", ""),
        ("the loss scale remembers them", "    state.scaler.load_state_dict(scaler)\n", ""),
    ),
    *mutants(
        "fusedgpt/interchange/families.py",
        "test_export.py::test_export_has_the_same_logits_without_padding",
        (
            "the projection of attention is exported untransposed",
            "and len(shape) == 2",
            'and len(shape) == 2 and "attn.c_proj" not in path',
        ),
    ),
    *mutants(
        "fusedgpt/runs/run.py",
        "test_resume.py::test_best_and_latest_are_separate",
        (
            "the worst evaluation is kept as the best",
            'losses["val_loss"] < state.best_val_loss',
            'losses["val_loss"] > state.best_val_loss',
        ),
    ),
    *mutants(
        "fusedgpt/runs/resume.py",
        "test_resume.py::test_ten_steps_saved_and_ten_more_are_twenty",
        (
            "a resumed run forgets the optimizer's state",
            "        checkpoint.restore_optimizer(saved, state.optimizer, state.model)",
            "        pass",
        ),
    ),
    *mutants(
        "fusedgpt/runs/resume.py",
        "test_resume.py::test_a_run_trains_on_with_its_schedule",
        (
            "a run that is trained on keeps the end of its schedule, so it learns nothing more",
            "    return dataclasses.replace(s, lr_decay_iters=s.max_iters) if ended else s",
            "    return s",
        ),
    ),
    *mutants(
        "fusedgpt/runs/saver.py",
        "fusedgpt/runs/test_saver.py::test_it_saves_what_the_state_was_and_not_what_it_became",
        (
            "a checkpoint is what the weights become while it is written",
            "copy=True, non_blocking",
            "copy=False, non_blocking",
        ),
    ),
    *mutants(
        "fusedgpt/generation/generate.py",
        "fusedgpt/generation/test_generate.py::test_cached_equals_uncached",
        (
            "cached positions are off by one",
            "torch.arange(self.length, self.length + T, device=device)",
            "torch.arange(self.length, self.length + T, device=device).sub(1).clamp(min=0)",
        ),
    ),
    *mutants(
        "fusedgpt/generation/generate.py",
        "fusedgpt/generation/test_generate.py::test_draws_follow_the_distribution",
        ("top_k admits one id more", "logits.topk(top_k)", "logits.topk(top_k + 1)"),
        ("the temperature is ignored", "/ min(max(temperature, FLOAT32.tiny), FLOAT32.max)", "/ 1.0"),
    ),
]


def _run(folder, mutant):
    """Run the tests of `mutant` in `folder`, a copy of the project, in this process; then the process ends."""
    import pytest

    os.chdir(folder)
    for number in (1, 2):
        os.dup2(os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.path[:] = [path for path in sys.path if pathlib.Path(path).resolve() not in (ROOT, ROOT / "tests")]
    sys.dont_write_bytecode = True  # a cache goes by a file's size and second of writing, which a mutant can share
    options = ["-x", "-q", "--tb=line", "-rfE", "--disable-warnings", "-p", "no:cacheprovider"]
    sys.exit(int(pytest.main([*options, f"--basetemp={folder / 'tmp'}", *mutant.tests])))


def outcomes(mutants: Iterable[Mutant], root: pathlib.Path) -> Iterator[tuple[Mutant, int | None, str, float]]:
    """(mutant, pytest's exit code, its output, seconds) of each as its tests end; the code is None if they hung.

    Each is planted in a copy of the project below `root`. PROCESSES run at a time, forked from this one.
    """
    fork, waiting, running = multiprocessing.get_context("fork"), list(enumerate(mutants)), {}
    try:
        while waiting or running:
            while waiting and len(running) < PROCESSES:
                number, each = waiting.pop(0)
                folder = root / str(number)
                _copy(folder)
                (folder / each.file).write_text(each.planted(folder))
                process = fork.Process(target=_run, args=(folder, each))
                process.start()
                running[process.sentinel] = process, folder, each, time.monotonic()
            wait(running, timeout=1)
            for sentinel, (process, folder, each, began) in list(running.items()):
                seconds = time.monotonic() - began
                if process.exitcode is None and seconds < LIMIT_S:
                    continue
                code = process.exitcode
                process.kill()
                process.join()
                del running[sentinel]
                yield each, code, (folder / "output.txt").read_text(), seconds
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        for process, *_ in running.values():
            process.kill()
            process.join()


def _copy(folder):
    folder.mkdir()
    for path in COPIED:
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / path, folder)


def main(words: list[str]) -> int:
    """Plant the mutants with one of `words` in their description, or all; print who noticed each. Returns the living.

    Exits with a sentence if a mutant or its tests cannot be run, or if the tests fail without a mutant.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    chosen = [each for each in MUTANTS if not words or any(word in each.what for word in words)]
    every_test = tuple(dict.fromkeys(test for each in chosen for test in each.tests))
    no_change = Mutant("no change", "pyproject.toml", "[project]", "[project]", every_test)
    began, lived = time.monotonic(), []
    print("| mutant | file | seen by | seconds |", "|---|---|---|---|", sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as root:
        for each, code, output, seconds in outcomes([no_change, *chosen], pathlib.Path(root)):
            failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.+?)(?: - |$)", output, re.MULTILINE)
            if code not in (PASSED, FAILED) or (each is no_change and code == FAILED):
                sys.exit(f"error: the tests of the mutant {each.what!r} cannot tell (exit status {code}):\n{output}")
            if each is no_change:
                continue
            seen_by = failed[1] if code == FAILED else "nobody: IT LIVES"
            lived += [each] if code == PASSED else []
            print(f"| {each.what} | {each.file} | {seen_by} | {seconds:.0f} |", flush=True)
    dead = len(chosen) - len(lived)
    print(f"\n{dead} of {len(chosen)} mutants are dead, after {time.monotonic() - began:.0f} s")
    return len(lived)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
