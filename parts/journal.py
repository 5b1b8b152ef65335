"""What a run says of itself: lines on the console, run.json, metrics.jsonl, wandb, and a bar on a terminal."""

import json
import pathlib
import shutil
import sys

from tqdm import tqdm

from parts.errors import UserError
from parts.files import atomic, read_jsonl


def read_rows(out_dir):
    """The rows of a run's metrics.jsonl, without a line that a kill cut off. Raises UserError where there is none."""
    path = pathlib.Path(out_dir) / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a run")
    return read_jsonl(path)


def read_record(out_dir):
    """A run's run.json."""
    return json.loads((pathlib.Path(out_dir) / "run.json").read_text())


def _wandb(s, record):
    import wandb

    try:
        wandb.init(project=s["wandb_project"], name=s["wandb_run_name"], config=record)
    except wandb.errors.Error as error:
        raise UserError(
            f"wandb: {error}. Run `wandb login`, set WANDB_MODE=offline, or turn it off with --wandb_log=False"
        ) from error
    return wandb


class Journal:
    """Says things on the console; once open, writes a row an iteration and an evaluation to every listener.

    metrics.jsonl holds {"kind": "train" | "eval", "iter": …, …} a line. Where not `main`, it is mute.
    """

    def __init__(self, main):
        self.main = main
        self.file = self.wandb = self.bar = None

    def open(self, out_dir, start, record):
        """Begin every listener at iteration `start`; a resumed run cuts off of metrics.jsonl what it is to do again."""
        self.out_dir, s = pathlib.Path(out_dir), record["settings"]
        if s["wandb_log"]:
            self.wandb = _wandb(s, record)
        path, kept = self.out_dir / "metrics.jsonl", []
        if s["init_from"] == "resume" and path.exists():
            kept = [row for row in read_rows(out_dir) if row["iter"] < start]
            if (self.out_dir / "run.json").exists():  # a run resumed at its end has no times of its own
                record.setdefault("time", read_record(out_dir).get("time"))
        elif s["init_from"] != "resume" and self.out_dir.is_dir():
            self._set_aside()
        with atomic(path, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in kept)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 (a line at a time: what was said survives a kill)
        self.write_record(record)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(total=s["max_iters"], initial=start, disable=quiet, unit="it", dynamic_ncols=True)

    def _set_aside(self):
        """Move the files of an earlier run in this folder out of the way of one that begins anew."""
        aside = self.out_dir / "previous"
        there = [name for name in ("ckpt.pt", "best.pt", "metrics.jsonl", "run.json") if (self.out_dir / name).exists()]
        if there:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            for name in there:
                (self.out_dir / name).rename(aside / name)
            self.say(f"an earlier run in {self.out_dir} was moved to {aside}")

    def write_record(self, record):
        """Write run.json, which `record` is: settings as resolved, machine, receipt, and at the end the times."""
        with atomic(self.out_dir / "run.json", "w") as file:
            json.dump(record, file, indent=1)

    def announce(self, record, why_eager):
        """Say what is about to run; `why_eager`, where it was not compiled for a reason."""
        r, s = record, record["settings"]
        batch = f"{s['gradient_accumulation_steps']} micro-batches x {s['batch_size']} x {s['block_size']}"
        self.say(f"tokens per iteration: {r['tokens_per_step']:,} = {batch}, on {r['world_size']} process(es)")
        vocab = f"vocabulary {r['model']['vocab_size']}, padded to {r['padded_vocab_size']}"
        without = f"{r['parameters_without_positions']:,} without positions"
        self.say(f"model: {r['parameters']:,} parameters, {without}; {vocab}")
        eager = "compiled" if r["compile"] else f"eager ({why_eager})" if why_eager else "eager"
        self.say(f"machine: {r['device']} ({r['environment']['device']}), {r['dtype']}, {eager}")
        for name, trial in r["attention_trials"].items():
            self.say(f"  {name}: {trial['refused'] or format(trial['median_ms'], '.3f') + ' ms, parity passed'}")
        ways = ("forward", "backward") if r["receipt"] else ()
        seen = "".join(f"; {way} seen: {' + '.join(r['receipt'][way])}" for way in ways)
        self.say(f"attention: {r['attention']}{' (the pick of auto)' if r['attention_trials'] else ''}{seen}")

    def say(self, line):
        """A line on the console, above the bar."""
        if self.main:
            tqdm.write(line)
            sys.stdout.flush()

    def iteration(self, row, aloud):
        """A row of a training step; on the console too if `aloud`."""
        self._write("train", row)
        if self.bar is not None:
            self.bar.update()
        if aloud:
            step = f"iter {row['iter']}: loss {row['loss']:.4f}, time {row['ms']:.2f}ms"
            self.say(f"{step}, mfu {100 * row['mfu']:.2f}%, {row['tokens_per_s']:,.0f} tok/s")

    def evaluation(self, row):
        """A row of an evaluation, on the console too."""
        self._write("eval", row)
        if self.bar is not None:
            self.bar.set_postfix_str(f"val {row['val_loss']:.4f}")
        self.say(f"step {row['iter']}: train loss {row['train_loss']:.4f}, val loss {row['val_loss']:.4f}")

    def _write(self, kind, row):
        if self.file:
            try:
                self.file.write(json.dumps({"kind": kind, **row}) + "\n")
            except OSError as error:
                last = f"the last checkpoint in {self.out_dir} is kept"
                raise UserError(
                    f"cannot write {self.file.name}: {error.strerror}; {last}. Make room and resume"
                ) from error
        if self.wandb:
            prefix = "" if kind == "train" else "eval/"
            self.wandb.log({prefix + name: value for name, value in row.items()}, step=row["iter"])

    def close(self):
        """Close every listener that was opened."""
        if self.bar is not None:
            self.bar.close()
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()
