"""What the tests share: devices, a small data set, small settings, and runs of the scripts."""

import functools
import json
import os
import pathlib
import shutil
import signal
import time

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # from a shell script's `make test &`; runs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # from nohup; a run that SIGHUP should end would never end
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # or scripts would say, at times, that the machine is busy
os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads slow down models this small, most of all on a busy machine

from tests.launch import ROOT, as_it_was

# Not the user's cache: a graph compiled there for other CPU instructions would end the tests
KEPT_GRAPHS = f"inductor_{os.environ.get('ATEN_CPU_CAPABILITY', 'all')}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(ROOT / ".pytest_cache" / KEPT_GRAPHS))

os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once; without it, a name that is not there takes 23 s
os.environ.setdefault("MPLCONFIGDIR", str(ROOT / ".pytest_cache" / "matplotlib"))

# before the first product, when cuBLAS reads it: a test that makes PyTorch deterministic would be refused after others
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention

import export
import train
from fusedgpt.attention import functions
from fusedgpt.data import prepare, tokenizer
from fusedgpt.errors import UserError
from fusedgpt.machine import flops, memory
from fusedgpt.machine.device import resolve_compile

OFFLINE_BPE = ROOT.parent / "shared" / "data" / "tiktoken_cache"  # if it exists, tests of GPT-2's BPE need no network
if OFFLINE_BPE.exists():
    os.environ.setdefault("TIKTOKEN_CACHE_DIR", str(OFFLINE_BPE))

MEASURED_ONCE = functools.cache(flops.peak_flops)  # it takes a quarter of a second, as long as the rest of a small run
TINY = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, batch_size=4)
# every switch that another family has and that goes with TINY, in one model; its heads are wider than n_embd / n_head
LLAMA = dict(position="rotary", norm="rmsnorm", mlp="swiglu", n_inner=40, n_kv_head=1, head_size=32, qk_norm=True)
LLAMA |= dict(window=8, window_pattern="LS", tie_embeddings=False, attention_bias="qkv", output_bias=True, bigrams=50)
# a run of each kind; at the rate of `small`, a Llama's rounding grows to 1e-3 of the loss in 20 steps
RECIPES = {"gpt2": {}, "llama": LLAMA | dict(learning_rate=1e-3), "muon": dict(optimizer="muon")}
RECIPES |= {"float16": dict(dtype="float16")}
GPU = pytest.param("cuda", marks=pytest.mark.gpu)
ON_GPU_TOO = [("cpu", "float32"), *(pytest.param(*GPU.values, d, marks=GPU.marks) for d in ("bfloat16", "float16"))]


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(params=["cpu", GPU])
def device(request):
    return torch.device(request.param)


@pytest.fixture
def compiler():
    """Skip the test if torch.compile cannot work on this machine's CPU."""
    if reason := resolve_compile(True, torch.device("cpu"))[1]:
        pytest.skip(reason)


