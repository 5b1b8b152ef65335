"""Time to first token at batch 1: eager attention against the flash kernel, on the same weights.

The models are Mistral-7B, Llama-3-8B and Phi-2 as published, built offline with random weights; stand-ins of them for a
CPU, with an eighth of the width, heads and layers, so that head size and grouping stay; our own GPT in GPT-2's sizes;
any other causal model that transformers loads. What is timed is `generate` of one token, as in AMD's article
"Accelerating Large Language Models with Flash Attention on AMD GPUs" (4 warm-up runs, 256 timed).

B = 1, T prompt tokens, nh heads, hs head size, V vocabulary.
"""

import contextlib
import copy
import gc
import importlib.util

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPT, GPTConfig
from parts import clock, kernels, machine, parity
from parts.attention import ATTENTION
from parts.bench.rows import numbers, refusals, slug, verdict
from parts.errors import UserError, out_of_memory

_LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
_LLAMA |= dict(num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-5, tie_word_embeddings=False)
_PHI = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32)
_PHI |= dict(num_key_value_heads=32, hidden_act="gelu_new", layer_norm_eps=1e-5, tie_word_embeddings=False)

# the config.json of mistralai/Mistral-7B-v0.1, meta-llama/Meta-Llama-3-8B and microsoft/phi-2
PUBLISHED = {
    "mistral-7b": dict(
        **_LLAMA,
        model_type="mistral",
        vocab_size=32000,
        max_position_embeddings=32768,
        sliding_window=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "llama-3-8b": dict(
        **_LLAMA,
        model_type="llama",
        vocab_size=128256,
        max_position_embeddings=8192,
        attention_bias=False,
        mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "phi-2": dict(
        **_PHI,
        model_type="phi",
        vocab_size=51200,
        max_position_embeddings=2048,
        resid_pdrop=0.1,
        embd_pdrop=0.0,
        attention_dropout=0.0,
        qk_layernorm=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
    ),
}
STAND_INS = {"mistral-small": "mistral-7b", "llama-small": "llama-3-8b", "phi-small": "phi-2"}
_SHRUNK = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
GPT2 = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}

_NAMED = {"eager": "manual"}  # as in ATTENTION; flash is flash


def config(name):
    """The config of a published model or of its stand-in: a new one each time, as a model keeps the one it is given."""
    from transformers import AutoConfig

    shape = copy.deepcopy(PUBLISHED[STAND_INS.get(name, name)])
    if name in STAND_INS:
        shape |= {key: shape[key] // 8 for key in _SHRUNK}
    return AutoConfig.for_model(**shape)


class Ours:
    """Our GPT with random weights, in a size of GPT-2's but with 2048 positions, so that prompts of 2048 fit."""

    def __init__(self, name, device, dtype):
        n_layer, n_head, n_embd = GPT2[name]
        shape = dict(block_size=2048, vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        with torch.device(device):
            self.model = GPT(GPTConfig(**shape)).to(dtype).eval()
        self.output, self.dtype, self.positions = self.model.lm_head, dtype, self.model.config.block_size

    def tables(self):
        """The weights that do not meet every token in a product: of the embeddings and the output layer."""
        return [self.model.transformer.wte.weight, self.model.transformer.wpe.weight, self.output.weight]

    def use(self, attention):
        """Compute attention by 'eager' or 'flash' from here on."""
        self.model.use_attention(_NAMED.get(attention, attention))

    def generate(self, idx):
        """The call that is timed: prefill into a new cache, and the likeliest id."""
        self.model.generate(idx, 1, temperature=0)

    def errors(self, idx):
        """parity.errors of the attention in use, for two heads of a prompt like `idx` (1, T)."""
        c = self.model.config
        shape = (1, 2, idx.size(1), c.n_embd // c.n_head)
        return parity.errors(ATTENTION[c.attention], shape, idx.device, self.dtype, backward=False)


class Theirs:
    """A causal model of transformers': published, a stand-in, or loaded by name."""

    def __init__(self, name, device, dtype):
        from transformers import AutoModelForCausalLM

        if name in PUBLISHED or name in STAND_INS:
            with torch.device(device):  # not on meta: the rotary frequencies are buffers, which to_empty would lose
                self.model = AutoModelForCausalLM.from_config(config(name), dtype=dtype)
        else:
            try:
                self.model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
            except Exception as error:  # a missing, damaged or foreign file can raise anything
                if out_of_memory(error):
                    raise
                raise UserError(f"cannot load {name!r}: {_first_line(error)}") from error
        self.model.eval()
        c = self.model.config
        sees = (getattr(c, "max_position_embeddings", None), getattr(c, "sliding_window", None))
        self.positions = min(filter(None, sees), default=float("inf"))
        self.output, self.dtype = self.model.get_output_embeddings(), dtype

    def tables(self):
        """The weights that do not meet every token in a product: of the embedding and the output layer."""
        return [self.model.get_input_embeddings().weight, self.output.weight]

    def use(self, attention):
        """Compute attention by 'eager', 'flash' or 'flash_attention_2' from here on. Raises UserError if it cannot."""
        path = "sdpa" if attention == "flash" else attention
        try:
            self.model.set_attn_implementation(path)
        except (ValueError, ImportError) as error:
            raise UserError(_first_line(error)) from error
        if self.model.config._attn_implementation != path:  # transformers may only warn
            raise UserError(f"{type(self.model).__name__} does not switch its attention to {path}")

    def _held(self):
        """SDPA's flash kernel or none, wherever SDPA is called."""
        held = self.model.config._attn_implementation == "sdpa"
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if held else contextlib.nullcontext()

    def generate(self, idx):
        """The call that is timed: `generate` of one token, with the mask of ones that a tokenizer gives."""
        with self._held():
            self.model.generate(
                idx, attention_mask=torch.ones_like(idx), max_new_tokens=1, do_sample=False, pad_token_id=0
            )

    def errors(self, idx):
        """parity.errors of the attention in use as the model itself calls it for `idx` (1, T).

        With its own mask and options, for two heads of keys and as many queries to each as in the model. Raises
        UserError where the model does not call attention through transformers' AttentionInterface.
        """
        calls = []
        with _listening(calls):
            self.generate(idx)
        if not calls:
            raise UserError(f"{type(self.model).__name__} has attention of its own, out of reach of a comparison")
        attend, module, (nh, nh_k, hs), mask, options = calls[0]
        groups = nh // nh_k

        def grouped(q, k, v):
            with self._held():
                y, _ = attend(module, q.repeat_interleave(groups, dim=1), k, v, mask, **options)  # (1, T, nh, hs)
            return y.transpose(1, 2).unflatten(1, (-1, groups))[0].transpose(0, 1)  # (groups, 2, T, hs), all alike

        return parity.errors(grouped, (1, 2, idx.size(1), hs), idx.device, self.dtype, backward=False)


@contextlib.contextmanager
def _listening(calls):
    """Append to `calls` how a model of transformers' calls attention: (function, module, shape, mask, options)."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interfaces

    find = interfaces.get_interface

    def get_interface(name, default):
        attend = find(name, default)

        def call(module, q, k, v, mask, **options):
            calls.append((attend, module, (q.size(1), k.size(1), q.size(3)), mask, options))
            return attend(module, q, k, v, mask, **options)

        return call

    interfaces.get_interface = get_interface  # shadows the method
    try:
        yield
    finally:
        del interfaces.get_interface


def _first_line(error):
    return str(error).strip().splitlines()[0].rstrip(". ")


_only = {}  # one model at most: two at full size may not fit


def load(name, seed, device, dtype):
    """The model `name`, kept until another is asked for, which is built only once this one is gone."""
    key = (name, seed, device, dtype)
    if key not in _only:
        _only.clear()
        gc.collect()  # modules refer to each other in circles
        if device.type == "cuda":
            torch.cuda.empty_cache()
        machine.seed(seed, "prefill")
        _only[key] = (Ours if name in GPT2 else Theirs)(name, device, dtype)
    return _only[key]


def logits(subject, idx):
    """Run the call that is timed once: the last logits (V,), and at how many positions the output layer gave logits."""
    seen = []
    hook = subject.output.register_forward_hook(lambda module, args, y: seen.append((y[0, -1].float(), y.size(1))))
    try:
        subject.generate(idx)
    finally:
        hook.remove()
    return seen[0]


def _difference(got, subject, idx):
    """Largest difference of the last logits from eager's, as a share of eager's largest; None if eager has no room."""
    try:
        subject.use("eager")
        want, _ = logits(subject, idx)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return None
    return ((got - want).abs().max() / want.abs().max()).item()


def _contradiction(attention, receipt, device):
    if attention == "flash_attention_2":  # a package's kernels, which are no operators of PyTorch's
        foreign = receipt["forward"] == ["unfused"] and receipt["ops"]
        return None if foreign else f"{attention} was asked for, but the profiler saw {receipt['forward'][0]}"
    return kernels.contradiction(_NAMED.get(attention, attention), receipt, device, backward=False)


def plan(s, device):
    """The rows in order: {'model', 'attention', 'T'}."""
    package = ["flash_attention_2"] if importlib.util.find_spec("flash_attn") else []
    return [
        {"model": name, "attention": attention, "T": T}
        for name in s.models.split(",")
        for T in numbers(s.lengths)
        for attention in ("eager", "flash", *(package if name not in GPT2 else []))
    ]


def measure(spec, s, device, folder):
    """What was measured for a row of `plan`: times in ms, peak bytes, the receipt, and errors as shares.

    With s.profile, the profile of one call goes to traces/ in `folder`. Raises UserError where the path cannot run here
    or another kernel ran, ParityError where its attention differs from float64; errors of a full memory pass.
    """
    attention, T, dtype = spec["attention"], spec["T"], machine.dtype(s.dtype, device)
    subject = load(spec["model"], s.seed, device, dtype)
    if subject.positions < T:
        raise UserError(f"{T} tokens are more than the {subject.positions} that {spec['model']} attends to")
    generator = torch.Generator().manual_seed(s.seed)
    idx = torch.randint(subject.model.config.vocab_size, (1, T), generator=generator).to(device)
    subject.use(attention)
    seen = []
    trace = folder / "traces" / f"{slug(' '.join(map(str, spec.values())))}.json"
    with refusals():
        errors = subject.errors(idx)
        receipt = kernels.observe(lambda: seen.append(logits(subject, idx)), trace if s.profile else None)
    if reason := _contradiction(attention, receipt, device):
        raise UserError(reason)
    passed = verdict(errors, dtype, f"of {attention} attention as the model calls it, 2 heads")
    last, positions = seen[0]
    difference = _difference(last, subject, idx)
    subject.use(attention)
    machine.reset_peak_memory(device)
    samples_ms = clock.samples(lambda: subject.generate(idx), device, s.repeats, s.warmup)
    times, parameters = clock.summary(samples_ms), sum(p.numel() for p in subject.model.parameters())
    body = parameters - sum({id(w): w.numel() for w in subject.tables()}.values())
    return {
        "parameters": parameters,
        "dtype": str(dtype).removeprefix("torch."),
        "logits": "last position" if positions == 1 else "all positions",
        "samples_ms": samples_ms,
        **times,
        "tflops": 2 * body * T / (times["median_ms"] * 1e9),  # two a weight and token, but for embedding and output
        "peak_memory": machine.peak_memory(device),
        "kernel": receipt,
        "errors": errors,
        "parity": passed,
        "logits_differ": difference,
    }
