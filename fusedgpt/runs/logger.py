"""What a run says: lines above a bar, metrics.jsonl, run.json, report.html, and its trackers."""

import contextlib
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

from tqdm import tqdm

from fusedgpt import terminal
from fusedgpt.attention.table import EXPANDED
from fusedgpt.errors import UserError, first_line
from fusedgpt.machine.files import Lines, Lock, atomic, json_line
from fusedgpt.runs import report_page, run_folder, trackers
from fusedgpt.runs.metrics import EVAL, TRAIN, number, read_metrics, record_of
from fusedgpt.terminal import in_words

SHOWN = 100  # characters of a sample on the console
LARGE_METRICS = 2**20  # if metrics.jsonl has more bytes, some 5,000 iterations, another process writes report.html
SHARE_OF_REPORTS = 0.01  # spend at most this share of the time on report.html, which takes longer as the run grows
REDRAWN_AFTER = 0.1  # seconds that the bar keeps a text at least
BAR = "{l_bar}{bar}| "  # for tqdm


def columns() -> int:
    """The columns that the bar may fill. It leaves two free, because a terminal shows a Ctrl-C as ^C behind it."""
    with contextlib.suppress(OSError, ValueError):  # no terminal
        return max(1, os.get_terminal_size(sys.stderr.fileno()).columns - 2)
    return 78


class Bar:
    """What a run is doing, how much is done, and as many facts as the terminal's width allows.

    It draws itself on stderr if it is `shown`; otherwise it writes nothing.
    """

    def __init__(self, shown: bool):
        self.shown, self.drawn, self.doing = shown, 0.0, ""  # drawn: when its text last changed
        self.metrics, self.ends = {}, math.inf  # of the last step; when the run ends, by time.monotonic()
        self.tqdm = tqdm(disable=not shown, leave=False, bar_format="{desc}", ncols=columns())

    def begin(self, start: int, total: int) -> None:
        """Show the share of the iterations: `start` of `total` are done."""
        self.tqdm.close()
        options = dict(disable=not self.shown, leave=False, bar_format=BAR, ncols=columns())
        self.tqdm = tqdm(initial=start, total=total, **options)

    def step(self, metrics: dict) -> None:
        """Count a training step, whose loss and tokens/s are shown from the next draw on."""
        self.metrics = metrics
        self.tqdm.n += 1

    def ends_in(self, seconds: float) -> None:
        """Show that the run trains, and ends in so many seconds. The bar counts them down."""
        self.ends = time.monotonic() + seconds
        self.status("training")

    def status(self, doing: str) -> None:
        """Show what the run is doing. A text such as "evaluating, batch 3 of 40" is not shown for each batch."""
        what, before = doing.partition(",")[0], self.doing.partition(",")[0]
        if not self.shown or (what == before and time.monotonic() - self.drawn < REDRAWN_AFTER):
            return
        self.doing, self.drawn, self.tqdm.ncols = doing, time.monotonic(), columns()
        if self.tqdm.total is not None:
            self.tqdm.bar_format = BAR + ", ".join(self._facts())
        self.tqdm.set_description_str(doing)

    def _facts(self):
        """What stands behind the bar: the first of these that fit."""
        facts = []
        if math.isfinite(self.ends):
            facts.append(f"{in_words(max(0, round(self.ends - time.monotonic())))} left")
        if self.metrics:
            facts += [f"loss {self.metrics['loss']:.3f}", f"{self.metrics['tokens_per_s']:,.0f} tok/s"]
        facts.append(f"{self.tqdm.n}/{self.tqdm.total}")
        room = columns() - len(f"{self.doing}: 100%|█| ")
        while facts and len(", ".join(facts)) > room:
            facts.pop()
        return facts

    def close(self) -> None:
        """Clear the bar."""
        self.tqdm.close()


