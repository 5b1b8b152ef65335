"""What defines a GPT besides its weights: `Dimensions`, the fields that Settings and GPTConfig share, and `GPTConfig`.

A field that you add here becomes a flag of train.py, reaches GPTConfig, and is saved with the weights. Code that
computes with these fields (counts, estimates, export) names those that it knows and refuses others (`require_known`).
"""

import dataclasses
from typing import Any, Literal, Self

from fusedgpt.attention.table import check_name
from fusedgpt.errors import UserError

ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}  # F.gelu's name for each
LOSSES = ("whole", "chunked")
CHUNKS = 8  # parts of a micro-batch in a chunked loss; more parts save memory but slow the matrix products
RECOMPUTE = ("none", "attention", "block")
# weights do not decide these
OVERRIDES = ("dropout", "attention", "activation", "loss", "recompute", "vocab_multiple", "document_start")
COUNTED = ("document_start",)  # fields beyond GPT-2's that num_params and GPT.flops_per_token know
# the fields of GPT-2, which everything here knows
GPT2 = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "dropout", "bias", "vocab_multiple", "activation")
IMPLEMENTATION = ("attention", "loss", "recompute")  # these change how a result is computed, but not the result


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


NAMES = tuple(field.name for field in dataclasses.fields(Dimensions))


def unknown(config: Any, who: str, known: tuple[str, ...] = ()) -> str | None:
    """Why `who` cannot compute with `config`, a GPTConfig; None if it can.

    `who` names a part of the project. It knows GPT-2's fields and those in `known`; others must have their default.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in (*GPT2, *IMPLEMENTATION, *known) and value != field.default:
            return (
                f"{who} does not know {field.name}={value}: teach it the field, or leave {field.name}={field.default}"
            )
    return None


def require_known(config: Any, who: str, known: tuple[str, ...] = ()) -> None:
    """Raise UserError if `who` cannot compute with `config` (see `unknown`)."""
    if why := unknown(config, who, known):
        raise UserError(why)


@dataclasses.dataclass
class GPTConfig(Dimensions):
    """The dimensions of a GPT. `vocab_size` ids can occur; the embedding has `padded_vocab_size` rows.

    Raises UserError (a ValueError) if a size is below 1, n_head does not divide n_embd, or a name is unknown.
    """

    # nanoGPT's defaults for a model, which differ from those for a run
    vocab_size: int = 50304
    bias: bool = True  # in every LayerNorm and every linear layer but the output, as in GPT-2; False is a bit faster
    vocab_multiple: int = 1
    activation: str = "gelu_tanh"  # GPT-2's tanh form of GELU; gelu is the exact form, nanoGPT's since May 2023
    attention: str = "sdpa"  # a kernel, or path/to/file.py:function; changes no weight
    loss: str = "whole"  # chunked: if logits=False, compute an eighth of the logits at a time; changes no weight
    # activation checkpointing (arXiv:1604.06174); changes no result. attention: the backward computes attention's inner
    # tensors again; block: it computes all of a block again from the block's input
    recompute: str = "none"
    # attention within documents: this id begins a document, whose tokens see none of earlier documents; None: off
    document_start: int | None = None

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "vocab_multiple"):
            if not getattr(self, name) >= 1:
                raise UserError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} cannot be split over n_head={self.n_head}: make it a multiple")
        start = self.document_start
        if start is not None and not (type(start) is int and 0 <= start < self.vocab_size):
            raise UserError(
                f"document_start={start!r}, the id between documents for mask=document, must be a whole number from 0"
                f" to {self.vocab_size - 1}, below vocab_size"
            )
        names = {"activation": ACTIVATIONS, "loss": LOSSES, "recompute": RECOMPUTE}
        for name, allowed in names.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r} is unknown: it can be {', '.join(allowed)}")
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
        C, biases = self.n_embd, self.bias * self.n_embd
        layer_norm = C + biases
        block = 12 * C * C + 9 * biases + 2 * layer_norm  # C to 3 C, C to C, C to 4 C, 4 C to C
        return (self.padded_vocab_size + self.block_size) * C + self.n_layer * block + layer_norm
