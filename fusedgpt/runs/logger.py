"""What a run says: lines above a bar, metrics.jsonl, run.json, report.html, and wandb."""

import contextlib
import json
import math
import os
import pathlib
import signal
import sys
import time
from typing import IO

from tqdm import tqdm

from fusedgpt import terminal
from fusedgpt.errors import first_line
from fusedgpt.machine.files import Lines, atomic, check_lock, json_line
from fusedgpt.runs import report_page, run_folder, tracker
from fusedgpt.runs.metrics import TRAIN, number, read_metrics, record_of
from fusedgpt.terminal import in_words

NOT_TRACKED = "NOT LOGGED to wandb"
SHOWN = 100  # characters of a sample on the console
SHARE_OF_REPORTS = 0.01  # spend at most this share of the time on report.html, which takes longer as the run grows
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"  # for tqdm, which cuts off what does not fit


class Logger(contextlib.AbstractContextManager):
    """Prints lines and, once `open`, writes the metrics of each iteration and evaluation; only on the `main` rank.

    A line of metrics.jsonl is {"kind": "train" | "eval" | "score" | "sample", "iter": …, …}. Lines that the disk
    refuses stay in memory and are tried again with each that follows. It raises UserError if another process took the
    folder.
    """

    def __init__(self, main: bool):
        self.main = main
        self.lines, self.tracker = None, None
        self.lock: IO | None = None  # of the run's folder, until the logger exits
        self.evaluations = []  # rows of metrics.jsonl, also from before this start
        self.refused = False  # whether the disk refuses metrics.jsonl
        shown = main and sys.stderr.isatty()
        self.bar = tqdm(disable=not shown, leave=False, dynamic_ncols=True, bar_format="{desc}")
        self.facts = ""  # at the end of the bar
        self.report_due = 0.0  # when report.html may be written again

    def open(self, out_dir: pathlib.Path, start: int, record: dict, lowest: float) -> None:
        """Open metrics.jsonl, run.json, wandb and the bar at iteration `start`. `self.lock` is the lock of `out_dir`.

        A resumed run drops the metrics that it will log again. lowest: its best validation loss; those below are of
        another text or mask. A new run moves an earlier run aside. Raises UserError if the folder cannot be written.
        """
        check_lock(self.lock)
        self.out_dir, self.record, s, before = out_dir, record, record["settings"], {}
        path, rows = out_dir / "metrics.jsonl", []
        if s["init_from"] == "resume":
            rows = self._metrics_before(start, s)
            before = record_of(out_dir)
            record |= {name: before[name] for name in ("time", "wandb_id") if name in before}
            if before and start >= s["max_iters"]:  # no step will be made: the record stays that of the steps made
                record = self.record = before
        else:
            run_folder.set_aside(out_dir, self.say)
        losses = [(row, number(row["val_loss"])) for row in rows if row["kind"] == "eval"]
        known = lowest < math.inf  # if so, iteration 0 counts too, whose weights are never saved as the best
        self.evaluations = [row for row, loss in losses if loss >= lowest or (known and row["iter"] == 0)]
        if s["wandb_log"]:
            self._attempt(NOT_TRACKED, self._begin_tracking, before.get("wandb_id"))
        with atomic(path, "w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
        self.lines = Lines(path)
        self._write_record()
        self.bar.bar_format = BAR
        self.bar.reset(s["max_iters"])
        self.bar.n = start

    def _metrics_before(self, start, s):
        """The rows of metrics.jsonl that a run with the settings `s`, resumed at `start`, does not log again."""
        if not (self.out_dir / "metrics.jsonl").exists():
            return []
        # the evaluation at the end of a run is not repeated if the run trains on and its end was at no interval
        every, ends = {"train": 1, "eval": s["eval_interval"], "sample": s["sample_interval"]}, start >= s["max_iters"]
        every["score"] = every["eval"] * bool(s["eval_tasks"])
        again = {kind for kind, interval in every.items() if interval and (start % interval == 0 or ends)}
        return [row for row in read_metrics(self.out_dir) if row["iter"] < start + (row["kind"] not in again)]

    def _write_record(self):
        with atomic(self.out_dir / "run.json", "w") as file:
            json.dump(self.record, file, indent=1)

    def _write_report(self, running):
        began = time.monotonic()
        self._attempt("NOT WRITTEN: report.html", report_page.write, self.out_dir, running)
        self.report_due = began + (time.monotonic() - began) / SHARE_OF_REPORTS

    def announce(self, record: dict, why_eager: str) -> None:
        """Say what is about to run. why_eager: why the model is not compiled, if there is a reason to give."""
        r, s, world = record, record["settings"], record["world_size"]
        n, ids, rows = s["gradient_accumulation_steps"], r["model"]["vocab_size"], r["padded_vocab_size"]
        batch = f"{n} micro-batch{'es' * (n > 1)} x {s['batch_size']} x {s['block_size']}"
        self.say(f"tokens per iteration: {r['tokens_per_step']:,} = {batch}, on {world} process{'es' * (world > 1)}")
        in_products = f"{r['parameters_in_products']:,} of them in products"  # not those that are only looked up
        self.say(f"model: {r['parameters']:,} parameters, {in_products}; vocabulary {ids}, in {rows} rows")
        mode = f"eager ({why_eager})".replace(" ()", "")
        if r["compile"]:
            mode = f"compiled ({r['graphs'] or 0} graphs)"
        self.say(f"machine: {r['device']} ({r['environment']['device']}), {r['dtype']}, {mode}")
        for name, ms in r["dtype_trials"].items():
            self.say(f"  {name}: {ms:.1f} ms forward and backward")
        for name, trial in r["attention_trials"].items():
            passed = ", parity passed" * ("errors" in trial)
            self.say(f"  {name}: " + (trial["refused"] or f"{trial['median_ms']:.3f} ms{passed}"))
        line = f"attention: {r['attention']}" + " (the pick of auto)" * bool(r["attention_trials"])
        if receipt := r["receipt"]:
            line += f"; forward seen: {' + '.join(receipt['forward'])}"
            line += f"; backward seen: {' + '.join(receipt['backward'])}"
        self.say(line)

    def __exit__(self, *_):
        self.bar.close()  # or the sentence of an error would begin behind it
        if self.lines and self._attempt("NOT WRITTEN: report.html", check_lock, self.lock):
            self._write_report(running=False)  # after an error, whose sentence wandb's last words would follow
            self._track("finish", 1)
        if self.lock:
            self.lock.close()  # a notebook would keep it in the frames of an error

    def shorten(self, iterations: int) -> None:
        """From now on, the run has so many iterations: the bar and run.json, whose settings have changed, show it."""
        self.bar.total = iterations
        if self.main:
            self._attempt("NOT WRITTEN: run.json", self._write_record)

    def status(self, doing: str) -> None:
        """Show on a terminal what the run is doing."""
        self.bar.set_description_str(doing)

    def ends_in(self, seconds: float) -> None:
        """Show on a terminal that the run trains, and ends in so many seconds."""
        self.bar.set_postfix_str(f"{in_words(max(0, round(seconds)))} left{self.facts}", refresh=False)
        self.status("training")
        if self.lines and time.monotonic() >= self.report_due:
            self._write_report(running=True)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._print(terminal.harmless(line, sys.stdout))

    def _print(self, text):
        """Print `text` as it is. If its reader is gone (`| head`), raise SIGHUP."""
        if self.main:
            try:
                tqdm.write(text + "\n", end="")  # one write: between two, another thread may print
                sys.stdout.flush()
            except BrokenPipeError:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, sys.stdout.fileno())
                os.close(nowhere)
                signal.raise_signal(getattr(signal, "SIGHUP", signal.SIGTERM))
            except OSError:  # a log file on a full disk, or a terminal that is gone: training does not depend on it
                pass

    def iteration(self, metrics: dict, to_console: bool) -> None:
        """Log the metrics of a training step."""
        self._write("train", metrics)
        self.facts = f", loss {metrics['loss']:.3f}, {metrics['tokens_per_s']:,.0f} tok/s"
        self.bar.n += 1
        if to_console:
            m = metrics
            step = f"iter {m['iter']}: loss {m['loss']:.4f}, time {m['ms']:.2f}ms"
            others = "".join(f", {name} {value:.4g}" for name, value in m.items() if name not in ("iter", *TRAIN))
            self._print(f"{step}, mfu {100 * m['mfu']:.2f}%, {m['tokens_per_s']:,.0f} tok/s{others}")

    def evaluation(self, metrics: dict, in_full: bool = False) -> None:
        """Log the losses of an evaluation. in_full: also say perplexities and bits per byte."""
        self._write("eval", metrics)
        self.evaluations.append(metrics)
        losses = f"train loss {metrics['train_loss']:.4f}, val loss {metrics['val_loss']:.4f}"
        self._print(f"step {metrics['iter']}: {losses}")
        for split in ("train", "val") if in_full else ():
            line = f"{split}: perplexity {math.exp(min(metrics[f'{split}_loss'], 700)):.3f} a token"
            bits = metrics.get(f"{split}_bits_per_byte")
            self.say(line + (f", {bits:.4f} bits per byte of text" if bits else ""))

    def scores(self, metrics: dict) -> None:
        """Log the scores of an evaluation in the tasks of eval_tasks."""
        self._write("score", metrics)
        said = (f"{name} {value:.4g}" for name, value in metrics.items() if name != "iter")
        self._print(f"step {metrics['iter']}: {', '.join(said)}")

    def sample(self, iteration: int, prompt: str, text: str) -> None:
        """Log a sample, and say how it begins."""
        self._write("sample", {"iter": iteration, "prompt": prompt, "text": text})
        self._print(f"step {iteration}: sample {(prompt + text)[:SHOWN]!r}")

    def times(self, times: dict[str, float]) -> None:
        """Add the summary of the step times to run.json, and say it."""
        self.record["time"] = times
        said, n = "ms per iteration: median {median_ms:.2f}, p10 {p10_ms:.2f}, p90 {p90_ms:.2f}", times["samples"]
        self.say(f"{said.format(**times)}, of {n} step{'s' * (n != 1)} after the first ones")

    def _write(self, kind, metrics):
        if not self.lines:
            return
        check_lock(self.lock)
        try:
            self.lines.add(json_line({"kind": kind, **metrics}))
            self.refused = False
        except OSError as error:
            if not self.refused:
                self.say(f"NOT WRITTEN: {self.lines.path}: {error}; lines wait in memory, and the next one tries again")
            self.refused = True
        if kind != "sample":
            self._track("log", tracker.names(metrics), metrics["iter"])

    def _track(self, method, *args):
        """Call a method of the tracker, if there is one. One that fails is not asked again."""
        if self.tracker and not self._attempt(NOT_TRACKED, getattr(self.tracker, method), *args):
            self.tracker = None

    def _begin_tracking(self, wandb_id):
        self.tracker = tracker.begin(self.record, wandb_id)

    def _attempt(self, if_it_fails, call, *args):
        """Call what training does not depend on, and say if it fails. Returns whether it did not."""
        try:
            call(*args)
        except Exception as error:  # a full disk, a file that anybody may have changed, whatever wandb raises
            self.say(f"{if_it_fails}: {type(error).__name__}: {first_line(error)}; the run goes on without it")
            return False
        return True

    def close(self) -> None:
        """Close whatever was opened. Raises OSError if the last lines of metrics.jsonl are lost."""
        if self.lines:
            check_lock(self.lock)
            self.lines.flush()
            self._write_record()
            self._write_report(running=False)
            self._track("finish")  # last: it may wait for a network
            self.lines = None
