"""Run every command of the README and docs/ in a copy of the project: small models, few steps, no download.

The commands run one after another in one process, because importing PyTorch takes longer than most of them. Those of
benchmarks are only read: each kind has a test that runs it small.
"""

import gzip
import json
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pytest

import bench
import sample
import train
from configurator import configure
from fusedgpt.__main__ import script_of
from fusedgpt.bench import kinds
from fusedgpt.data import prepare, tokenizer
from tests.conftest import hugging_face, why_no_bpe
from tests.launch import ROOT, copied

PAGES = [ROOT / "README.md", ROOT / "results" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = dict(n_layer=1, n_head=2, n_embd=32, batch_size=2, compile=False, device="cpu")
QUICK = dict(block_size=16, max_iters=2, minutes=None, warmup_iters=1, eval_interval=2, eval_iters=1, dtype="float32")
QUICK |= dict(wandb_log=False)
SHORT = [f"--{name}={value}" for name, value in (SMALL | QUICK).items()]
OF_A_FAMILY = ["--n_kv_head=1", "--n_inner=64"]  # heads and widths of a file in config/model/ would not fit SMALL
FAILS = "--attention=flash --dropout=0.1"  # the README's example of a refusal
PROGRAMS = re.compile(r"(python|fusedgpt|torchrun|make|pip|uv|sbatch|ssh|docker) |[A-Z_]+=")
PLACEHOLDERS = re.compile(r"\b(KIND|FOLDER|OUT_DIR|PATH|NAME)\b|…|\.\.\. ")
DOWNLOADS = ("data/openwebtext/prepare.py", "data/fineweb/prepare.py")
ON_THE_HUB = ("gpt2", "SmolLM")
OTHERS = {  # what is not run, and why
    "python harness.py": "tests/test_harness.py runs it",
    "pip": "it installs packages; a job of the GitHub workflow does it",
    "python -m pytest": "it is this suite",
    "python -m http.server": "it serves until it is ended",
    "uv": "it downloads packages",
    "sbatch": "tests/test_slurm.py runs the script",
    "ssh": "it needs another machine",
    "docker": "it downloads an image; tests/test_container.py reads the Dockerfile",
    "python -m venv": "it is followed by an installation",
    "PIP_EXTRA_INDEX_URL=": "it installs packages",
    "TIKTOKEN_CACHE_DIR=": "it downloads GPT-2's BPE",
    "python export.py out-quickstart --format=gguf": "it needs the package gguf; test_gguf_file.py writes such a file",
    "python sample.py --out_dir=../fusedgpt/": "it is nanoGPT's; tests/test_other_programs.py runs it",
    "python sample.py out/ckpt-2000.pt": "tests/test_sample.py samples such a checkpoint",
    "python study.py": "tests/test_study.py reads it, and runs smaller studies",
    "python tests/": "its own test runs it, or an earlier commit has it",
}


def commands_in(text):
    """The commands in a page's code blocks, and those in its prose that begin with a script's name."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"^(?: {4}|\$ )(.+)$", text, re.M)
    blocks += "\n".join(re.findall(r"```(?:sh)?\n(.*?)```", text, re.S)).splitlines()
    blocks += re.findall(r"`((?:python [\w/]+\.py|uv|ssh) ?[^`]*)`", text)
    for line in blocks:
        command = " ".join(re.split(r"\s+#\s", line)[0].removeprefix("$ ").split())
        if PROGRAMS.match(command) and not PLACEHOLDERS.search(command):
            yield command


COMMANDS = sorted({command for page in PAGES for command in commands_in(page.read_text())})


def shortened(command):
    """The command as it is run here: [script, arguments …]."""
    words = shlex.split(command)
    if words[0] == "fusedgpt":  # tests/test_wheel.py runs the command itself
        script, args = script_of(words[1:])
        words = ["python", str(script.relative_to(ROOT)), *args]
    family = OF_A_FAMILY if any("config/model/" in word for word in words) else []
    if words[0] == "torchrun":  # tests/faults/test_elastic.py runs torchrun
        words = ["python", *words[words.index("train.py") :], "--parallel=ddp"]
    name, args = words[1], words[2:]
    if "--help" in args or name in ("plot.py", "export.py", "convert.py", "-c"):
        return [name, *args]
    if name.startswith("data/"):
        local = name not in DOWNLOADS or any("--input" in arg for arg in args)
        return [name, *args, *([] if local else ["--input=corpus"])]
    weights = any(any(name in arg for name in ON_THE_HUB) and ("init_from" in arg or "eval_" in arg) for arg in args)
    weights = weights or "config/finetune_shakespeare.py" in args
    changes = ["--init_from=hf"] if weights else []
    if any("my_kernel" in arg for arg in args):  # a run with it is resumed only by who names it again
        changes.append("--out_dir=out-own")
    if name == "train.py":
        return [name, *args, *SHORT, "--gradient_accumulation_steps=1", *family, *changes]
    if name == "sample.py":
        return [name, *args, "--num_samples=1", "--max_new_tokens=3", "--device=cpu", *changes]
    assert name == "bench.py", f"no rule to shorten {command}"
    return [name, *args]


def run(command, cwd, **options):
    """A finished process with its text output."""
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, **options)


DRIVER = """
import contextlib, functools, glob, io, json, runpy, sys, traceback
sys.path.insert(0, "")
from fusedgpt.machine import flops
flops.peak_flops = functools.cache(flops.peak_flops)
for words in json.load(sys.stdin):
    words = [name for word in words for name in sorted(glob.glob(word)) or [word]]  # as a shell does
    sys.argv, out, status = words, io.StringIO(), 0
    out.reconfigure = lambda **_: None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            exec(words[1], {}) if words[0] == "-c" else runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else bool(ended.code)
        out.write(str(ended.code))
    except BaseException:
        status = 2
        out.write(traceback.format_exc())
    print(json.dumps([int(status), out.getvalue()]), flush=True)
"""


def run_all(commands, cwd):
    """[exit status, output] of each of the scripts that one process runs one after another."""
    done = run([sys.executable, "-c", DRIVER], cwd, input=json.dumps(commands))
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands), done.stdout[-2000:] + done.stderr
    return results


def random_bins(folder, tokenizer, vocab_size, **extra):
    ids = np.random.default_rng(0).integers(0, vocab_size, 2000)
    prepare.write(folder, {"train": [ids[:1500]], "val": [ids[1500:]]}, "random", tokenizer, vocab_size, **extra)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project with data, runs and weights for every command."""
    root = copied(tmp_path_factory.mktemp("copy") / "fusedgpt")
    text = "To be, or not to be, that is the question. " * 50
    (root / "corpus").mkdir()
    for name in ("book.txt", "prompt.txt", "data/shakespeare_char/input.txt", "data/shakespeare/input.txt"):
        (root / name).write_text(text)
    (root / "corpus" / "a.txt").write_text("\n\n".join([text] * 4))
    own_kernel = re.search(r"```python\n(.*?)```", (ROOT / "docs/attention.md").read_text(), re.S)
    (root / "my_kernel.py").write_text(own_kernel[1])
    (root / "project").mkdir()
    for n in range(40):
        (root / "project" / f"m{n}.py").write_text("x = 1\n" * 50)
    for name in ("openwebtext", "shakespeare"):
        random_bins(root / "data" / name, **tokenizer.GPT2)
    random_bins(root / "data" / "python_stdlib", "byte", 256)
    for name in ("shakespeare_char", "book"):
        random_bins(root / "data" / name, "char", 65, itos=["\n", *(chr(33 + n) for n in range(64))])
    hugging_face(root / "hf", n_layer=1, n_head=2, n_embd=32, n_positions=32, vocab_size=50257)
    config = json.loads((root / "hf" / "config.json").read_text())  # with what OpenAI's have on the hub
    config |= dict(n_ctx=1024, n_special=0, predict_special_tokens=True, output_past=True, _num_labels=1)
    (root / "hf" / "config.json").write_text(json.dumps(config))
    for kind in ("ladder", "numerics"):
        shutil.copytree(root / "results" / "cpu_avx2" / kind, root / "out-bench" / kind)
    return root


@pytest.fixture(scope="module")
def ran(copy):
    """{command: (exit status, output)} of every command that one process can run."""
    python = [command for command in COMMANDS if not command.startswith("make") and not why_not(command)]
    runs = {command: shortened(command) for command in python}
    before = [
        ["train.py", f"--out_dir={out}", f"--dataset={data}", *SHORT, "--gradient_accumulation_steps=1"]
        for out, data in {
            "out-quickstart": "python_stdlib",
            "out-shakespeare-char": "shakespeare_char",
            "out-shakespeare": "shakespeare",
            "out-study/runs/baseline/seed-1": "python_stdlib",
            **dict.fromkeys(("out", "out-manual", "out-flash", "out-text"), "python_stdlib"),
        }.items()
    ]
    before[0] += ["--optimizer=muon"]  # as in config/quickstart.py, with which pages resume it
    before += [["export.py", "out-quickstart", "out-hf"], ["export.py", "out-text", "hf-text"]]
    results = run_all([*before, *runs.values()], copy)
    assert all(status == 0 for status, _ in results[: len(before)]), results[: len(before)]
    return dict(zip(runs, results[len(before) :]))


def why_not(command):
    """Why a command is not run here, or None."""
    if command.startswith("python bench.py") and bench.parse(shlex.split(command)[2:])[0] in kinds.KINDS:
        return "its kind has a test that runs it small"
    return next((why for other, why in OTHERS.items() if command.startswith(other)), None)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_no_bpe()), reason="GPT-2's BPE files are not here (set TIKTOKEN_CACHE_DIR)")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs_runs(command, ran, copy):
    if reason := why_not(command):
        pytest.skip(reason)
    if command.startswith("make"):
        done = run([*shlex.split(command), "-n"], copy)
        status, output = done.returncode, done.stdout + done.stderr
    else:
        status, output = ran[command]
    if FAILS in command:
        assert status == 1 and "cannot train on cpu" in output, output
    else:
        assert status == 0, f"{command}\n{output}"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_five_commands_lead_from_a_folder_of_anything_to_a_score(copy):
    # each used to be tested on its own only, with data and weights of the tests
    pytest.importorskip("lm_eval")
    (five,) = re.findall(r"five commands .*\n\n((?: {4}.*\n){5})\n", (ROOT / "docs" / "data.md").read_text())
    commands = [shlex.split(line.replace("=corpus/", "=mixed")) for line in five.splitlines()]
    made = run([*commands.pop(), "-n"], copy).stdout  # make eval: what it would run, without its set-up
    score = [shlex.split(line)[1:] for line in made.splitlines() if re.search(r"python (export|harness)\.py", line)]
    small = [*SHORT, "--block_size=64", "--gradient_accumulation_steps=1"]
    steps = [[*words[1:], *(small if "train.py" in words else [])] for words in commands] + score
    assert [words[0] for words in steps[1:]] == ["train.py", "export.py", "-c", "export.py", "harness.py"]
    mixed, pages = copy / "mixed", [page.read_text() for page in PAGES]
    mixed.mkdir()
    (mixed / "pages.md").write_text(pages[0])
    (mixed / "pages.txt.gz").write_bytes(gzip.compress(pages[1].encode()))
    (mixed / "pages.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in pages[3].splitlines()))
    results = run_all(steps, copy)
    assert [status for status, _ in results] == [0] * len(steps), results
    assert json.loads((copy / "data" / "text" / "meta.json").read_text())["tokenizer"] == "json"
    assert '"sonnets"' in (copy / "out-text" / "lm_eval.json").read_text()


def test_scripts_know_every_flag_that_the_documents_give_them(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(each)[1:] for each in COMMANDS if re.match("python (train|sample|bench)", each)]
    for script, *args in commands:
        if "--help" in args or f"python {script} {' '.join(args)}".startswith(tuple(OTHERS)):
            continue
        if script == "train.py":
            configure(train.Settings(), args, "")
        elif script == "sample.py":
            configure(sample.Settings(), args, "", sample.ONLY_TRAINING, places=sample.PLACES)
        elif bench.parse(args)[0] in kinds.KINDS:
            kinds.read_settings(*bench.parse(args))
    assert len(commands) > 50


def test_links_lead_somewhere():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text().replace("\n", " ")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page}: {target}"
