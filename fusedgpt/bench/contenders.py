"""The contenders of peers.py: one interface to our GPT, to transformers' GPT-2 and Llama, and to nanoGPT's model.py.

All contenders of a part start from the same weights, except for our GPT-2 beside the Llamas.

B batch, T sequence, V rows of the token embedding.
"""

import importlib.util
import pathlib
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.generation import engines, generate
from fusedgpt.interchange.pretrained import to_transformers
from fusedgpt.machine import determinism
from fusedgpt.machine.device import resolve_compile, resolve_dtype
from fusedgpt.parallel import distributed
from fusedgpt.runs import checkpoint
from fusedgpt.training.optimizer import update_weights
from model import GPT, GPTConfig

# nanoGPT has no autocast and no padding, and fuses AdamW on CUDA only. Its train.py lets CUDA multiply in TF32
NANOGPTS = {"dtype": "float32", "compile": False, "vocab_multiple": 1, "fused": False, "tf32": True}
TRANSFORMERS = {"vocab_multiple": 1}
EXACT = NANOGPTS | {"activation": "gelu"}  # our GPT with nanoGPT's arithmetic
# what each contender sets; all else, such as a training step's dtype, comes from the settings. "auto" is bfloat16 if
# the hardware gains by it
TRAINING = {
    "ours": {},
    "ours, eager": {"compile": False},
    "ours, compiled": {"compile": True},
    "Hugging Face, eager": TRANSFORMERS | {"compile": False},
    "Hugging Face, compiled": TRANSFORMERS | {"compile": True},
    "ours, float32, sdpa": EXACT | {"attention": "sdpa"},
    "ours, float32, manual": EXACT | {"attention": "manual"},
    "nanoGPT, float32": NANOGPTS,
    "nanoGPT, patched": {"compile": True, "vocab_multiple": 64},
}
GENERATION = {  # `ours` has the defaults of sample.py
    "ours": {"attention": "sdpa", "dtype": "auto", "compile": False},
    "ours, float32": {"attention": "sdpa", "dtype": "float32", "compile": False},
    "Hugging Face, bfloat16": TRANSFORMERS | {"dtype": "bfloat16", "compile": False},
    "Hugging Face, bfloat16, compiled": TRANSFORMERS | {"dtype": "bfloat16", "compile": True},
    "Hugging Face, float16": TRANSFORMERS | {"dtype": "float16", "compile": False},
    "Hugging Face, float16, compiled": TRANSFORMERS | {"dtype": "float16", "compile": True},
    "Hugging Face, float32": TRANSFORMERS | {"dtype": "float32", "compile": False},
    "Hugging Face, float32, compiled": TRANSFORMERS | {"dtype": "float32", "compile": True},
    "nanoGPT, float32": NANOGPTS,
}
_EAGER, _COMPILED = (TRANSFORMERS | {"compile": compiled} for compiled in (False, True))
LLAMA = {
    "ours": {"compile": True},
    "ours, GPT-2": {"compile": True},
    "Hugging Face, sdpa": _EAGER,
    "Hugging Face, sdpa, compiled": _COMPILED,
    "Hugging Face, eager attention": _EAGER | {"implementation": "eager"},
    "Hugging Face, eager attention, compiled": _COMPILED | {"implementation": "eager"},
}
PARTS = {"training": TRAINING, "generation": GENERATION, "llama": LLAMA}
STEPS = ("training", "llama")  # parts that time training steps
# implementation: transformers' name for a kind of attention
UNLESS_SET = {"activation": "gelu_tanh", "fused": True, "tf32": False, "implementation": "sdpa"}
# factor on the blocks' initial matrices; without it, greedy ids soon repeat, whatever the dtype
INITIAL_SCALE = 4


