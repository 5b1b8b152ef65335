"""Run every command of the README and docs/ in a copy of the project: small models, few steps, no download.

The commands run one after another in one process, because importing PyTorch takes longer than most of them. Those of
benchmarks are only read: each kind has a test that runs it small.
"""

import json
import re
import shlex
import shutil
import string
import subprocess
import sys

import pytest

import bench
import sample
import train
from configurator import configure
from fusedgpt.__main__ import script_of
from fusedgpt.bench import kinds
from fusedgpt.data import tokenizer
from fusedgpt.studies import command as study_command
from tests.conftest import hugging_face, random_data, why_no_bpe
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
# what is not run, because it needs a network or another machine, or has a test of its own
OTHERS = ("pip", "uv", "ssh", "docker", "PIP_EXTRA_INDEX_URL=", "TIKTOKEN_CACHE_DIR=", "python -m ", "sbatch")
OTHERS += ("python study.py", "python tests/", "python sample.py out/ckpt-2000.pt", "python sample.py --out_dir=../")


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


COMMANDS = sorted({c for page in PAGES for c in commands_in(page.read_text())}, key=lambda c: ("export.py" not in c, c))


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
    if "--help" in args or name in ("plot.py", "export.py", "-c"):
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
    how = dict(cwd=cwd, input=json.dumps(commands), capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", DRIVER], check=False, **how)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(results) == len(commands), done.stdout[-2000:] + done.stderr
    return results


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
    shutil.copytree(root / "fusedgpt", root / "project")
    for name in ("openwebtext", "shakespeare"):
        random_data(root / "data" / name, **tokenizer.GPT2)
    random_data(root / "data" / "python_stdlib", 256, tokenizer="byte")
    for name in ("shakespeare_char", "book"):
        itos = [*"\n !$&',-.3:;?", *string.ascii_letters]  # Shakespeare's
        random_data(root / "data" / name, 65, tokenizer="char", itos=itos)
    hugging_face(root / "hf", n_layer=1, n_head=2, n_embd=32, n_positions=32, vocab_size=50257)
    for kind in ("ladder", "numerics"):
        shutil.copytree(root / "results" / "cpu_avx2" / kind, root / "out-bench" / kind)
    return root


@pytest.fixture(scope="module")
def ran(copy):
    """{command: (exit status, output)} of every command that one process can run."""
    runs = {command: shortened(command) for command in filter(is_run, COMMANDS) if not command.startswith("make")}
    before = [
        ["train.py", f"--out_dir={out}", f"--dataset={data}", *SHORT, "--gradient_accumulation_steps=1"]
        for out, data in {
            "out-quickstart": "python_stdlib",
            **dict.fromkeys(("out-shakespeare-char", "out-shakespeare-cpu"), "shakespeare_char"),
            "out-shakespeare": "shakespeare",
            "out-study/runs/baseline/seed-1": "python_stdlib",
            **dict.fromkeys(("out", "out-manual", "out-flash", "out-text"), "python_stdlib"),
        }.items()
    ]
    before[0] += ["--optimizer=muon"]  # as in config/quickstart.py, with which pages resume it
    results = run_all([*before, *runs.values()], copy)
    assert all(status == 0 for status, _ in results[: len(before)]), results[: len(before)]
    return dict(zip(runs, results[len(before) :]))


def is_run(command):
    """Whether a command is run here. Each kind of benchmark has a test that runs it small."""
    measures = command.startswith("python bench.py") and bench.parse(shlex.split(command)[2:])[0] in kinds.KINDS
    return not measures and not command.startswith(OTHERS)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_no_bpe()), reason="GPT-2's BPE files are not here (set TIKTOKEN_CACHE_DIR)")
@pytest.mark.parametrize("command", filter(is_run, COMMANDS))
def test_a_command_of_the_docs_runs(command, ran, copy):
    if command.startswith("make"):
        subprocess.run([*shlex.split(command), "-n"], cwd=copy, check=True)
        return
    status, output = ran[command]
    if FAILS in command:
        assert status == 1 and "cannot train on cpu" in output, output
    else:
        assert status == 0, f"{command}\n{output}"


def test_scripts_know_every_flag_that_the_documents_give_them(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(each)[1:] for each in COMMANDS if re.match("python (train|sample|bench|study)", each)]
    for script, *args in commands:
        if script == "study.py" and args[0] != "report":
            study_command.read(args, "")
        if "--help" in args or f"python {script} {' '.join(args)}".startswith(OTHERS):
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
