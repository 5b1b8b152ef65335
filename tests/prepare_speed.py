"""What data/text/prepare.py costs: tokens per second beside plain loops over tiktoken, and the peak of its memory.

    python tests/prepare_speed.py [MEGABYTES [TOKENIZER [ROUNDS]]]        default: 200 gpt2 3

The text is that of the standard library's files, again and again, as rows of a .jsonl, and as one .txt.
Prints one line of JSON a kind: in each round, a loop on each core at once (GPT-2's BPE, nothing read or written, start
not counted), then the whole command. ROUNDS=0 leaves out the loops: memory alone, of one run.
"""

import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def documents(megabytes):
    """The standard library's files, as often as needed, one after another."""
    files = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [f.read_text(encoding="utf-8", errors="ignore") for f in files]
    size = 0
    while True:
        for text in texts:
            if size > megabytes * 1e6:
                return
            size += len(text.encode())
            yield text


def loop(megabytes):
    """Tokens per second of tiktoken's encode_ordinary on one core."""
    import tiktoken

    encode = tiktoken.get_encoding("gpt2").encode_ordinary
    count, seconds = 0, 0.0
    for text in documents(megabytes):
        began = time.perf_counter()
        count += len(encode(text))
        seconds += time.perf_counter() - began
    return count / seconds


def loop_on_each_core(megabytes):
    """Tokens per second of as many such loops as there are cores, each in a process of its own, together."""
    cores = os.cpu_count()
    with concurrent.futures.ProcessPoolExecutor(cores) as pool:
        return sum(pool.map(loop, [megabytes] * cores))


def prepared(file, tokenizer, out_dir):
    """Tokens per second of the whole command, and the peak of its memory in MB; it is one process."""
    began = time.perf_counter()
    script = ROOT / "data" / "text" / "prepare.py"
    command = [sys.executable, script, f"--input={file}", f"--tokenizer={tokenizer}", f"--out_dir={out_dir}"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    assert status == 0, f"{command} ended with {status}"
    tokens = json.loads((pathlib.Path(out_dir) / "meta.json").read_text())["tokens"]
    return sum(tokens.values()) / (time.perf_counter() - began), usage.ru_maxrss / 1e3


def main(megabytes=200, tokenizer="gpt2", rounds=3):
    """Print what both kinds of text cost."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("rows.jsonl", "one.txt"):
            file = pathlib.Path(folder, name)
            with open(file, "w", encoding="utf-8") as out:
                for text in documents(megabytes):
                    out.write(json.dumps({"text": text}) + "\n" if name == "rows.jsonl" else text)
            loops, ours = [], []
            for _ in range(max(1, rounds)):
                if rounds:
                    loops.append(loop_on_each_core(megabytes))
                ours.append(prepared(file, tokenizer, pathlib.Path(folder, "out")))
            row = {"text": name, "megabytes": megabytes, "tokenizer": tokenizer, "peak_mb": max(mb for _, mb in ours)}
            row["tokens_per_s"] = [round(speed) for speed, _ in ours]
            if loops:
                row["loop_on_each_core_tokens_per_s"] = [round(speed) for speed in loops]
                median = statistics.median(speed for speed, _ in ours)
                row["times_as_fast_as_the_loops"] = round(median / statistics.median(loops), 2)
            print(json.dumps(row), flush=True)
            file.unlink()


if __name__ == "__main__":
    main(*(given if kind is str else kind(given) for given, kind in zip(sys.argv[1:], (int, str, int))))
