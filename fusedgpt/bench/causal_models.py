"""The models of the prefill benchmark: one interface to our GPT and to causal models from transformers.

Mistral-7B, Llama-3-8B and Phi-2 are built offline as published, with random weights. Their stand-ins for a CPU have an
eighth of the width, heads and layers, so that head size and grouping stay the same. The other models are our own GPT in
GPT-2's sizes, and any causal model that transformers loads.

B = 1, T prompt tokens, nh heads, hs head size, V vocabulary.
"""

import contextlib
import copy
import gc

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.generation.generate import cache_dtype
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
OUR_NAMES = {"eager": "manual"}  # our name for transformers' eager attention; flash has the same name in both


def config(name: str):
    """The config of a published model or its stand-in; a new one for each call, because models keep and change it."""
    from transformers import AutoConfig

    fields = copy.deepcopy(PUBLISHED[STAND_INS.get(name, name)])
    if name in STAND_INS:
        fields |= {key: fields[key] // 8 for key in _SHRUNK}
    return AutoConfig.for_model(**fields)


class OurGPT:
    """Our GPT with random weights, in one of GPT-2's sizes but with 2048 positions, so that prompts of 2048 fit."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype):
        n_layer, n_head, n_embd = GPT2[name]
        dimensions = dict(block_size=2048, vocab_size=50257, n_layer=n_layer, n_head=n_head, n_embd=n_embd)
        with torch.device(device):
            self.model = GPT(GPTConfig(**dimensions)).to(dtype).eval()
        self.output, self.dtype, self.max_length = self.model.lm_head, dtype, self.model.config.block_size
        # these weights do not multiply every token
        self.embeddings = [self.model.transformer.wte.weight, self.model.transformer.wpe.weight, self.output.weight]

    def use(self, attention: str) -> None:
        """Compute attention by 'eager' or 'flash' from here on."""
        self.model.use_attention(OUR_NAMES.get(attention, attention))

    def generate(self, idx: torch.Tensor) -> None:
        """The timed call: prefill into a new cache, and the likeliest id."""
        self.model.generate(idx, 1, temperature=0)

    def compare(self, idx: torch.Tensor) -> dict[str, float]:
        """parity.compare of the current attention, for two heads of a prompt like `idx` (1, T)."""
        c = self.model.config
        dtype = cache_dtype(idx.device, self.dtype)  # attention is computed in the dtype of the cache
        case = Case((1, 2, idx.size(1), c.n_embd // c.n_head), idx.device, dtype, backward=False)
        return parity.compare(ATTENTION[c.attention], case)


class TransformersModel:
    """A causal model from transformers: a published one, a stand-in, or one loaded by its name."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype):
        from transformers import AutoModelForCausalLM

        if name in PUBLISHED or name in STAND_INS:
            with torch.device(device):  # not on meta: to_empty would lose the rotary frequencies, which are buffers
                self.model = AutoModelForCausalLM.from_config(config(name), dtype=dtype)
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


_loaded = {}  # at most one model: two at full size may not fit


def load(name: str, seed: int, device: torch.device, dtype: torch.dtype) -> OurGPT | TransformersModel:
    """The model `name`, kept until another one is asked for. The old model is freed before the new one is built."""
    key = (name, seed, device, dtype)
    if key not in _loaded:
        _loaded.clear()
        gc.collect()  # modules refer to each other in cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()
        determinism.seed(seed, "prefill")
        _loaded[key] = (OurGPT if name in GPT2 else TransformersModel)(name, device, dtype)
    return _loaded[key]
