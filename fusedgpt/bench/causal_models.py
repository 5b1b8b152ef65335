"""The models of the prefill benchmark: our GPT, and causal models from transformers (foreign.py).

Mistral-7B, Llama-3-8B and Phi-2 are built offline as published, with random weights. Their stand-ins for a CPU have an
eighth of the width, heads and layers, so that head size and grouping stay the same. Each is there twice, as
transformers has it and as our own GPT, and both use one copy of the weights. The other models are our own GPT in
GPT-2's sizes, and any causal model that transformers loads. T: prompt tokens; the batch is 1.
"""

import copy
import dataclasses
import gc

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench.foreign import Transformers
from fusedgpt.bench.proof import ParityError
from fusedgpt.interchange import families
from fusedgpt.machine import determinism
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
OURS = "ours, "  # begins the name of an attention that our own GPT computes, beside transformers' model
OUR_NAMES = {"eager": "manual"}  # our name for transformers' eager attention; flash has the same name in both


def config(name: str, **changes):
    """The config of a published model or its stand-in; a new one for each call, because models keep and change it."""
    from transformers import AutoConfig

    fields = copy.deepcopy(PUBLISHED[STAND_INS.get(name, name)])
    if name in STAND_INS:
        fields |= {key: fields[key] // 8 for key in _SHRUNK}
    return AutoConfig.for_model(**fields | changes)


class OurGPT:
    """Our GPT, as a model that `prefill` measures."""

    def __init__(self, model: GPT, dtype: torch.dtype):
        self.model, self.output, self.dtype = model.eval(), model.lm_head, dtype
        self.max_length = model.config.block_size

    @classmethod
    def of_gpt2(cls, name: str, device: torch.device, dtype: torch.dtype) -> "OurGPT":
        """One of GPT-2's sizes with random weights, but with 2048 positions, so that prompts of 2048 fit."""
        n_layer, n_head, n_embd = GPT2[name]
        dimensions = dict(block_size=2048, vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        with torch.device(device):
            return cls(GPT(GPTConfig(**dimensions)).to(dtype), dtype)

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
        model.load_state_dict(state, assign=True)
        return cls(model, other.output.weight.dtype)

    def use(self, attention: str) -> None:
        """Compute attention by 'eager' or 'flash' from here on."""
        self.model.use_attention(OUR_NAMES.get(attention, attention))

    def generate(self, idx: torch.Tensor, new: int) -> torch.Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it."""
        return self.model.generate(idx, new, temperature=0)

    def compare(self, idx: torch.Tensor) -> dict[str, float]:
        """parity.compare of the current attention, for two heads of keys and a prompt like `idx` (1, T)."""
        return parity.compare(ATTENTION[self.model.config.attention], self.case(idx).of_heads(1, 2))

    def case(self, idx: torch.Tensor) -> Case:
        """The attention of the first layer for a prompt like `idx` (1, T)."""
        config = dataclasses.replace(self.model.config, block_size=idx.size(1))
        return Case.of_model(config, 1, idx.device, self.dtype, backward=False)


BOTH = {*PUBLISHED, *STAND_INS}  # models that are there twice
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
        if name in BOTH:
            _prove(name, seed, device)
        determinism.seed(seed, "prefill")
        if name in GPT2:
            _loaded[key] = [OurGPT.of_gpt2(name, device, dtype)]
        else:
            _loaded[key] = [_theirs(name, device, dtype)]
        if name in BOTH:
            _loaded[key].append(OurGPT.beside(_loaded[key][0]))
    return _loaded[key][attention.startswith(OURS)]


def _theirs(name, device, dtype, **changes):
    from transformers import AutoModelForCausalLM

    if name not in BOTH:
        return Transformers.loaded(name, dtype, device)
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
    theirs.model.set_attn_implementation("eager")
    for p in theirs.model.model.layers.parameters():
        if p.dim() == 2:
            p *= 4
    ours, V = OurGPT.beside(theirs).model, theirs.model.config.vocab_size
    ours.use_attention("manual")
    x = torch.randint(V, (1, 64), generator=torch.Generator().manual_seed(seed)).to(device)
    want, got = theirs.model(x).logits, ours(x, x)[0]
    error = ((got - want).abs().max() / want.abs().max()).item()
    if not error <= 1e-4:  # `not <=` catches NaN too
        raise ParityError(f"two layers of {name} have other logits here than in transformers, by {error:.1e}")
