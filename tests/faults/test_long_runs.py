"""In a long run, and with a large data set, memory, files and threads do not grow."""

import json
import os
import time

import pytest

from fusedgpt.data import prepare
from tests.conftest import rows, run, small
from tests.faults.processes import start

pytestmark = pytest.mark.slow

STEPS = 50_000
TERABYTE = 10**12


def held(pid):
    """Resident bytes, open files and threads of a process."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return 1024 * int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_fifty_thousand_steps(tmp_path, data, tell):
    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=4, batch_size=1)
    settings = small(
        tmp_path / "out", data, **sizes, max_iters=STEPS, eval_interval=500, eval_iters=1, log_interval=100
    )
    [process] = start(settings, tmp_path / "log")
    metrics, samples = tmp_path / "out" / "metrics.jsonl", []
    while process.is_alive():
        steps = count(metrics)
        if steps >= 1000 * (1 + len(samples)):
            samples.append((steps, *held(process.pid)))
        time.sleep(0.02)
    process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    assert len(rows(tmp_path / "out")) == STEPS
    settled = [sample for sample in samples if sample[0] > STEPS / 10]
    assert len(settled) > 20
    memory, files, threads = zip(*(sample[1:] for sample in settled))
    # the list step_ms takes 32 bytes a step, because its median is taken at the end
    assert memory[-1] - memory[0] < 32 * STEPS + 2**21, memory
    assert max(threads) == min(threads) and max(files) - min(files) <= 1  # one file may be being written
    grown = (memory[-1] - memory[0]) / 2**20
    tell(
        f"{STEPS:,} steps: memory {memory[0] / 2**20:.0f} MiB, {grown:+.1f} MiB at the end; {threads[0]} threads;"
        f" {min(files)} to {max(files)} open files"
    )


def count(path, chunk=200):
    """About how many lines a growing file has: from its size, and the length of its first lines."""
    if not path.exists() or not (size := path.stat().st_size):
        return 0
    with open(path, "rb") as file:
        head = file.readlines(chunk * 50)
    return int(size / (sum(map(len, head)) / len(head)))


def test_a_terabyte_of_tokens_trains(tmp_path, tell):
    folder = tmp_path / "data"
    prepare.write(folder, {"train": [[1] * 100], "val": [[1] * 1000]}, "nothing", tokenizer="byte", vocab_size=256)
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokens"]["train"] = TERABYTE // 2
    (folder / "meta.json").write_text(json.dumps(meta))
    try:
        os.truncate(folder / "train.bin", TERABYTE)  # sparse: all of it reads as zeros
    except OSError as error:
        pytest.skip(f"this disk has no files of a terabyte: {error}")
    began = time.monotonic()
    run(tmp_path / "out", folder, max_iters=20)
    tell(f"20 steps and 5 evaluations on {TERABYTE:,} bytes of tokens: {time.monotonic() - began:.1f} s")
    assert rows(tmp_path / "out")[-1]["loss"] < 1
