"""What defines a GPT besides its weights: `Dimensions`, the fields that Settings and GPTConfig share, and `GPTConfig`.

A field that you add here becomes a flag of train.py, reaches GPTConfig, and is saved with the weights. Code that
computes with these fields (counts, estimates, export) names those that it knows and refuses others (`require_known`).
"""

import dataclasses
import math
import typing
from typing import Any, Literal, Self

from fusedgpt.attention.table import check_name
from fusedgpt.errors import UserError

LOSSES = ("whole", "chunked")
CHUNKS = 8  # parts of a micro-batch in a chunked loss; more parts save memory but slow the matrix products
RECOMPUTE = ("none", "attention", "block")
# what makes a GPT a Llama, a Mistral, a Qwen or a Phi: docs/models.md
FAMILIES = ("position", "rope_theta", "rope_fraction", "rope_scaling", "rope_context", "norm", "norm_eps", "mlp")
FAMILIES += ("n_inner", "n_kv_head", "head_size", "qk_norm", "window", "window_pattern", "tie_embeddings")
FAMILIES += ("parallel_block", "attention_bias", "mlp_bias", "output_bias", "bigrams")
COUNTED = (*FAMILIES, "document_start")  # fields beyond GPT-2's that num_params and flops_per_token know
# the fields of GPT-2, which everything here knows
GPT2 = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "vocab_multiple", "activation")
IMPLEMENTATION = ("attention", "loss", "recompute")  # these change how a result is computed, but not the result
AT_LEAST_1 = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "vocab_multiple", "n_inner", "n_kv_head")
AT_LEAST_1 += ("head_size", "window", "rope_context", "rope_scaling", "bigrams")


@dataclasses.dataclass
class Dimensions:
    block_size: int = 1024  # context length in tokens
    vocab_size: int | None = None  # number of token ids; None: as many as the data's tokenizer has
    n_layer: int = 12  # layers
    n_head: int = 12  # attention heads
    n_embd: int = 768  # channels, the width of the model
    dropout: float = 0.0  # dropout probability; 0 is good for pretraining, 0.1 and more for fine-tuning
    bias: bool = False  # biases in linear layers and LayerNorms
    vocab_multiple: int = 64  # pad the vocabulary to a multiple of this: 64 turns 50257 ids into 50304, 1 does not pad
    # form of GELU; gelu_tanh: GPT-2's; gelu: exact, as in nanoGPT; None: as in the weights, gelu_tanh from scratch
    activation: Literal["gelu_tanh", "gelu"] | None = None
    # positions; learned: an embedding of each; rotary: queries and keys rotate with their position
    position: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10000.0  # rotary: base of the wavelengths, which go up to 2 pi times nearly this many tokens
    rope_fraction: float = 1.0  # rotary: share of a head's channels that rotate
    rope_scaling: float = 1.0  # rotary: stretch long wavelengths by this factor, as Llama 3.1 does; 1: none
    rope_context: int = 8192  # rope_scaling: stretch wavelengths beyond this many tokens, and none below a quarter
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalisation before each branch, and at the end
    norm_eps: float = 1e-5  # added to what a norm takes the root of
    mlp: Literal["gelu", "swiglu"] = "gelu"  # swiglu: three matrices, and a gate in place of GELU
    n_inner: int | None = None  # width inside the MLP; None: 4 n_embd
    n_kv_head: int | None = None  # heads of keys and values, each for n_head / n_kv_head queries; None: n_head
    head_size: int | None = None  # channels of a head; None: n_embd / n_head
    qk_norm: bool = False  # normalise each head's queries and keys
    window: int | None = None  # a token sees this many tokens, itself included; None: all earlier ones
    # window: S for a layer with the window, L for a layer without; repeated over the layers, such as SSSSSL
    window_pattern: str = "S"
    tie_embeddings: bool = True  # the output layer shares the weights of the token embedding
    parallel_block: bool = False  # attention and MLP side by side, on one norm, as in GPT-J and Phi
    attention_bias: bool | Literal["qkv"] | None = None  # biases in attention; qkv: not in its output; None: as bias
    mlp_bias: bool | None = None  # biases in the MLP; None: as bias
    output_bias: bool = False  # a bias in the output layer, as in Phi
    bigrams: int | None = None  # odd number of rows of an embedding of each token with the one before it; None: none

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_channels(self) -> int:
        """hs: the channels of a head."""
        return self.head_size or self.n_embd // self.n_head

    @property
    def windows(self) -> list[int | None]:
        """The window of each layer, or None."""
        letters = (self.window_pattern * self.n_layer)[: self.n_layer]
        return [self.window if letter == "S" else None for letter in letters]


NAMES = tuple(field.name for field in dataclasses.fields(Dimensions))


def unknown(config: Any, who: str, known: tuple[str, ...] = ()) -> str | None:
    """Why `who` cannot compute with `config`, a GPTConfig; None if it can.

    `who` names a part of the project. It knows GPT-2's fields and those in `known`; others must have their default.
    """
    for field in dataclasses.fields(config):
        name, value = field.name, getattr(config, field.name)
        if name not in (*GPT2, *IMPLEMENTATION, *known) and value != field.default:
            return f"{who} does not know {name}={value}: teach it the field, or leave {name}={field.default}"
    return None


def require_known(config: Any, who: str, known: tuple[str, ...] = ()) -> None:
    """Raise UserError if `who` cannot compute with `config` (see `unknown`)."""
    if why := unknown(config, who, known):
        raise UserError(why)