def settings(part: str, peer: str, s: dict[str, Any]) -> types.SimpleNamespace:
    """The settings of one contender: `s`, with the contender's own values in place of those in `s`."""
    chosen = types.SimpleNamespace(**{**s, **UNLESS_SET, **PARTS[part][peer]})
    if part == "llama" and peer != "ours, GPT-2":  # three matrices of 8/3 n_embd have the FLOPs of GPT-2's two of 4
        vars(chosen).update(position="rotary", norm="rmsnorm", mlp="swiglu", n_inner=8 * chosen.n_embd // 3)
    if part in STEPS and chosen.dtype == "auto":  # float16 would need a gradient scaler
        chosen.dtype = "bfloat16" if resolve_dtype("auto", torch.device(chosen.device)) == torch.bfloat16 else "float32"
    return chosen


def initial_weights(s: types.SimpleNamespace) -> dict[str, Tensor]:
    """The weights that all contenders start from: float32 on the CPU, with our names and without padding."""
    determinism.seed(s.seed, "init")
    model = GPT(GPTConfig.of(s, vocab_multiple=1, activation="gelu_tanh", dropout=0.0))
    with torch.no_grad():
        for p in model.transformer.h.parameters():
            if p.dim() == 2:
                p *= INITIAL_SCALE
    return model.state_dict()


def build(peer: str, state: dict[str, Tensor], s: types.SimpleNamespace) -> "Contender":
    """The contender `peer` with the weights `state`, float32 on the CPU. Raises UserError if it cannot be built."""
    return {"ours": Ours, "Hugging Face": HuggingFace, "nanoGPT": NanoGPT}[peer.split(",")[0]](state, s)


def reference(contender: "Contender", state: dict[str, Tensor], s: types.SimpleNamespace) -> GPT:
    """Our GPT with hand-written attention, float32 on the CPU: it computes what `contender` should compute."""
    same = dict(vocab_size=contender.ids, vocab_multiple=1, activation=contender.activation, dropout=0.0)
    return _loaded(GPT(GPTConfig.of(s, attention="manual", **same)), state, contender.ids)


def _loaded(model, state, V):
    """`model` with the weights `state`, whose embedding and output layer get rows of 0 up to V ids."""
    names = ("transformer.wte.weight", "lm_head.weight")
    padded = {name: F.pad(state[name], (0, 0, 0, V - len(state[name]))) for name in names}
    try:
        model.load_state_dict(state | padded)
    except RuntimeError as error:
        raise UserError(f"{type(model).__module__}.GPT does not take GPT-2's weights: {first_line(error)}") from error
    return model


class Contender:
    """A `model`, the number of `ids` in its softmax, and its form of GELU, `activation`.

    The methods call the model as nanoGPT's is called; subclasses override those that differ.
    """

    model: nn.Module  # float32 on the CPU, until it is moved
    ids: int
    activation: str

    def prepare(self, s: types.SimpleNamespace, device: torch.device, backward: bool) -> str:
        """Get ready to train if `backward`, otherwise to generate; returns the name of the attention.

        To generate, it sets `dtypes`: that of the prompt and that of the tokens after it. Raises UserError if the
        contender cannot run here.
        """
        if not backward:
            self.dtypes = (resolve_dtype(s.dtype, device),) * 2
            self.model.to(self.dtypes[0])
        return "sdpa"  # PyTorch picks the kernel

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the targets y for x; both are (B, T)."""
        return self.model(x, y)[1]

    def optimizer(self, s: types.SimpleNamespace, device: torch.device) -> torch.optim.Optimizer:
        """AdamW with the groups of GPT.configure_optimizers, fused on CUDA or if the settings say so."""
        groups = [
            {"params": [p for p in self.model.parameters() if p.dim() >= 2], "weight_decay": s.weight_decay},
            {"params": [p for p in self.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        fused = s.fused or device.type == "cuda"
        return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=fused)

    def update(self, optimizer: torch.optim.Optimizer, s: types.SimpleNamespace) -> None:
        """Clip the gradient, then step, as a hand-written training loop such as nanoGPT's does."""
        nn.utils.clip_grad_norm_(self.model.parameters(), s.grad_clip)
        optimizer.step()

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it."""
        return self.model.generate(idx, new, temperature=1.0, top_k=1)


class Ours(Contender):
    """Our GPT as train.py and sample.py run it, or with nanoGPT's arithmetic and steps (EXACT)."""

    def __init__(self, state: dict[str, Tensor], s: types.SimpleNamespace):
        config = GPTConfig.of(s, dropout=0.0)
        self.ids, self.activation = s.vocab_size, s.activation
        self.model = _loaded(GPT(config), state, config.padded_vocab_size)

    def prepare(self, s: types.SimpleNamespace, device: torch.device, backward: bool) -> str:
        if not backward:
            self.engine = engines.prepare(self.model, device, s.dtype, prompt_length=s.prompt_tokens)
            self.model, self.dtypes = self.engine.prefill, self.engine.dtypes
            return self.model.config.attention
        cases = Case.of_layers(self.model.config, s.batch_size, device, resolve_dtype(s.dtype, device))
        name, _ = choose.choose(s.attention, *cases, compiled=resolve_compile(s.compile, device)[0])
        self.model.use_attention(name)
        return name

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, y, logits=False)[1]

    def optimizer(self, s: types.SimpleNamespace, device: torch.device) -> torch.optim.Optimizer:
        if not s.fused:
            return super().optimizer(s, device)
        return self.model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device.type)

    def update(self, optimizer: torch.optim.Optimizer, s: types.SimpleNamespace) -> None:
        if not s.fused:
            return super().update(optimizer, s)
        update_weights(optimizer, distributed.gradient_norm(self.model), s.grad_clip)

    def generate(self, idx: Tensor, new: int) -> Tensor:
        ids = generate.new_tokens(self.engine, idx, new, temperature=0, cache=self.engine.cache)
        return torch.cat([idx, *ids], dim=1)


