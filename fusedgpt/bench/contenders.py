"""The contenders of peers.py: one interface to our GPT, to transformers' GPT-2 and to nanoGPT's model.py.

All contenders of a run start from the same weights. A contender has a `model`, and names the form of GELU that it
computes and the number of ids that its softmax covers.

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
from fusedgpt.interchange.gpt2 import to_transformers
from fusedgpt.machine import determinism
from fusedgpt.machine.device import multiplies_bfloat16, resolve_compile, resolve_dtype
from fusedgpt.parallel import distributed
from fusedgpt.runs import checkpoint
from fusedgpt.training.optimizer import update_weights
from model import GPT, GPTConfig

# as nanoGPT: no autocast, no padding, AdamW fused on CUDA only. Its train.py also lets CUDA multiply in TF32
NANOGPTS = {"dtype": "float32", "compile": False, "vocab_multiple": 1, "fused": False, "tf32": True}
TRANSFORMERS = {"dtype": "auto", "vocab_multiple": 1}  # bfloat16, if the hardware multiplies it
# what each contender sets; the settings decide all else
TRAINING = {
    "ours": {},
    "ours, eager": {"compile": False},
    "ours, compiled": {"compile": True},
    "Hugging Face, eager": TRANSFORMERS | {"compile": False},
    "Hugging Face, compiled": TRANSFORMERS | {"compile": True},
    "ours, float32, sdpa": NANOGPTS | {"attention": "sdpa", "activation": "gelu"},
    "ours, float32, manual": NANOGPTS | {"attention": "manual", "activation": "gelu"},
    "nanoGPT, float32": NANOGPTS,
    "nanoGPT, patched": {"dtype": "auto", "compile": True, "vocab_multiple": 64},
}
GENERATION = {  # ours as in sample.py by default
    "ours": {"attention": "sdpa", "dtype": "auto", "compile": False},
    "ours, float32": {"attention": "sdpa", "dtype": "float32", "compile": False},
    **{
        f"Hugging Face, {dtype}{', compiled' if compiled else ''}": TRANSFORMERS | {"dtype": dtype, "compile": compiled}
        for dtype in ("bfloat16", "float16", "float32")
        for compiled in (False, True)
    },
    "nanoGPT, float32": NANOGPTS,
}
PARTS = {"training": TRAINING, "generation": GENERATION}
UNLESS_SET = {"fused": True, "tf32": False}  # defaults of what is no setting of train.py
# factor on the blocks' initial matrices: without it, greedy ids soon repeat, in any dtype alike
LOUDER = 4


def settings(part: str, peer: str, s: dict[str, Any]) -> types.SimpleNamespace:
    """The settings of one contender: `s`, and over it what the contender sets."""
    own = {"activation": "gelu_tanh"} | UNLESS_SET | PARTS[part][peer]
    chosen = types.SimpleNamespace(**{**s, **own})
    if part == "training" and chosen.dtype == "auto":  # float16 would need a gradient scaler
        chosen.dtype = "bfloat16" if multiplies_bfloat16(torch.device(chosen.device)) else "float32"
    return chosen


def initial_weights(s: types.SimpleNamespace) -> dict[str, Tensor]:
    """The weights that all contenders start from: float32 on the CPU, with GPT-2's names and without padding."""
    determinism.seed(s.seed, "init")
    model = GPT(GPTConfig.of(s, vocab_multiple=1, activation="gelu_tanh", dropout=0.0))
    with torch.no_grad():
        for p in model.transformer.h.parameters():
            p *= LOUDER if p.dim() == 2 else 1
    return model.state_dict()


def build(peer: str, state: dict[str, Tensor], s: types.SimpleNamespace) -> Any:
    """The contender `peer` with the weights `state`, float32 on the CPU. Raises UserError if it cannot be built."""
    return {"ours": Ours, "Hugging Face": HuggingFace, "nanoGPT": NanoGPT}[peer.split(",")[0]](state, s)


def reference(contender: Any, state: dict[str, Tensor], s: types.SimpleNamespace) -> GPT:
    """Our GPT, with hand-written attention, that computes what `contender` should: float32 on the CPU."""
    same = dict(vocab_size=contender.ids, vocab_multiple=1, activation=contender.activation, dropout=0.0)
    config = GPTConfig.of(s, attention="manual", **same)
    return _loaded(GPT(config), _padded(state, contender.ids))


def _padded(state, V):
    """`state` with rows of 0 added for the ids from its vocabulary size up to V."""
    tied = ("transformer.wte.weight", "lm_head.weight")
    return {name: F.pad(w, (0, 0, 0, V - len(w))) if name in tied else w for name, w in state.items()}


def _loaded(model, state):
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{type(model).__module__}.GPT does not take GPT-2's weights: {first_line(error)}") from error
    return model


def _adamw(model, s, fused):
    """AdamW as our GPT.configure_optimizers makes it, for any model, fused or not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": s.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=fused)


def _to_generate(contender, s, device, backward):
    if not backward:
        contender.dtypes = (resolve_dtype(s.dtype, device),) * 2
        contender.model.to(contender.dtypes[0])


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, s: types.SimpleNamespace) -> None:
    """Clip the gradient and step as a hand-written training loop does, such as nanoGPT's."""
    nn.utils.clip_grad_norm_(model.parameters(), s.grad_clip)
    optimizer.step()