@dataclasses.dataclass
class GPTConfig(Dimensions):
    """The dimensions of a GPT. `vocab_size` ids can occur; the embedding has `padded_vocab_size` rows.

    Raises UserError (a ValueError) for dimensions that no model can have.
    """

    # nanoGPT's defaults for a model, which differ from those for a run
    vocab_size: int = 50304
    bias: bool = True  # in every LayerNorm and every linear layer but the output, as in GPT-2; False is a bit faster
    vocab_multiple: int = 1
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"  # gelu is nanoGPT's since May 2023
    attention: str = "sdpa"  # a kernel, or path/to/file.py:function; changes no weight
    loss: Literal[*LOSSES] = "whole"  # chunked: if logits=False, an eighth of the logits at a time; changes no weight
    # activation checkpointing (arXiv:1604.06174) of the inside of attention, or of each block; changes no result
    recompute: Literal[*RECOMPUTE] = "none"
    # attention within documents: this id begins a document, whose tokens see none of earlier documents; None: off
    document_start: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if typing.get_origin(field.type) is Literal and value not in (allowed := typing.get_args(field.type)):
                raise UserError(f"{name}={value!r} is unknown: it can be {', '.join(allowed)}")
            if name in AT_LEAST_1 and value is not None and not 1 <= value < math.inf:
                raise UserError(f"{name}={value} must be 1 or more, and finite")
            if name in ("rope_theta", "rope_fraction", "norm_eps") and not 0 < value < math.inf:
                raise UserError(f"{name}={value} must be more than 0, and finite")
            if name.startswith("rope_") and value != field.default and self.position != "rotary":
                raise UserError(f"{name}={value} has no effect with learned positions: set position=rotary too")
        if self.head_size is None and self.n_embd % self.n_head:
            how = "make it a multiple, or set head_size"
            raise UserError(f"n_embd={self.n_embd} cannot be split over n_head={self.n_head}: {how}")
        if self.n_head % self.kv_heads:
            raise UserError(f"n_head={self.n_head} cannot be split over n_kv_head={self.n_kv_head}: make it a multiple")
        if self.position == "rotary" and (self.rotated % 2 or not 0 < self.rotated <= self.head_channels):
            those = f"{self.rotated} of a head's {self.head_channels} channels"
            raise UserError(f"{those} would rotate, but they rotate in pairs: change head_size or rope_fraction")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise UserError(f"window_pattern={self.window_pattern!r} must have a letter S or L for each layer")
        check_name(self.attention)

    @classmethod
    def of(cls, s: Any, **changes: Any) -> Self:
        """The config of a model with the dimensions in the settings `s`, except for `changes`. None: the default."""
        found = {name: getattr(s, name) for name in NAMES} | changes
        return cls(**{name: value for name, value in found.items() if value is not None})

    @property
    def packed(self) -> bool:
        """Whether a sequence may hold several documents, and attention stays within each."""
        return self.document_start is not None

    @property
    def inner(self) -> int:
        """The width inside an MLP."""
        return self.n_inner or 4 * self.n_embd

    @property
    def rotated(self) -> int:
        """The channels of a head that rotate."""
        return int(self.head_channels * self.rope_fraction)

    @property
    def biases(self) -> dict[str, bool]:
        """Which linear layers have a bias: qkv, proj (attention's output), mlp and output."""
        attention = self.bias if self.attention_bias is None else self.attention_bias
        mlp = self.bias if self.mlp_bias is None else self.mlp_bias
        return {"qkv": bool(attention), "proj": attention is True, "mlp": mlp, "output": self.output_bias}

    @property
    def padded_vocab_size(self) -> int:
        """V: `vocab_size`, rounded up to a multiple of `vocab_multiple`."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def chunks(self) -> int:
        """The number of parts in which the logits of a micro-batch are computed, one at a time."""
        return CHUNKS if self.loss == "chunked" else 1

    @property
    def num_params(self) -> int:
        """Parameters of a GPT of this config, positions and padding included, without building it."""
        require_known(self, "GPTConfig.num_params (fusedgpt/dimensions.py)", COUNTED)
        C, hs, biases = self.n_embd, self.head_channels, self.biases
        of_norm = 1 + (self.bias and self.norm == "layernorm")  # vectors of a norm
        norms = of_norm * (C * (2 - self.parallel_block) + 2 * hs * self.qk_norm)
        in_attention = biases["qkv"] * (self.n_head + 2 * self.kv_heads) * hs + biases["proj"] * C
        in_mlp = biases["mlp"] * ((1 + (self.mlp == "swiglu")) * self.inner + C)
        blocks = self.n_layer * (self.block_matrices + in_attention + in_mlp + norms)
        output = self.padded_vocab_size * (C + self.output_bias)  # the output layer and, if untied, the embedding
        return self.looked_up + blocks + of_norm * C + output

    @property
    def block_matrices(self) -> int:
        """Parameters of the matrices of a block; the first is n_embd by all heads of queries, keys and values."""
        heads = 2 * self.n_head + 2 * self.kv_heads  # of queries, keys and values, and of attention's output
        return self.n_embd * (heads * self.head_channels + (2 + (self.mlp == "swiglu")) * self.inner)

    @property
    def looked_up(self) -> int:
        """Parameters of which a token reads a row and multiplies none: positions, an untied embedding, and bigrams."""
        rows = self.block_size * (self.position == "learned") + self.padded_vocab_size * (not self.tie_embeddings)
        return (rows + (self.bigrams or 0)) * self.n_embd

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: 6 N + 12 L nh hs T (PaLM, arXiv:2204.02311, appendix B), N without `looked_up`.

        Each weight costs a multiplication and an addition forward, and twice that backward. Attention is counted as if
        it were not causal, as nanoGPT and the PaLM paper do. In layers with a window, T is the window.
        """
        seen = sum(min(window or self.block_size, self.block_size) for window in self.windows)
        return 6 * (self.num_params - self.looked_up) + 12 * self.n_head * self.head_channels * seen