class Logger:
    """Prints lines and, once `open`, writes the metrics of each iteration and evaluation; only on the `main` rank.

    A line of metrics.jsonl is {"kind": "train" | "eval", "iter": …, …}. Lines that the disk refuses stay in memory and
    are tried again with each line that follows. If another process took the folder, logging raises UserError.
    """

    def __init__(self, main: bool):
        self.main = main
        self.lines, self.trackers = None, []
        self.prompts = {}  # {prompt: its number} of those that had a sample
        self.refused = ""  # why the last line of metrics.jsonl could not be written; empty if it was written
        self.bar = Bar(main and sys.stderr.isatty())
        self.report_due = 0.0  # when report.html may be written again
        self.reporter, self.reporter_began = None, 0.0  # the process that writes report.html of a long run

    def open(self, out_dir: pathlib.Path, start: int, record: dict, lock: Lock) -> None:
        """Open metrics.jsonl, run.json, trackers and the bar at iteration `start`. `lock` is the lock of `out_dir`.

        A resumed run drops the metrics that it will log again. A new run moves an earlier run aside. Raises UserError
        if a tracker fails, or if the folder cannot be written.
        """
        lock.check()
        self.out_dir, self.record, self.lock, s, before = out_dir, record, lock, record["settings"], {}
        path, kept = out_dir / "metrics.jsonl", []
        if s["init_from"] == "resume":
            kept = self._metrics_before(start, s) if path.exists() else []
            before = record_of(out_dir)
            record.setdefault("time", before.get("time"))
            if before and start >= s["max_iters"]:  # no step will be made: the record stays that of the steps made
                record = self.record = before
        else:
            run_folder.set_aside(out_dir, self.say)
        self.trackers = trackers.start(s, record, out_dir, start, before.get("wandb_id"), self.say)
        with atomic(path, "w") as file:
            file.writelines(kept)
        self.lines = Lines(path)
        for row in read_metrics(out_dir, "eval") if self.trackers else ():
            if row["iter"] == start:  # TensorBoard drops all that it has from `start` on
                losses = {name: number(row[name]) for name in EVAL if name in row}
                self._tell("log", trackers.names(losses), start)
        self._write_record()
        self.bar.begin(start, s["max_iters"])

    def _metrics_before(self, start, s):
        """The lines of metrics.jsonl that a run with the settings `s`, resumed at `start`, does not log again."""
        rows = read_metrics(self.out_dir)
        with open(self.out_dir / "metrics.jsonl", "rb") as file:
            damaged = sum(1 for _ in file) - len(rows)
        if damaged > 1:  # a kill damages one line at most
            self.say(f"{damaged} lines of {self.out_dir / 'metrics.jsonl'} are damaged and were left out")
        # the evaluation at the end of a run is not repeated if the run trains on and its end was at no interval
        every, ends = {"train": 1, "eval": s["eval_interval"], "sample": s["sample_interval"]}, start >= s["max_iters"]
        again = {kind for kind, interval in every.items() if interval and (start % interval == 0 or ends)}
        kept = []
        for row in rows:
            with contextlib.suppress(RecursionError):  # hundreds of nested lists, in a field that is not ours
                kept += [json_line(row)] if row["iter"] < start + (row["kind"] not in again) else []
        return kept

    def _write_record(self):
        with atomic(self.out_dir / "run.json", "w") as file:
            json.dump(self.record, file, indent=1)

    def _write_report(self, running):
        began = time.monotonic()
        try:
            if self.lines.path.exists() and self.lines.path.stat().st_size > LARGE_METRICS:
                self._write_report_apart(running)
                return
            report_page.write(self.out_dir, running)
        except Exception as error:  # a full disk, or files that anybody may have changed: training must go on
            self.say(f"NOT WRITTEN: report.html: {type(error).__name__}: {first_line(error)}")
        self.report_due = began + (time.monotonic() - began) / SHARE_OF_REPORTS

    def _write_report_apart(self, running):
        """Write report.html in another process: this one would keep the memory that reading a long run takes."""
        if self.reporter:  # the run ends while an earlier report is being written
            self.reporter.wait()
        command = [
            sys.executable,
            "-m",
            "fusedgpt.runs.report_page",
            self.out_dir.resolve(),
            str(running),
            str(os.getpid()),
        ]
        path = [str(pathlib.Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
        self.reporter_began, self.report_due = time.monotonic(), math.inf  # one at a time
        # with close_fds=False, Python spawns the child and opens no pipe; a fork would copy this large process. The
        # child inherits no file that Python opened
        self.reporter = subprocess.Popen(command, env=environment, close_fds=False)
        if not running:
            self.reporter.wait()

    def announce(self, record: dict, why_eager: str) -> None:
        """Say what is about to run. why_eager: why the model is not compiled, if there is a reason to give."""
        r, s = record, record["settings"]
        n, world, shares = s["gradient_accumulation_steps"], r["world_size"], s["parallel"] == "fsdp"
        batch = f"{n} micro-batch{'es' * (n > 1)} x {s['batch_size']} x {s['block_size']}"
        where = f"{world} process{'es' * (world > 1)}"
        self.say(f"tokens per iteration: {r['tokens_per_step']:,} = {batch}, on {where}")
        if shares and world == 1:
            self.say("parallel=fsdp shares nothing on one process, which holds the whole model")
        elif shares:
            self.say(f"parallel: fsdp, one copy of the model per {s['shard_size'] or world} processes")
        ids, rows, padding = r["model"]["vocab_size"], r["padded_vocab_size"], "not padded"
        if rows > ids:
            padding = f"padded to {rows}"
        in_products = f"{r['parameters_in_products']:,} of them in products"  # not those that are only looked up
        self.say(f"model: {r['parameters']:,} parameters, {in_products}; vocabulary {ids}, {padding}")
        mode = f"eager ({why_eager})".replace(" ()", "")
        if r["compile"]:
            mode = f"compiled ({r['graphs'] or 0} graphs)"
        self.say(f"machine: {r['device']} ({r['environment']['device']}), {r['dtype']}, {mode}")
        for name, ms in r["dtype_trials"].items():
            self.say(f"  {name}: {ms:.1f} ms forward and backward")
        for name, trial in r["attention_trials"].items():
            passed = ", parity passed" * ("errors" in trial)
            self.say(f"  {name}: " + (trial["refused"] or f"{trial['median_ms']:.3f} ms{passed}"))
        line, receipt = (
            f"attention: {r['attention']}" + " (the pick of auto)" * bool(r["attention_trials"]),
            r["receipt"],
        )
        if receipt:
            line += f"; forward seen: {' + '.join(receipt['forward'])}"
            line += f"; backward seen: {' + '.join(receipt['backward'])}"
            line += f"; {EXPANDED}" * bool(receipt.get("expanded"))
        self.say(line)
        if r["timed"]:
            self.say(f"auto: {r['timed']}" + "; --choose=again times anew" * (r["timed"] != "timed now"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.bar.close()  # or the sentence of an error would begin behind it

    def status(self, doing: str) -> None:
        """Show on a terminal what the run is doing."""
        self.bar.status(doing)

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
        self.bar.step(metrics)
        if to_console:
            m = metrics
            step = f"iter {m['iter']}: loss {m['loss']:.4f}, time {m['ms']:.2f}ms"
            others = "".join(f", {name} {value:.4g}" for name, value in m.items() if name not in ("iter", *TRAIN))
            self._print(f"{step}, mfu {100 * m['mfu']:.2f}%, {m['tokens_per_s']:,.0f} tok/s{others}")

    def evaluation(self, metrics: dict, in_full: bool = False) -> None:
        """Log the losses of an evaluation. in_full: also say perplexities and bits per byte."""
        self._write("eval", metrics)
        losses = f"train loss {metrics['train_loss']:.4f}, val loss {metrics['val_loss']:.4f}"
        self._print(f"step {metrics['iter']}: {losses}")
        for split in ("train", "val") if in_full else ():
            line = f"{split}: perplexity {math.exp(min(metrics[f'{split}_loss'], 700)):.3f} a token"
            bits = metrics.get(f"{split}_bits_per_byte")
            self.say(line + (f", {bits:.4f} bits per byte of text" if bits else ""))
        if self.lines and time.monotonic() >= self.report_due:
            self._write_report(running=True)

    def sample(self, iteration: int, prompt: str, text: str) -> None:
        """Log a sample, and say how it begins."""
        self._write("sample", {"iter": iteration, "prompt": prompt, "text": text})
        number = self.prompts.setdefault(prompt, 1 + len(self.prompts))  # a prompt such as "\n" is no name
        self._tell("text", f"sample/{number}", prompt + text, iteration)
        self._print(f"step {iteration}: sample {(prompt + text)[:SHOWN]!r}")

    def times(self, times: dict[str, float]) -> None:
        """Add the summary of the step times to run.json, and say it."""
        self.record["time"] = times
        said, n = "ms per iteration: median {median_ms:.2f}, p10 {p10_ms:.2f}, p90 {p90_ms:.2f}", times["samples"]
        self.say(f"{said.format(**times)}, of {n} step{'s' * (n != 1)} after the first ones")

    def _write(self, kind, metrics):
        if not self.lines:
            return
        self.lock.check()
        if self.reporter and self.reporter.poll() is not None:
            began, self.reporter = self.reporter_began, None
            self.report_due = began + (time.monotonic() - began) / SHARE_OF_REPORTS
        before = self.refused
        try:
            self.lines.add(json_line({"kind": kind, **metrics}))
            self.refused = ""
        except (OSError, UserError) as error:
            self.refused = str(error)
        if self.refused and (kind == "eval" or not before):
            waiting = f"{self.lines.unwritten} line(s) wait in memory"
            self.say(f"NOT WRITTEN: {self.lines.path}: {self.refused}; {waiting}, training goes on and tries again")
        elif before and not self.refused:
            self.say(f"{self.lines.path} can be written again: nothing is missing")
        if kind != "sample":
            self._tell("log", trackers.names(metrics), metrics["iter"])

    def _tell(self, method, *args):
        """Call a method of each tracker. Drop a tracker that fails, because training does not depend on it."""
        for tracker in [*self.trackers]:
            try:
                getattr(tracker, method)(*args)
            except Exception as error:  # wandb and TensorBoard raise whatever ended their writing thread
                self.trackers.remove(tracker)
                why = f"{type(error).__name__}: {first_line(error)}"
                self.say(f"NOT LOGGED to {type(tracker).__name__}: {why}; the run goes on without it")

    def close(self) -> None:
        """Close whatever was opened. Raises UserError if the last lines of metrics.jsonl, or run.json, are lost."""
        self.bar.close()
        if self.lines:
            try:
                self.lock.check()
                self.lines.flush()
                self._write_record()
                self._write_report(running=False)
            except OSError as error:
                raise UserError(f"the last lines of {self.lines.path} are lost: {error}") from error
            finally:
                self.lines.close()
                self._tell("close")  # last: it may wait for a network
