"""What a run says of itself: lines on the console, run.json, metrics.jsonl, wandb, and a bar on a terminal."""

import json
import pathlib
import sys

from tqdm import tqdm

from parts.files import atomic


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
        self.write_record(record)
        path, kept = self.out_dir / "metrics.jsonl", []
        if s["init_from"] == "resume" and path.exists():
            whole = [line for line in path.read_text().splitlines() if line.endswith("}")]  # a kill can cut the last
            kept = [line for line in whole if json.loads(line)["iter"] < start]
        with atomic(path, "w") as file:
            file.writelines(line + "\n" for line in kept)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 (a line at a time: what was said survives a kill)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(total=s["max_iters"], initial=start, disable=quiet, unit="it", dynamic_ncols=True)
        if s["wandb_log"]:
            import wandb

            wandb.init(project=s["wandb_project"], name=s["wandb_run_name"], config=record)
            self.wandb = wandb

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
        self.say(f"attention: {r['attention']}{' (the pick of auto)' if s['attention'] == 'auto' else ''}{seen}")

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
            self.file.write(json.dumps({"kind": kind, **row}) + "\n")
        if self.wandb:
            prefix = "" if kind == "train" else "eval/"
            self.wandb.log({prefix + name: value for name, value in row.items()}, step=row["iter"])

    def close(self):
        """Close every listener that was opened."""
        for listener, close in ((self.bar, "close"), (self.file, "close"), (self.wandb, "finish")):
            if listener is not None:
                getattr(listener, close)()
