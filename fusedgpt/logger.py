"""What a run says: lines on the console, a progress bar, metrics.jsonl, run.json and wandb."""

import json
import pathlib
import shutil
import sys

from tqdm import tqdm

from fusedgpt.errors import UserError, first_line
from fusedgpt.files import atomic, read_jsonl


def read_metrics(out_dir: str | pathlib.Path, kind: str | None = None) -> list[dict]:
    """A run's metrics.jsonl: all of it, or one `kind`, 'train' or 'eval'. Raises UserError if there is none."""
    path = pathlib.Path(out_dir) / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a run")
    return [metrics for metrics in read_jsonl(path) if kind in (None, metrics["kind"])]


def read_record(out_dir: str | pathlib.Path) -> dict:
    """A run's run.json."""
    return json.loads((pathlib.Path(out_dir) / "run.json").read_text())


class Logger:
    """Prints lines and, once `open`, writes the metrics of each iteration and evaluation; only on the `main` rank.

    A line of metrics.jsonl is {"kind": "train" | "eval", "iter": …, …}.
    """

    def __init__(self, main: bool):
        self.main = main
        self.file = self.wandb = self.bar = None

    def open(self, out_dir: pathlib.Path, start: int, record: dict) -> None:
        """Open metrics.jsonl, run.json, wandb and the bar at iteration `start`.

        A resumed run drops the metrics of the iterations that it will repeat; a new run moves an old one aside. Raises
        UserError if wandb fails.
        """
        self.out_dir, s = out_dir, record["settings"]
        if s["wandb_log"]:
            self.wandb = _init_wandb(s, record)
        path, kept = out_dir / "metrics.jsonl", []
        if s["init_from"] == "resume" and path.exists():
            kept = [metrics for metrics in read_metrics(out_dir) if metrics["iter"] < start]
            if (out_dir / "run.json").exists():  # a finished run that is resumed makes no step, so it keeps its times
                record.setdefault("time", read_record(out_dir).get("time"))
        elif s["init_from"] != "resume" and out_dir.is_dir():
            self._set_aside()
        with atomic(path, "w") as file:
            file.writelines(json.dumps(metrics) + "\n" for metrics in kept)
        self.file = open(path, "a", buffering=1)  # noqa: SIM115 (line by line: a kill loses at most one)
        self.write_record(record)
        quiet = not sys.stderr.isatty()
        self.bar = tqdm(total=s["max_iters"], initial=start, disable=quiet, unit="it", dynamic_ncols=True)

    def _set_aside(self):
        aside = self.out_dir / "previous"
        there = [
            name
            for name in ("ckpt.pt", "best.pt", "metrics.jsonl", "run.json", "loss.png")
            if (self.out_dir / name).exists()
        ]
        if there:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            for name in there:
                (self.out_dir / name).rename(aside / name)
            self.say(f"an earlier run in {self.out_dir} was moved to {aside}")

    def write_record(self, record: dict) -> None:
        """Write run.json: settings as resolved, machine, receipt, and at the end the times."""
        with atomic(self.out_dir / "run.json", "w") as file:
            json.dump(record, file, indent=1)

    def announce(self, record: dict, why_eager: str) -> None:
        """Say what is about to run. why_eager: why the model is not compiled, if there is a reason to give."""
        r, s = record, record["settings"]
        batch = f"{s['gradient_accumulation_steps']} micro-batches x {s['batch_size']} x {s['block_size']}"
        self.say(f"tokens per iteration: {r['tokens_per_step']:,} = {batch}, on {r['world_size']} process(es)")
        ids, rows = r["model"]["vocab_size"], r["padded_vocab_size"]
        vocab = f"vocabulary {ids}, {f'padded to {rows}' if rows > ids else 'not padded'}"
        without = f"{r['parameters_without_positions']:,} without positions"
        self.say(f"model: {r['parameters']:,} parameters, {without}; {vocab}")
        mode = "compiled" if r["compile"] else f"eager ({why_eager})" if why_eager else "eager"
        self.say(f"machine: {r['device']} ({r['environment']['device']}), {r['dtype']}, {mode}")
        for name, trial in r["attention_trials"].items():
            self.say(f"  {name}: {trial['refused'] or format(trial['median_ms'], '.3f') + ' ms, parity passed'}")
        directions = ("forward", "backward") if r["receipt"] else ()
        seen = "".join(f"; {direction} seen: {' + '.join(r['receipt'][direction])}" for direction in directions)
        self.say(f"attention: {r['attention']}{' (the pick of auto)' if r['attention_trials'] else ''}{seen}")

    def say(self, line: str) -> None:
        """Print a line above the progress bar."""
        if self.main:
            tqdm.write(line)
            sys.stdout.flush()

    def iteration(self, metrics: dict, to_console: bool) -> None:
        """Log the metrics of a training step."""
        self._write("train", metrics)
        if self.wandb:  # nanoGPT's names for the learning rate and MFU, and ours for what it does not log
            names = {"mfu": "mfu", "lr": "lr", "iter": "iter"}
            logged = {names.get(name, f"step/{name}"): value for name, value in metrics.items()}
            self.wandb.log(logged | {"mfu": 100 * metrics["mfu"]}, step=metrics["iter"])
        if self.bar is not None:
            self.bar.update()
        if to_console:
            m = metrics
            step = f"iter {m['iter']}: loss {m['loss']:.4f}, time {m['ms']:.2f}ms"
            self.say(f"{step}, mfu {100 * m['mfu']:.2f}%, {m['tokens_per_s']:,.0f} tok/s")

    def evaluation(self, metrics: dict) -> None:
        """Log the losses of an evaluation."""
        self._write("eval", metrics)
        if self.wandb:  # nanoGPT's names
            losses = {"train/loss": metrics["train_loss"], "val/loss": metrics["val_loss"]}
            self.wandb.log({"iter": metrics["iter"], **losses}, step=metrics["iter"])
        if self.bar is not None:
            self.bar.set_postfix_str(f"val {metrics['val_loss']:.4f}")
        self.say(f"step {metrics['iter']}: train loss {metrics['train_loss']:.4f}, val loss {metrics['val_loss']:.4f}")

    def times(self, record: dict, times: dict[str, float]) -> None:
        """Add the summary of the step times to run.json, and say it."""
        record["time"] = times
        self.write_record(record)
        self.say("ms per iteration: median {median_ms:.2f}, p10 {p10_ms:.2f}, p90 {p90_ms:.2f}".format(**times))

    def _write(self, kind, metrics):
        if self.file:
            try:
                self.file.write(json.dumps({"kind": kind, **metrics}) + "\n")
            except OSError as error:
                last = f"the last checkpoint in {self.out_dir} is kept"
                raise UserError(
                    f"cannot write {self.file.name}: {error.strerror}; {last}. Make room and resume"
                ) from error

    def close(self) -> None:
        """Close whatever was opened."""
        if self.bar is not None:
            self.bar.close()
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


def _init_wandb(s, record):
    import wandb

    try:
        wandb.init(project=s["wandb_project"], name=s["wandb_run_name"], config=record)
    except wandb.errors.Error as error:
        raise UserError(
            f"wandb: {first_line(error)}. Run `wandb login`, set WANDB_MODE=offline, or turn it off with"
            " --wandb_log=False"
        ) from error
    return wandb