@pytest.fixture
def uncompiled_flex(request, monkeypatch):
    """On a CPU FlexAttention runs operator by operator, as for debugging: Inductor takes 8 s a kernel."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if params.get("device") != "cuda":
        monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        monkeypatch.setattr(functions, "_compiled_flex", lambda dynamic: flex_attention.flex_attention)


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """No test leaves a setting of PyTorch or a signal handler behind for the next."""
    monkeypatch.setattr(flops, "peak_flops", MEASURED_ONCE)
    monkeypatch.setattr(memory, "keep_freed_memory", lambda keep: None)  # it cannot be undone in this process
    with as_it_was():
        yield


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A data folder: 20,000 and 3,000 bytes of text-like ids below 65."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    walk = np.cumsum(rng.integers(-3, 4, 23_000)) % 65  # each id says much about the next
    splits = {"train": [walk[:20_000]], "val": [walk[20_000:]]}
    itos = [chr(33 + i) for i in range(65)]
    prepare.write(folder, splits, "a random walk", tokenizer="char", vocab_size=65, itos=itos)
    return folder


def random_data(folder, vocab_size, **meta):
    """A data folder of random ids."""
    ids = np.random.default_rng(0).integers(0, vocab_size, 2000)
    prepare.write(folder, {"train": [ids[:1500]], "val": [ids[1500:]]}, "random", vocab_size=vocab_size, **meta)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory, data):
    """finished(name): the folder of a finished run of RECIPES[name]. Tests that change it copy it first."""
    return functools.cache(lambda name: run(tmp_path_factory.mktemp(name), data, **RECIPES[name]))


@pytest.fixture(scope="session")
def small_run(finished):
    """The folder of a finished run of `small` settings. Tests only read it."""
    return finished("gpt2")


@pytest.fixture
def done(small_run, tmp_path):
    """A copy of `small_run`."""
    return shutil.copytree(small_run, tmp_path / "done")


@pytest.fixture(scope="session")
def exported(tmp_path_factory, small_run):
    """`small_run`, exported for transformers. Tests only read it."""
    folder = tmp_path_factory.mktemp("exported") / "hf"
    export.main(small_run, folder)
    return folder


def small(out_dir, data, **settings):
    """Settings of a run of a tiny model that takes a second on a CPU."""
    quick = dict(gradient_accumulation_steps=1, max_iters=10, log_interval=1, eval_interval=5, eval_iters=4)
    quick |= dict(learning_rate=1e-2, warmup_iters=2, lr_decay_iters=100)
    machine = dict(device="cpu", dtype="float32", compile=False, attention="sdpa")
    files = dict(out_dir=str(out_dir), dataset=str(data))
    return train.Settings(**{**TINY, **quick, **machine, **files, **settings})


def run(out_dir, data, **settings):
    """A run of `small` settings in this process."""
    with as_it_was():  # fixtures of the session call this too
        train.main(small(out_dir, data, **settings))
    return out_dir


def again(out_dir, *args):
    """The flags that resume the run in `out_dir`. Its data are outside of data/, so they have to be named again."""
    return ("--init_from=resume", f"--out_dir={out_dir}", f"--dataset={record(out_dir)['settings']['dataset']}", *args)


def flags(settings):
    """The command line that asks for `settings`."""
    return [f"--{name}={value}" for name, value in vars(settings).items() if value is not None]


def rows(out_dir, kind="train"):
    """The rows of one kind in a run's metrics.jsonl."""
    lines = (pathlib.Path(out_dir) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def record(out_dir):
    """What a run's run.json holds."""
    return json.loads((pathlib.Path(out_dir) / "run.json").read_text())


def wait_for(path, seconds=10):
    """Wait until `path` exists."""
    for _ in range(100 * seconds):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} never came")


def checkpoint_of(out_dir, file="ckpt.pt"):
    """What a run's checkpoint in one file holds."""
    return torch.load(pathlib.Path(out_dir) / file, weights_only=True)


def weights(out_dir, file="ckpt.pt"):
    """The state dict in a run's checkpoint."""
    return checkpoint_of(out_dir, file)["model"]


def tensors(checkpoint):
    """The weights of a loaded checkpoint, and AdamW's moments by the number of the parameter."""
    states = checkpoint["optimizer"]["state"].items()
    return checkpoint["model"] | {f"{n} {key}": value for n, state in states for key, value in state.items()}


def assert_same_bytes(a, b):
    """Two state dicts agree to the bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def as_nanogpt_wrote(saved):
    """The checkpoint `saved` in nanoGPT's format, which does not name the attention or the activation.

    nanoGPT's vocab_size is the number of rows of the embedding, with its padding.
    """
    theirs = {name: saved[name] for name in ("optimizer", "model_args", "iter_num", "config")}
    theirs["model"] = {f"_orig_mod.{name}": w for name, w in saved["model"].items()}
    theirs["model_args"] = saved["model_args"] | {"vocab_size": len(saved["model"]["lm_head.weight"])}
    ours = ("attention", "activation", "vocab_size", "vocab_multiple")
    theirs["config"] = {name: value for name, value in saved["config"].items() if name not in ours}
    return theirs | {"best_val_loss": torch.tensor(saved["best_val_loss"])}


def why_no_bpe():
    """Why GPT-2's BPE files are not here, or None if they are."""
    try:
        tokenizer.tiktoken_bpe("gpt2")
    except UserError as error:
        return str(error)


class Evil:
    """Unpickled without care, it writes a file `pwned` into the current folder."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def hugging_face(folder, family="gpt2", **shape):
    """A random model of transformers, saved in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape, initializer_range=0.1, bos_token_id=0, eos_token_id=None)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, so that a mix-up of them would go unseen
        for p in theirs.parameters():
            if p.dim() == 1:
                p += 0.1 * torch.randn_like(p)
    theirs.save_pretrained(folder)
    return theirs