class Ours:
    """Our GPT as train.py runs it, or with the settings `NANOGPTS`."""

    def __init__(self, state: dict[str, Tensor], s: types.SimpleNamespace):
        config = GPTConfig.of(s, dropout=0.0)
        self.model, self.ids, self.activation = GPT(config), s.vocab_size, s.activation
        _loaded(self.model, _padded(state, config.padded_vocab_size))

    def prepare(self, s: types.SimpleNamespace, device: torch.device, backward: bool) -> str:
        """Choose the attention kernel, and return its name. Raises UserError if it cannot run here."""
        B = s.batch_size if backward else 1
        case = Case.of_model(s, B, device, resolve_dtype(s.dtype, device), backward=backward)
        cases = (case,) if backward else (case, case.one_query())
        name, _ = choose.choose(s.attention, *cases, compiled=backward and resolve_compile(s.compile, device)[0])
        self.model.use_attention(name)
        if not backward:
            self.engine = engines.prepare(self.model, device, s.dtype, prompt_length=s.prompt_tokens)
            self.model, self.dtypes = self.engine.prefill, self.engine.dtypes
        return name

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of targets y after x, (B, T) both."""
        return self.model(x, y, logits=False)[1]

    def optimizer(self, s: types.SimpleNamespace, device: torch.device) -> torch.optim.Optimizer:
        """train.py's AdamW, or nanoGPT's with the settings `NANOGPTS`."""
        if not s.fused:
            return _adamw(self.model, s, fused=device.type == "cuda")
        return self.model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device.type)

    def update(self, optimizer: torch.optim.Optimizer, s: types.SimpleNamespace) -> None:
        """Clip the gradient and step as train.py does, or as nanoGPT does with the settings `NANOGPTS`."""
        if not s.fused:
            return clip_and_step(self.model, optimizer, s)
        update_weights(optimizer, distributed.gradient_norm(self.model), s.grad_clip)

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it, one by one, as sample.py draws them."""
        ids = generate.new_tokens(self.engine, idx, new, temperature=0, cache=self.engine.cache)
        return torch.cat([idx, *ids], dim=1)


class HuggingFace:
    """transformers' GPT2LMHeadModel with SDPA. It always has biases; if ours has none, they start at 0."""

    activation = "gelu_tanh"

    def __init__(self, state: dict[str, Tensor], s: types.SimpleNamespace):
        config = GPTConfig.of(s, vocab_multiple=1, activation=self.activation, dropout=0.0)
        self.model = to_transformers(config, state, attn_implementation="sdpa")
        self.ids, self.options = s.vocab_size, {}

    def prepare(self, s: types.SimpleNamespace, device: torch.device, backward: bool) -> str:
        """The name of transformers' attention. If compiled, generation uses a static cache, as transformers advises."""
        _to_generate(self, s, device, backward)
        if not backward and s.compile is True:
            from transformers import CompileConfig

            how = CompileConfig(mode="reduce-overhead" if device.type == "cuda" else "default", fullgraph=False)
            how._compile_all_devices = True  # unless told so, it compiles for GPUs only
            self.options = {"cache_implementation": "static", "compile_config": how}
        return self.model.config._attn_implementation

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of targets y after x, (B, T) both. transformers' own shift would drop the last target."""
        return self.model(x, labels=y, shift_labels=y, use_cache=False).loss

    def optimizer(self, s: types.SimpleNamespace, device: torch.device) -> torch.optim.Optimizer:
        """Fused AdamW."""
        return _adamw(self.model, s, fused=True)

    def update(self, optimizer: torch.optim.Optimizer, s: types.SimpleNamespace) -> None:
        """Clip the gradient and step."""
        clip_and_step(self.model, optimizer, s)

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it, with transformers' KV cache, dynamic or static."""
        options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
        return self.model.generate(idx, attention_mask=torch.ones_like(idx), **options, **self.options)


class NanoGPT:
    """The GPT of model.py in `s.nanogpt`, a clone of nanoGPT."""

    activation = "gelu"  # the exact form, since May 2023

    def __init__(self, state: dict[str, Tensor], s: types.SimpleNamespace):
        self.ids = -(-s.vocab_size // s.vocab_multiple) * s.vocab_multiple  # to nanoGPT, padding is ids like all others
        try:
            module = _imported(pathlib.Path(s.nanogpt, "model.py"))
            shape = {name: getattr(s, name) for name in checkpoint.NANOGPTS} | dict(vocab_size=self.ids, dropout=0.0)
            self.model = module.GPT(module.GPTConfig(**shape))
        except Exception as error:  # code of another project can raise anything
            if out_of_memory(error):
                raise
            name = type(error).__name__
            raise UserError(f"{s.nanogpt} is no nanoGPT that this can build: {name}: {first_line(error)}") from error
        _loaded(self.model, _padded(state, self.ids))

    def prepare(self, s: types.SimpleNamespace, device: torch.device, backward: bool) -> str:
        """nanoGPT calls SDPA, and lets PyTorch pick the kernel."""
        _to_generate(self, s, device, backward)
        return "sdpa"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of targets y after x, (B, T) both."""
        return self.model(x, y)[1]

    def optimizer(self, s: types.SimpleNamespace, device: torch.device) -> torch.optim.Optimizer:
        """nanoGPT's own AdamW, fused if nanoGPT is told that the device is CUDA. CPUs have a fused AdamW too."""
        told = "cuda" if s.fused else device.type
        return self.model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), told)

    def update(self, optimizer: torch.optim.Optimizer, s: types.SimpleNamespace) -> None:
        """Clip the gradient and step."""
        clip_and_step(self.model, optimizer, s)

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it. nanoGPT has no cache: each id reads all ids before it."""
        return self.model.generate(idx, new, temperature=1.0, top_k=1)


def _imported(path):
    """The module in the file `path`, which may define dataclasses."""
    spec = importlib.util.spec_from_file_location("nanogpts_model", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
