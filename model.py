"""GPT-2. Its attention is one function of (q, k, v), chosen by name from fusedgpt/attention.py.

B batch, T tokens, Tk keys (T + cached), C = n_embd channels, nh heads, hs = C / nh head size, V padded vocabulary.
Source: "Language Models are Unsupervised Multitask Learners" (GPT-2); module names are those of its release.
"""

import functools
import math
import os
import pathlib
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedgpt import generate
from fusedgpt.attention import ATTENTION, make_ready
from fusedgpt.errors import UserError, first_line, out_of_memory

# F.gelu's name for each activation, and transformers' names; to_transformers writes the first of these
ACTIVATIONS = {"gelu_tanh": "tanh", "gelu": "none"}
TRANSFORMERS_ACTIVATIONS = {"gelu_tanh": ("gelu_new", "gelu_pytorch_tanh"), "gelu": ("gelu",)}
LOSSES = ("whole", "chunked")
RECOMPUTE = ("none", "attention", "block")
OVERRIDES = ("dropout", "attention", "activation", "loss", "recompute", "vocab_multiple")  # weights do not decide these
LARGEST_CONFIG = 2**20  # bytes; a larger config.json is refused
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks that older files store beside the weights
CHUNKS = 8  # loss=chunked splits a micro-batch into this many: more save memory but slow the matrix products
# linear layers that transformers' GPT-2 stores transposed, because OpenAI's code had them as 1-D convolutions
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


@dataclass
class GPTConfig:
    """The dimensions of a GPT. `vocab_size` ids can occur; the embedding has `padded_vocab_size` rows.

    Raises UserError (a ValueError) if a size is below 1, n_head does not divide n_embd, or a name is unknown.
    """

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in every LayerNorm and every linear layer but the output, as in GPT-2; False is a bit faster
    vocab_multiple: int = 1  # pad the embedding to a multiple of this many rows: 64 turns 50257 into 50304
    attention: str = "sdpa"  # a name from ATTENTION; changes no weight
    activation: str = "gelu_tanh"  # GPT-2's tanh form of GELU; gelu is the exact form, nanoGPT's since May 2023
    loss: str = "whole"  # chunked: if logits=False, compute an eighth of the logits at a time; changes no weight
    # activation checkpointing (arXiv:1604.06174); changes no result. attention: the backward computes attention's inner
    # tensors again; block: it computes all of a block again from the block's input
    recompute: str = "none"

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "vocab_multiple"):
            if not getattr(self, name) >= 1:
                raise UserError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} cannot be split over n_head={self.n_head}: make it a multiple")
        names = {"attention": ATTENTION, "activation": ACTIVATIONS, "loss": LOSSES, "recompute": RECOMPUTE}
        for name, allowed in names.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name}={getattr(self, name)!r} is unknown: it can be {', '.join(allowed)}")

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
        C, biases = self.n_embd, self.bias * self.n_embd
        layer_norm = C + biases
        block = 12 * C * C + 9 * biases + 2 * layer_norm  # C to 3 C, C to C, C to 4 C, 4 C to C
        return (self.padded_vocab_size + self.block_size) * C + self.n_layer * block + layer_norm


def _again(function, *args):
    """Call function(*args), but keep only `args`: the backward computes the rest again, with the same dropout."""
    return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout
        self.attend = ATTENTION[config.attention]
        self.recompute = config.recompute == "attention"

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, nh, Tk, hs): earlier keys first, in the cache's dtype
        # SDPA applies the dropout that it is given even in evaluation, unlike nn.Dropout
        inputs = q.to(k.dtype), k, v, self.dropout if self.training else 0.0
        y = (_again(self.attend, *inputs) if self.recompute else self.attend(*inputs)).to(q.dtype)  # (B, nh, T, hs)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))  # (B, T, C)


def _gelu(x, form):
    if form == "tanh" and torch.compiler.is_compiling():
        # the same function, because (1 + tanh u) / 2 = sigmoid(2 u); compiled for a CPU, tanh takes 2.4 times as long
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate=form)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.gelu_form = ACTIVATIONS[config.activation]

    def forward(self, x):
        return self.dropout(self.c_proj(_gelu(self.c_fc(x), self.gelu_form)))  # (B, T, C) -> (B, T, 4 C) -> (B, T, C)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        # "pre-norm": each branch normalises its input, and the residual stream runs from embedding to ln_f untouched
        x = x + self.attn(self.ln_1(x), cache)  # (B, T, C)
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


