"""In a long run, and with a large data set, memory, files and threads do not grow."""

import json
import os
import time

import pytest

from fusedgpt.data import prepare
from tests.conftest import rows, run, small
from tests.faults.processes import start

STEPS = 3_000
TERABYTE = 10**12


def held(pid):
    """Resident bytes, open files and threads of a process."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":", 1) for line in file)
    return 1024 * int(status["VmRSS"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_memory_files_and_threads_do_not_grow_over_many_steps(tmp_path, data):
    sizes = dict(n_layer=1, n_head=1, n_embd=8, block_size=4, batch_size=1, max_iters=STEPS)
    settings = small(tmp_path / "out", data, **sizes, eval_interval=150, eval_iters=1, log_interval=100)
    [process] = start(settings, tmp_path / "log")
    saved, samples = tmp_path / "out" / "ckpt.pt", {}
    while process.is_alive():
        if saved.exists() and (written := saved.stat().st_mtime_ns) not in samples:  # at each evaluation
            samples[written] = held(process.pid)
        time.sleep(0.005)
    assert process.exitcode == 0, (tmp_path / "log").read_text()[-2000:]
    assert len(rows(tmp_path / "out")) == STEPS
    settled = [*samples.values()][6:-1]
    assert len(settled) >= 10
    memory, files, threads = zip(*settled)
    # what a step leaves behind, with the graph of its gradients, would be tens of kB; metrics are a hundred bytes
    assert memory[-1] - memory[0] < 2000 * STEPS, memory
    assert max(threads) - min(threads) <= 1 and max(files) - min(files) <= 1  # one file may be being written


def test_a_terabyte_of_tokens_trains(tmp_path):
    folder = tmp_path / "data"
    prepare.write(folder, {"train": [[1] * 100], "val": [[1] * 1000]}, "nothing", tokenizer="byte", vocab_size=256)
    meta = json.loads((folder / "meta.json").read_text())
    meta["tokens"]["train"] = TERABYTE // 2
    os.truncate(folder / "train.bin", TERABYTE)  # sparse: all of it reads as zeros
    (folder / "meta.json").write_text(json.dumps(meta))  # last: the SHA-256 of a newer bin would be compared
    run(tmp_path / "out", folder, max_iters=20)
    assert rows(tmp_path / "out")[-1]["loss"] < 1
