"""Other projects' models behind one interface, and our GPT beside them on the same weights: for peers and prefill.

Mistral-7B, Llama-3-8B, Phi-2 and GPT-2 are built offline as published, with random weights. The stand-ins for a CPU
have an eighth of the width, heads and layers, so that head size and grouping stay the same. Each is there twice, as
transformers has it and as our own GPT. B batch, T sequence, nh heads, hs head size, V vocabulary.
"""

import contextlib
import copy
import dataclasses
import gc
import sys
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt.attention import functions, parity
from fusedgpt.attention.case import Case
from fusedgpt.bench.proof import ParityError
from fusedgpt.interchange import families
from fusedgpt.machine import determinism
from fusedgpt.runs import checkpoint
from model import GPT, GPTConfig

_ALL = dict(num_hidden_layers=32, num_attention_heads=32, tie_word_embeddings=False)
_LLAMA = _ALL | dict(hidden_size=4096, intermediate_size=14336, num_key_value_heads=8, hidden_act="silu")
_LLAMA |= dict(rms_norm_eps=1e-5)
_PHI = _ALL | dict(hidden_size=2560, intermediate_size=10240, num_key_value_heads=32, hidden_act="gelu_new")
_PHI |= dict(layer_norm_eps=1e-5, model_type="phi", vocab_size=51200, max_position_embeddings=2048)


def _rope(theta, **more):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **more}}


# from the config.json of mistralai/Mistral-7B-v0.1, meta-llama/Meta-Llama-3-8B and microsoft/phi-2
MISTRAL = dict(model_type="mistral", vocab_size=32000, max_position_embeddings=32768, sliding_window=4096)
PUBLISHED = {
    "mistral-7b": _LLAMA | MISTRAL | _rope(1e4),
    "llama-3-8b": _LLAMA | dict(model_type="llama", vocab_size=128256, max_position_embeddings=8192) | _rope(5e5),
    "phi-2": _PHI | _rope(1e4, partial_rotary_factor=0.4),
}
STAND_INS = {"mistral-small": "mistral-7b", "llama-small": "llama-3-8b", "phi-small": "phi-2"}
_SHRUNK = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# layers, heads, channels
GPT2 = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
PUBLISHED |= {
    name: dict(model_type="gpt2", n_layer=L, n_head=nh, n_embd=C, n_positions=2048)  # so that prompts of 2048 fit
    for name, (L, nh, C) in GPT2.items()
}
MODELS = (*PUBLISHED, *STAND_INS)
OURS = "ours, "  # begins the name of an attention that our own GPT computes, beside transformers' model