class HuggingFace(Contender):
    """transformers' model of the same family. GPT2LMHeadModel always has biases; if ours has none, they start at 0."""

    activation = "gelu_tanh"

    def __init__(self, state: dict[str, Tensor], s: types.SimpleNamespace):
        config = GPTConfig.of(s, vocab_multiple=1, activation=self.activation, dropout=0.0)
        self.model = to_transformers(config, state, attn_implementation=s.implementation)
        self.ids, self.options = s.vocab_size, {}

    def prepare(self, s: types.SimpleNamespace, device: torch.device, backward: bool) -> str:
        super().prepare(s, device, backward)
        if not backward and s.compile is True:  # transformers advises a static cache for this
            from transformers import CompileConfig

            how = CompileConfig(mode="reduce-overhead" if device.type == "cuda" else "default", fullgraph=False)
            how._compile_all_devices = True  # by default it compiles for GPUs only
            self.options = {"cache_implementation": "static", "compile_config": how}
        return self.model.config._attn_implementation

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.model(x, labels=y, shift_labels=y, use_cache=False).loss  # its own shift drops the last target

    def generate(self, idx: Tensor, new: int) -> Tensor:
        options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
        return self.model.generate(idx, attention_mask=torch.ones_like(idx), **options, **self.options)


class NanoGPT(Contender):
    """The GPT of model.py in `s.nanogpt`, a clone of nanoGPT. It has no KV cache: each id reads all ids before it."""

    activation = "gelu"  # the exact form, since May 2023

    def __init__(self, state: dict[str, Tensor], s: types.SimpleNamespace):
        if not s.tie_embeddings:
            raise UserError("nanoGPT's output layer has the weights of its embedding: leave tie_embeddings=True")
        self.ids = GPTConfig.of(s).padded_vocab_size  # nanoGPT does not tell padding from other ids
        try:
            module = _imported(pathlib.Path(s.nanogpt, "model.py"))
            shape = {name: getattr(s, name) for name in checkpoint.NANOGPTS} | dict(vocab_size=self.ids, dropout=0.0)
            self.model = module.GPT(module.GPTConfig(**shape))
        except Exception as error:  # code of another project can raise anything
            if out_of_memory(error):
                raise
            name = type(error).__name__
            raise UserError(f"{s.nanogpt} is no nanoGPT that this can build: {name}: {first_line(error)}") from error
        _loaded(self.model, state, self.ids)

    def optimizer(self, s: types.SimpleNamespace, device: torch.device) -> torch.optim.Optimizer:
        named = "cuda" if s.fused else device.type  # CPUs have a fused AdamW too, but nanoGPT asks for it on CUDA only
        return self.model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), named)


def _imported(path):
    spec = importlib.util.spec_from_file_location("nanogpts_model", path)
    # dataclasses look their module up in sys.modules
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
