"""Other projects' models behind one interface: transformers' causal models, and the GPT of a clone of nanoGPT.

B batch, T sequence, nh heads, hs head size.
"""

import contextlib
import importlib.util
import pathlib
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt.attention import parity
from fusedgpt.attention.case import Case
from fusedgpt.errors import UserError, first_line, out_of_memory
from fusedgpt.runs import checkpoint
from model import GPTConfig


class Transformers:
    """A causal model from transformers."""

    def __init__(self, model: nn.Module):
        self.model = model
        c = model.config
        limits = (getattr(c, "max_position_embeddings", None), getattr(c, "sliding_window", None))
        self.max_length = min(filter(None, limits), default=float("inf"))
        self.output, self.options, self.flash_only = model.get_output_embeddings(), {}, False
        self.ids = self.output.weight.size(0)

    @classmethod
    def loaded(cls, name: str, dtype: torch.dtype, device: torch.device) -> "Transformers":
        """A model of the Hugging Face hub or of a folder. Raises UserError if it cannot be loaded."""
        from transformers import AutoModelForCausalLM

        try:
            return cls(AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval())
        except Exception as error:  # a missing, damaged or foreign file can raise anything
            if out_of_memory(error):
                raise
            raise UserError(f"cannot load {name!r}: {first_line(error)}") from error

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
        """Compute attention by 'eager', 'flash' or 'flash_attention_2' from here on; UserError if the model cannot."""
        implementation = {"flash": "sdpa"}.get(attention, attention)
        try:
            self.model.set_attn_implementation(implementation)
        except (ValueError, ImportError) as error:
            raise UserError(first_line(error)) from error
        if self.model.config._attn_implementation != implementation:  # transformers may only warn
            raise UserError(f"{type(self.model).__name__} does not switch its attention to {implementation}")
        self.flash_only = attention == "flash"

    def _kernels(self):
        """A context in which SDPA uses its flash kernel and no other, if that was asked for."""
        return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if self.flash_only else contextlib.nullcontext()

    def case(self, idx: Tensor) -> Case:
        """Attention to a prompt like `idx` (1, T), of one head: the profiler sees the same for all."""
        return Case((1, 1, idx.size(1), 1), idx.device, self.output.weight.dtype, backward=False)

    def compare(self, idx: Tensor) -> dict[str, float]:
        """parity.compare of the current attention, called as the model itself calls it for `idx` (1, T).

        The call has the model's mask and options, two heads of keys, and as many heads of queries to each as the model.
        Raises UserError if the model does not call attention through transformers' AttentionInterface.
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
        if not calls:
            raise UserError(f"{type(self.model).__name__} has attention of its own, which cannot be compared")
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
        """A model with our weights `state`. Its softmax goes over all rows of the embedding, padding included.

        Raises UserError if the clone cannot build it.
        """
        if not config.tie_embeddings:
            raise UserError("nanoGPT's output layer has the weights of its embedding: leave tie_embeddings=True")
        self.ids = config.padded_vocab_size
        shape = {name: getattr(config, name) for name in checkpoint.NANOGPTS} | dict(vocab_size=self.ids, dropout=0.0)
        try:
            module = _imported(pathlib.Path(clone, "model.py"))
            self.model = module.GPT(module.GPTConfig(**shape))
            self.model.load_state_dict(state)
        except Exception as error:  # code of another project can raise anything
            if out_of_memory(error):
                raise
            name = type(error).__name__
            raise UserError(f"{clone} is no nanoGPT that this can build: {name}: {first_line(error)}") from error

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """The mean loss of the targets y for x; both are (B, T)."""
        return self.model(x, y)[1]

    def generate(self, idx: Tensor, new: int) -> Tensor:
        """`idx` (1, T) and the `new` likeliest ids after it."""
        return self.model.generate(idx, new, temperature=1.0, top_k=1)


def _imported(path: pathlib.Path) -> Any:
    spec = importlib.util.spec_from_file_location("nanogpts_model", path)
    # dataclasses look their module up in sys.modules
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True  # leave the clone as it is
    spec.loader.exec_module(module)
    return module