def config(name: str, **changes):
    """The config of one of MODELS; a new one for each call, because models keep and change it."""
    from transformers import AutoConfig

    fields = copy.deepcopy(PUBLISHED[STAND_INS.get(name, name)])
    if name in STAND_INS:
        fields |= {key: fields[key] // 8 for key in _SHRUNK}
    return AutoConfig.for_model(**fields | changes)


class Transformers:
    """A causal model from transformers."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.output, self.options, self.flash_only = model.get_output_embeddings(), {}, False
        self.ids = self.output.weight.size(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the targets y for x; both are (B, T)."""
        return self.model(x, labels=y, shift_labels=y, use_cache=False).loss  # its own shift drops the last target

    def compile_decode(self, device: torch.device) -> None:
        """Generate with a compiled decode step and a cache of a fixed size, as transformers advises."""
        from transformers import CompileConfig

        how = CompileConfig(mode="reduce-overhead" if device.type == "cuda" else "default", fullgraph=False)
        how._compile_all_devices = True  # by default it compiles for GPUs only
        self.options = {"cache_implementation": "static", "compile_config": how}

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it, with the mask of ones that a tokenizer gives."""
        options = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0)
        with self._kernels():
            return self.model.generate(idx, attention_mask=torch.ones_like(idx), **options, **self.options)

    def use(self, attention: str) -> None:
        """Compute attention by 'eager' or 'flash' from here on."""
        self.flash_only = attention == "flash"
        self.model.set_attn_implementation("sdpa" if self.flash_only else "eager")

    def _kernels(self):
        """A context in which SDPA uses its flash kernel and no other, if that was asked for."""
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash_only else contextlib.nullcontext()

    def case(self, idx: Tensor) -> Case:
        """Attention to a prompt like `idx` (1, T), of one head: the profiler sees the same for all."""
        return Case((1, 1, idx.size(1), 1), idx.device, self.output.weight.dtype, backward=False)

    def compare(self, idx: Tensor) -> dict[str, float]:
        """parity.compare of the current attention, called as the model itself calls it for `idx` (1, T).

        The call has the model's mask and options, two heads of keys, and as many heads of queries to each as the model.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interfaces

        calls, find = [], interfaces.get_interface

        def get_interface(name, default):
            attend = find(name, default)

            def call(module, q, k, v, mask, **options):
                calls.append((attend, module, q.shape, k.size(1), mask, options))
                return attend(module, q, k, v, mask, **options)

            return call

        with mock.patch.object(interfaces, "get_interface", get_interface):
            self.generate(idx, 1)
        attend, module, (_, nh, _, hs), kv_heads, mask, options = calls[0]
        groups = nh // kv_heads

        def grouped(q, k, v, dropout_p=0.0):
            with self._kernels():
                y, _ = attend(module, q.repeat_interleave(groups, dim=1), k, v, mask, **options)  # (1, T, nh, hs)
            return y.transpose(1, 2).unflatten(1, (-1, groups))[0].transpose(0, 1)  # (groups, 2, T, hs), all alike

        dtype = self.output.weight.dtype
        return parity.compare(grouped, Case((1, 2, idx.size(1), hs), idx.device, dtype, backward=False))


class NanoGPT:
    """The GPT of model.py in a clone of nanoGPT. It has no KV cache: each id reads all ids before it."""

    def __init__(self, clone: str, config: GPTConfig, state: dict[str, Tensor]):
        """A model with our weights `state`. Its softmax goes over all rows of the embedding, padding included."""
        self.ids = config.padded_vocab_size
        shape = {name: getattr(config, name) for name in checkpoint.NANOGPTS} | dict(vocab_size=self.ids, dropout=0.0)
        sys.dont_write_bytecode = True  # leave the clone as it is
        theirs = functions.load(f"{clone}/model.py:GPT")
        self.model = theirs(sys.modules[theirs.__module__].GPTConfig(**shape))
        self.model.load_state_dict(state)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the targets y for x; both are (B, T)."""
        return self.model(x, y)[1]

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it."""
        return self.model.generate(idx, new, temperature=1.0, top_k=1)


class OurGPT:
    """Our GPT, as a model that `prefill` measures."""

    def __init__(self, model: GPT, dtype: torch.dtype):
        self.model, self.output, self.dtype = model.eval(), model.lm_head, dtype

    @classmethod
    def beside(cls, other: Transformers) -> "OurGPT":
        """The model that computes the same as `other`, which from then on uses our copy of its weights."""
        family, own = families.read(other.model.config.to_dict())
        shapes, state = families.shapes(own), {}
        for name, place in families.places(own, family).items():  # the parts of each of our parameters, in a row
            w = other.model.get_parameter(name)
            if place.ours not in state:
                state[place.ours] = w.new_empty(shapes[place.ours])
            part = place.theirs(state[place.ours])
            part.copy_(w.detach())
            w.data = part
        with torch.device("meta"):  # takes no memory, until the weights are put in
            model = GPT(own)
        model.load_state_dict(state, assign=True, strict=not own.tie_embeddings)
        model.tie_weights()
        return cls(model, other.output.weight.dtype)

    def use(self, attention: str) -> None:
        """Compute attention by one of our kernels from here on."""
        self.model.use_attention(attention)

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it."""
        return self.model.generate(idx, new, temperature=0)

    def compare(self, idx: Tensor) -> dict[str, float]:
        """parity.compare of the current attention, for two heads of keys and a prompt like `idx` (1, T)."""
        return parity.compare(functions.ATTENTION[self.model.config.attention], self.case(idx).of_heads(1, 2))

    def case(self, idx: Tensor) -> Case:
        """The attention of the first layer for a prompt like `idx` (1, T)."""
        config = dataclasses.replace(self.model.config, block_size=idx.size(1))
        return Case.of_layers(config, 1, idx.device, self.dtype, backward=False)[0]


_loaded = {}  # at most one model, with ours beside it: two at full size may not fit


def load(name: str, attention: str, seed: int, device: torch.device, dtype: torch.dtype) -> OurGPT | Transformers:
    """The model `name` that computes `attention`: ours if that begins with OURS. Kept until another name is asked for.

    The old model is freed before the new one is built. Raises ParityError if ours does not compute what transformers'
    model computes.
    """
    key = (name, seed, device, dtype)
    if key not in _loaded:
        _loaded.clear()
        gc.collect()  # modules refer to each other in cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _prove(name, seed, device)
        determinism.seed(seed, "prefill")
        theirs = _theirs(name, device, dtype)
        _loaded[key] = theirs, OurGPT.beside(theirs)
    return _loaded[key][attention.startswith(OURS)]


def _theirs(name, device, dtype, **changes):
    from transformers import AutoModelForCausalLM

    with torch.device(device):  # not on meta: to_empty would lose the rotary frequencies, which are buffers
        return Transformers(AutoModelForCausalLM.from_config(config(name, **changes), dtype=dtype).eval())


@torch.no_grad()
def _prove(name, seed, device):
    """Raise ParityError unless two layers of the model compute the same logits in float32 as ours do.

    The matrices are scaled: else random weights attend to all tokens almost alike, and wrong positions would pass.
    """
    determinism.seed(seed, "prefill")
    window = {"sliding_window": 24} if config(name).to_dict().get("sliding_window") else {}
    theirs = _theirs(name, device, torch.float32, num_hidden_layers=2, **window)
    theirs.use("eager")
    for p in theirs.model.parameters():
        if p.dim() == 2:
            p *= 4
    ours, V = OurGPT.beside(theirs).model, theirs.model.config.vocab_size
    ours.use_attention("manual")
    x = torch.randint(V, (1, 64), generator=torch.Generator().manual_seed(seed)).to(device)
    want, got = theirs.model(x).logits, ours(x, x)[0]
    error = ((got - want).abs().max() / want.abs().max()).item()
    if not error <= 1e-4:  # `not <=` catches NaN too
        raise ParityError(f"two layers of {name} have other logits here than in transformers, by {error:.1e}")
