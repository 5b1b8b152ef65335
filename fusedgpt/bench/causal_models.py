"""The models of the prefill benchmark: one interface to our GPT and to causal models from transformers.

Mistral-7B, Llama-3-8B and Phi-2 are built offline as published, with random weights. Their stand-ins for a CPU have an
eighth of the width, heads and layers, so that head size and grouping stay the same. Each is there twice, as
transformers has it and as our own GPT, and both use one copy of the weights. The other models are our own GPT in
GPT-2's sizes, and any causal model that transformers loads.

B = 1, T prompt tokens, nh heads, hs head size, V vocabulary.
"""

import contextlib
import copy
import dataclasses
import gc

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.interchange import families
from fusedgpt.machine import determinism
from model import GPT, GPTConfig

_LLAMA = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32)
_LLAMA |= dict(num_key_value_heads=8, hidden_act="silu", rms_norm_eps=1e-5, tie_word_embeddings=False)
_PHI = dict(hidden_size=2560, intermediate_size=10240, num_hidden_layers=32, num_attention_heads=32)
_PHI |= dict(num_key_value_heads=32, hidden_act="gelu_new", layer_norm_eps=1e-5, tie_word_embeddings=False)

# from the config.json of mistralai/Mistral-7B-v0.1, meta-llama/Meta-Llama-3-8B and microsoft/phi-2
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
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    ),
    "phi-2": dict(
        **_PHI,
        model_type="phi",
        vocab_size=51200,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4},
    ),
}
STAND_INS = {"mistral-small": "mistral-7b", "llama-small": "llama-3-8b", "phi-small": "phi-2"}
_SHRUNK = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
# layers, heads, channels
GPT2 = {"gpt2": (12, 12, 768), "gpt2-medium": (24, 16, 1024), "gpt2-large": (36, 20, 1280), "gpt2-xl": (48, 25, 1600)}
OURS = "ours, "  # begins the name of an attention that our own GPT computes, beside transformers' model
OUR_NAMES = {"eager": "manual"}  # our name for transformers' eager attention; flash has the same name in both
# the proof that both compute the same: layers, tokens, window, factor on the matrices, largest relative difference.
# Without the factor, random weights attend to all tokens almost alike, and wrong positions would pass
PROOF_LAYERS, PROOF_TOKENS, PROOF_WINDOW, PROOF_SCALE, PROVED = 2, 64, 24, 4, 1e-4


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
        # these weights do not multiply every token
        self.embeddings = [model.transformer.wte.weight, model.lm_head.weight]
        self.embeddings += [model.transformer.wpe.weight] if model.config.position == "learned" else []

    @classmethod
    def of_gpt2(cls, name: str, device: torch.device, dtype: torch.dtype) -> "OurGPT":
        """One of GPT-2's sizes with random weights, but with 2048 positions, so that prompts of 2048 fit."""
        n_layer, n_head, n_embd = GPT2[name]
        dimensions = dict(block_size=2048, vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        with torch.device(device):
            return cls(GPT(GPTConfig(**dimensions)).to(dtype), dtype)

    @classmethod
    def beside(cls, other: "TransformersModel") -> "OurGPT":
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
        return cls(model, other.dtype)

    def use(self, attention: str) -> None:
        """Compute attention by 'eager' or 'flash' from here on."""
        self.model.use_attention(OUR_NAMES.get(attention, attention))

    def generate(self, idx: torch.Tensor) -> None:
        """The timed call: prefill into a new cache, and the likeliest id."""
        self.model.generate(idx, 1, temperature=0)

    def compare(self, idx: torch.Tensor) -> dict[str, float]:
        """parity.compare of the current attention, for two heads of keys and a prompt like `idx` (1, T)."""
        return parity.compare(ATTENTION[self.model.config.attention], self.case(idx).of_heads(1, 2))

    def case(self, idx: torch.Tensor) -> Case:
        """The attention of the first layer for a prompt like `idx` (1, T)."""
        config = dataclasses.replace(self.model.config, block_size=idx.size(1))
        return Case.of_model(config, 1, idx.device, self.dtype, backward=False)


class TransformersModel:
    """A causal model from transformers: a published one, a stand-in, or one loaded by its name."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, **changes):
        from transformers import AutoModelForCausalLM

        if has_both(name):
            with torch.device(device):  # not on meta: to_empty would lose the rotary frequencies, which are buffers
                self.model = AutoModelForCausalLM.from_config(config(name, **changes), dtype=dtype)
        else:
            try:
                self.model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device)
            except Exception as error:  # a missing, damaged or foreign file can raise anything
                if out_of_memory(error):
                    raise
                raise UserError(f"cannot load {name!r}: {first_line(error)}") from error
        self.model.eval()
        c = self.model.config
        limits = (getattr(c, "max_position_embeddings", None), getattr(c, "sliding_window", None))
        self.max_length = min(filter(None, limits), default=float("inf"))
        self.output, self.dtype = self.model.get_output_embeddings(), dtype
        self.embeddings = [self.model.get_input_embeddings().weight, self.output.weight]

    def use(self, attention: str) -> None:
        """Compute attention by 'eager', 'flash' or 'flash_attention_2' from here on; UserError if the model cannot."""
        implementation = "sdpa" if attention == "flash" else attention
        try:
            self.model.set_attn_implementation(implementation)
        except (ValueError, ImportError) as error:
            raise UserError(first_line(error)) from error
        if self.model.config._attn_implementation != implementation:  # transformers may only warn
            raise UserError(f"{type(self.model).__name__} does not switch its attention to {implementation}")

    def case(self, idx: torch.Tensor) -> Case:
        """Attention to a prompt like `idx` (1, T), of one head: the profiler sees the same for all."""
        return Case((1, 1, idx.size(1), 1), idx.device, self.dtype, backward=False)

    def _flash_only(self):
        """A context in which SDPA uses its flash kernel and no other, if the model calls SDPA."""
        calls_sdpa = self.model.config._attn_implementation == "sdpa"
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if calls_sdpa else contextlib.nullcontext()

    def generate(self, idx: torch.Tensor) -> None:
        """The timed call: `generate` of one token, with the mask of ones that a tokenizer gives."""
        with self._flash_only():
            self.model.generate(
                idx, attention_mask=torch.ones_like(idx), max_new_tokens=1, do_sample=False, pad_token_id=0
            )

    def compare(self, idx: torch.Tensor) -> dict[str, float]:
        """parity.compare of the current attention, called as the model itself calls it for `idx` (1, T).

        The call has the model's mask and options, two heads of keys, and as many heads of queries to each as the model.
        Raises UserError if the model does not call attention through transformers' AttentionInterface.
        """
        calls = []
        with _listening(calls):
            self.generate(idx)
        if not calls:
            raise UserError(f"{type(self.model).__name__} has attention of its own, which cannot be compared")
        attend, module, (nh, nh_k, hs), mask, options = calls[0]
        groups = nh // nh_k

        def grouped(q, k, v, dropout_p=0.0):
            with self._flash_only():
                y, _ = attend(module, q.repeat_interleave(groups, dim=1), k, v, mask, **options)  # (1, T, nh, hs)
            return y.transpose(1, 2).unflatten(1, (-1, groups))[0].transpose(0, 1)  # (groups, 2, T, hs), all alike

        return parity.compare(grouped, Case((1, 2, idx.size(1), hs), idx.device, self.dtype, backward=False))


@contextlib.contextmanager
def _listening(calls):
    """Append (function, module, shape, mask, options) to `calls` when a transformers model calls attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as interfaces

    find = interfaces.get_interface

    def get_interface(name, default):
        attend = find(name, default)

        def call(module, q, k, v, mask, **options):
            calls.append((attend, module, (q.size(1), k.size(1), q.size(3)), mask, options))
            return attend(module, q, k, v, mask, **options)

        return call

    interfaces.get_interface = get_interface  # an attribute of the instance shadows the method
    try:
        yield
    finally:
        del interfaces.get_interface


_loaded = {}  # at most one model, with ours beside it: two at full size may not fit


def has_both(name: str) -> bool:
    """Whether the model `name` is there as transformers has it and as our own GPT."""
    return name in PUBLISHED or name in STAND_INS


def load(name: str, attention: str, seed: int, device: torch.device, dtype: torch.dtype) -> OurGPT | TransformersModel:
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
        if has_both(name):
            _prove(name, seed, device)
        determinism.seed(seed, "prefill")
        if name in GPT2:
            _loaded[key] = (OurGPT.of_gpt2(name, device, dtype),)
        else:
            theirs = TransformersModel(name, device, dtype)
            _loaded[key] = (theirs, OurGPT.beside(theirs)) if has_both(name) else (theirs,)
    return _loaded[key][attention.startswith(OURS)]


@torch.no_grad()
def _prove(name, seed, device):
    """Raise ParityError unless two layers of the model compute the same logits in float32 as ours do."""
    determinism.seed(seed, "prefill")
    window = {"sliding_window": PROOF_WINDOW} if config(name).to_dict().get("sliding_window") else {}
    theirs = TransformersModel(name, device, torch.float32, num_hidden_layers=PROOF_LAYERS, **window)
    theirs.model.set_attn_implementation("eager")
    for p in theirs.model.model.layers.parameters():
        if p.dim() == 2:
            p *= PROOF_SCALE
    ours, V = OurGPT.beside(theirs).model, theirs.model.config.vocab_size
    ours.use_attention("manual")
    x = torch.randint(V, (1, PROOF_TOKENS), generator=torch.Generator().manual_seed(seed)).to(device)
    want, got = theirs.model(x).logits, ours(x, x)[0]
    error = ((got - want).abs().max() / want.abs().max()).item()
    if not error <= PROVED:  # `not <=` catches NaN too
        raise ParityError(
            f"in float32, two layers of {name} have other logits here than in transformers: a difference of"
            f" {error:.1e}, allowed {PROVED:.0e}"
        )