def _without_padding(z, vocab_size):
    """Logits z (..., V), with -inf added in place from `vocab_size` on."""
    V = z.size(-1)
    if vocab_size < V:
        padding = torch.arange(V, device=z.device) >= vocab_size
        z += torch.zeros(V, dtype=z.dtype, device=z.device).masked_fill(padding, float("-inf"))
    return z


def _loss(z, targets, vocab_size, reduction="mean"):
    """The loss of `targets` (B, T) or (N,) under the first `vocab_size` of the logits z, (B, T, V) or (N, V).

    Compiled, this makes no pass over the padding. Adding -inf to the padding instead takes a tenth longer: 317 ms
    in place of 289 for the output layer of 124M, forward and backward over 1024 tokens on a CPU.
    """
    z = z[..., :vocab_size]
    return F.cross_entropy(z.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction=reduction)


def _chunked_loss(x, targets, weight, vocab_size):
    """The mean loss of `targets` (B, T) after x (B, T, C). Computes the logits of one chunk of tokens at a time.

    A chunk's logits are freed after its forward and computed again in its backward. PyTorch 2.13's linear_cross_entropy
    is no substitute: it rounds the loss to bfloat16, and on a CPU it takes more time and memory than all logits do.
    """

    def summed(x, y, weight):
        return _loss(F.linear(x, weight), y, vocab_size, reduction="sum")

    if torch.is_autocast_enabled(x.device.type):  # cast once: autocast would do it again in each chunk's backward
        weight = weight.to(torch.get_autocast_dtype(x.device.type))
    chunks = zip(x.flatten(0, 1).chunk(CHUNKS), targets.flatten().chunk(CHUNKS))
    once_more = functools.partial(checkpoint, summed, use_reentrant=False, preserve_rng_state=False)
    return sum(once_more(x, y, weight) for x, y in chunks) / (targets >= 0).sum()


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        # build on the meta device, which has no storage. On a real device PyTorch's default initialisation would draw
        # random numbers, and more of them for a padded vocabulary, so that padding would change every other weight
        with torch.device("meta"):
            self.transformer = nn.ModuleDict(
                {
                    "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                    "wpe": nn.Embedding(config.block_size, config.n_embd),
                    "drop": nn.Dropout(config.dropout),
                    "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                    "ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),
                }
            )
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.lm_head.weight = self.transformer.wte.weight  # tie weights (arXiv:1608.05859) after to_empty, which unties
        self.init_weights()
        # not compiled: a compiler would reorder the chunks and then hold more memory than all logits take
        self.chunked_loss = torch.compiler.disable(_chunked_loss) if config.loss == "chunked" else None

    @torch.no_grad()
    def init_weights(self, part: nn.Module | None = None) -> None:
        """Initialise as GPT-2: normal with deviation 0.02, into the residual stream 0.02 / √(2 n_layer); biases 0.

        Padding draws no random numbers, so every other weight is the same with and without it. `part` limits this to
        one module: wte, wpe and the blocks, drawn one by one in this order, get the same numbers as all at once.
        """
        for name, p in (self if part is None else part).named_parameters():
            if p.dim() < 2:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
            elif p is self.transformer.wte.weight:
                nn.init.normal_(p[: self.config.vocab_size], std=0.02)
                nn.init.zeros_(p[self.config.vocab_size :])
            else:
                # 2 n_layer branches add up in the residual stream: their variances should sum to that of one
                shrink = math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, std=0.02 / shrink)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        cache: list[generate.LayerCache] | None = None,
        logits: bool = True,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Logits (B, T, V) and the mean loss of `targets` (B, T), where -1 does not count.

        Without targets: logits of the last position only, (B, 1, V), and no loss. Ids that only pad the vocabulary have
        logit -inf: they get probability 0, learn nothing and are never sampled. `cache` (generate.new_cache) holds the
        keys and values of the tokens before `idx`. logits=False returns (None, loss): returned logits would stay in
        memory, and a compiled backward would read a gradient of them. Raises UserError past block_size.
        """
        T, past = idx.size(1), cache[0].length if cache else 0
        if past + T > self.config.block_size:
            raise UserError(f"{past + T} tokens are more than block_size={self.config.block_size}: crop the input")
        pos = cache[0].positions(T, idx.device) if cache else torch.arange(T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        for layer, block in enumerate(self.transformer.h):
            past_of_layer = cache[layer] if cache else None
            x = _again(block, x) if self.config.recompute == "block" and not cache else block(x, past_of_layer)
        x = self.transformer.ln_f(x)
        if targets is None:
            # generation needs only the last position, and lm_head is the widest matrix product
            return _without_padding(self.lm_head(x[:, -1:]), self.config.vocab_size), None
        if self.chunked_loss and not logits:
            return None, self.chunked_loss(x, targets, self.lm_head.weight, self.config.vocab_size)
        z = self.lm_head(x)
        loss = _loss(z, targets, self.config.vocab_size)
        return (_without_padding(z, self.config.vocab_size) if logits else None), loss

    def use_attention(self, name: str) -> None:
        """Compute attention by another function of ATTENTION from here on. No weight changes."""
        make_ready(name)
        self.config = replace(self.config, attention=name)
        for block in self.transformer.h:
            block.attn.attend = ATTENTION[name]

    def get_num_params(self, non_embedding: bool = True) -> int:
        """The number of parameters. `non_embedding` leaves out wpe but not wte, which is the output layer too."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def flops_per_token(self) -> int:
        """Forward and backward: 6 N + 12 L C T (PaLM, arXiv:2204.02311, appendix B), L layers, N = get_num_params().

        Each weight costs a multiplication and an addition forward, and twice that backward, for the gradients of its
        input and of itself. Attention is counted as if it were not causal, as nanoGPT and the PaLM paper do.
        """
        c = self.config
        return 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size

    def estimate_mfu(self, fwdbwd_per_iter: int, dt: float) -> float:
        """Fraction of an A100's 312 TFLOP/s if `fwdbwd_per_iter` sequences take `dt` seconds (nanoGPT's convention)."""
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / 312e12

    def crop_block_size(self, block_size: int) -> None:
        """Drop the positions from `block_size` on. Raises UserError if the model has fewer."""
        if block_size > self.config.block_size:
            raise UserError(f"block_size={block_size} is more than the model's {self.config.block_size} positions")
        self.config = replace(self.config, block_size=block_size)
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())

    def configure_optimizers(
        self, weight_decay: float, learning_rate: float, betas: tuple[float, float], device_type: str
    ) -> torch.optim.AdamW:
        """AdamW in two groups: weight decay for matrices and embeddings, none for biases and LayerNorm."""
        # decay pulls weights towards 0: a matrix learns to do without the ones that it does not need, but a LayerNorm's
        # gain belongs near 1 and a bias wherever the data puts it
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        # fused: one kernel updates all parameters, in place of several small ones for each
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ("cuda", "cpu"))

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """`idx` (B, T) with `max_new_tokens` ids appended, drawn as fusedgpt/generate.py says."""
        return torch.cat([idx, *generate.new_tokens(self, idx, max_new_tokens, temperature, top_k)], dim=1)

    @classmethod
    def from_checkpoint(cls, saved: dict, **changes) -> Self:
        """The model in a checkpoint, `saved` (checkpoint.load), with `changes` to its config, such as dropout.

        On PyTorch's meta device, weights that `saved` lacks have no storage.
        Raises UserError if its weights and its config do not fit each other.
        """
        try:
            config = GPTConfig(**{**saved["model_args"], **saved["extra_model_args"], **changes})
            held = sum(w.numel() for name, w in saved["model"].items() if name != "lm_head.weight")  # tied to wte
            if saved["model"] and config.num_params != held:  # before building a model that may not fit into memory
                raise ValueError(f"model_args mean {config.num_params:,} parameters, but the weights have {held:,}")
            model = cls(config)
            if saved["model"]:  # on the meta device, the model takes over these tensors, which are not read yet
                model.load_state_dict(saved["model"], assign=model.lm_head.weight.is_meta)
                model.lm_head.weight = model.transformer.wte.weight
        except (ArithmeticError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            raise UserError(
                f"the checkpoint's weights and model_args do not fit each other: {error}. Take another checkpoint"
            ) from error
        return model

    @classmethod
    def from_pretrained(cls, model_type: str | os.PathLike, override_args: dict | None = None) -> Self:
        """A model with the weights of a GPT-2: its id on the hub, such as gpt2 or gpt2-xl, or a folder in that format.

        `override_args` may set what is in OVERRIDES. Raises UserError if it sets more, if the folder holds another
        architecture, or if the weights cannot be loaded.
        """
        override_args = override_args or {}
        if unknown := override_args.keys() - set(OVERRIDES):
            raise UserError(
                f"override_args={override_args} may set {', '.join(OVERRIDES)}, not"
                f" {', '.join(sorted(unknown))}: the weights decide that (model.crop_block_size shortens block_size)"
            )
        theirs = load_transformers(model_type)
        config = GPTConfig(**_config_of(theirs.config, model_type) | override_args)
        model, state = cls(config), theirs.state_dict()
        if bad := [name for name, w in state.items() if not w.sum().isfinite()]:
            raise UserError(f"init_from={str(model_type)!r} has weights that are not finite: {bad[0]}. Name another")
        with torch.no_grad():
            for name, p in model.named_parameters():
                w = state[name].t() if name.endswith(CONV1D) else state[name]
                # rows beyond vocab_size are padding and stay 0
                p[: config.vocab_size if name == "transformer.wte.weight" else None] = w
        return model


def load_transformers(model_type: str | os.PathLike):
    """A GPT2LMHeadModel in float32, by hub id or from a local folder; no code of that folder runs.

    Raises UserError if it cannot be loaded, or is no GPT-2, or if its weights are not those that its config asks for.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, logging
    from transformers.utils import cached_file

    logging.disable_progress_bar()  # one progress bar per rank would garble the log
    # a config could name an implementation of attention on the hub, which would be downloaded and run
    how = dict(dtype=torch.float32, attn_implementation="eager", trust_remote_code=False, output_loading_info=True)
    try:
        if not (file := cached_file(model_type, "config.json")):
            raise ValueError("it has no config.json")
        if (size := os.path.getsize(file)) > LARGEST_CONFIG:
            raise ValueError(f"its config.json has {size:,} bytes, but a GPT-2's has about a thousand")
        theirs = GPT2Config.from_pretrained(model_type)
        _require_room(GPTConfig(**_config_of(theirs, model_type)), model_type)
        model, found = GPT2LMHeadModel.from_pretrained(model_type, config=theirs, **how)
        lacking = sorted(found["missing_keys"])
        foreign = sorted(name for name in found["unexpected_keys"] if not name.endswith(MASKS))
        if lacking or foreign:  # transformers would draw or drop them in silence
            what = f"lack {lacking[0]}" if lacking else f"have {foreign[0]} too"
            raise ValueError(f"its weights are not those of its config: they {what}")
    except UserError:
        raise
    except Exception as error:  # a missing, damaged or foreign file can raise anything
        why = first_line(error)
        why = "its weights have other shapes than its config asks for" if "mismatched" in why else why
        raise UserError(
            f"init_from={str(model_type)!r} is no GPT-2 that can be loaded, from the hub or a folder: {why:.300}."
            " Without a network, name a folder"
        ) from error
    return model


def _require_room(config, model_type):
    """Raise ValueError if a folder's files are too small for the weights of `config`, at 2 bytes or more each.

    transformers builds whatever a config asks for, and fills what the files lack.
    """
    folder, count = pathlib.Path(model_type), config.num_params
    files = [file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind) if file.is_file()]
    held = sum(file.stat().st_size for file in files)
    if folder.is_dir() and held < 2 * count:
        raise ValueError(f"its config means {count:,} weights, but its .safetensors and .bin have {held:,} bytes")


def to_transformers(config: GPTConfig, state: dict[str, Tensor], **changes):
    """A GPT2LMHeadModel that computes what a GPT of `config` and `state` does, with `changes` to its GPT2Config.

    Vocabulary padding is stripped, and biases that the GPT does not have are zeros.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, logging

    logging.disable_progress_bar()
    own = dict(
        vocab_size=config.vocab_size,
        n_positions=config.block_size,
        n_layer=config.n_layer,
        n_head=config.n_head,
        n_embd=config.n_embd,
        activation_function=TRANSFORMERS_ACTIVATIONS[config.activation][0],
        bos_token_id=None,  # GPT-2's, by default
        eos_token_id=None,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
    )
    theirs = GPT2LMHeadModel(GPT2Config(**own | changes))
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            w = state.get(name, torch.zeros_like(p))
            w = w[: config.vocab_size] if name == "transformer.wte.weight" else w
            p.copy_(w.t() if name.endswith(CONV1D) else w)
    return theirs


def _config_of(c, model_type):
    """The fields of GPTConfig for `c`, the GPT2Config of transformers. Raises UserError if it is no OpenAI GPT-2."""
    named = {name: ours for ours, names in TRANSFORMERS_ACTIVATIONS.items() for name in names}
    openais = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    openais |= {"scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True}
    found = {name: getattr(c, name) for name in openais} | {"n_inner": c.n_inner or 4 * c.n_embd}
    openais["n_inner"] = 4 * c.n_embd
    other = [f"{name}={found[name]} and not {value}" for name, value in openais.items() if found[name] != value]
    if getattr(c, "quantization_config", None):
        other.append("quantized weights")
    if c.activation_function not in named:
        other.append(f"activation_function={c.activation_function} and not {', '.join(named)}")
    if other:
        raise UserError(f"{model_type} is no GPT-2 as OpenAI built it: it has {'; '.join(other)}. Name another model")
    dimensions = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd, block_size=c.n_positions)
    return {**dimensions, "vocab_size": c.vocab_size, "activation": named[c.activation_function]}
