"""GPT-2 and, by its config, Llama, Mistral, Qwen and Phi. Attention is a function of (q, k, v), chosen by name.

B batch, T tokens, Tk keys (T + cached), C = n_embd channels, nh heads (nkv of keys and values), hs head size, V padded
vocabulary. By default nkv = nh, hs = C / nh, and every switch of GPTConfig is GPT-2's: docs/models.md has the others.
Source: "Language Models are Unsupervised Multitask Learners" (GPT-2); module names are those of its release.
"""

import functools
import math
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fusedgpt import eager, loss, rotary
from fusedgpt.attention.functions import ATTENTION, make_ready
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, out_of_memory
from fusedgpt.generation import generate
from fusedgpt.interchange import pretrained
from fusedgpt.machine import determinism

FORMS = {"gelu_tanh": "tanh", "gelu": "none"}  # F.gelu's names of its forms


def _recomputed(function, *args):
    """Activation checkpointing: keep only `args`; the backward runs `function` again, with the same dropout."""
    return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)


def _norm(config, size):
    if config.norm == "rmsnorm":  # arXiv:1910.07467
        return nn.RMSNorm(size, eps=config.norm_eps)
    return nn.LayerNorm(size, eps=config.norm_eps, bias=config.bias)


class CausalSelfAttention(nn.Module):
    def __init__(self, config, window=None):
        super().__init__()
        nh, nkv, hs = config.n_head, config.kv_heads, config.head_channels
        # each token has queries, keys to compare queries with, and values to fetch: one product computes all three
        self.c_attn = nn.Linear(config.n_embd, (nh + 2 * nkv) * hs, bias=config.biases["qkv"])
        self.c_proj = nn.Linear(nh * hs, config.n_embd, bias=config.biases["proj"])
        self.resid_dropout = nn.Dropout(config.dropout)
        if config.qk_norm:  # arXiv:2302.05442
            self.q_norm, self.k_norm = _norm(config, hs), _norm(config, hs)
        self.heads, self.head_size, self.qk_norm = [nh, nkv, nkv], hs, config.qk_norm
        self.window, self.dropout = window, config.dropout
        self.attend = ATTENTION[config.attention]  # train.py and sample.py set theirs by GPT.use_attention
        self.recompute = config.recompute == "attention"

    def forward(self, x, cache=None, documents=None, rotation=None):
        """Each token gathers values from itself and earlier tokens: (B, T, C) to (B, T, C). Extends `cache`, if any.

        documents, (B, Tk): the number of each token's document; a token sees no other document. None: all are of one.
        rotation: of each token's position, as rotary.rotation returns it. None: positions are in x.
        """
        B, T, _ = x.shape
        qkv = self.c_attn(x).view(B, T, -1, self.head_size)  # (B, T, C) -> (B, T, nh + 2 nkv, hs)
        q, k, v = qkv.split(self.heads, dim=2)  # (B, T, nh, hs), and twice (B, T, nkv, hs)
        if self.qk_norm:  # in the dtype of its weights: PyTorch's fused RMSNorm wants its input in the same
            q, k = (norm(h.to(norm.weight.dtype)).to(h.dtype) for norm, h in ((self.q_norm, q), (self.k_norm, k)))
        if rotation is not None:
            q, k = rotary.rotate(q, rotation), rotary.rotate(k, rotation)  # shapes as before
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, nh or nkv, T, hs): a head is a batch of its own
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, nkv, Tk, hs): earlier keys first, in the cache's dtype
        masks, Tk = {}, k.size(2)
        if documents is not None:  # cut only if need be: flex keeps a mask for each tensor, and layers share this one
            masks["documents"] = documents if documents.size(1) == Tk else documents[:, -Tk:]  # (B, Tk)
        if self.window and Tk > self.window:
            masks["window"] = self.window
        attend = functools.partial(self.attend, **masks)
        # softmax(q kᵀ / √hs) v, over the keys up to each query's own position, in the dtype of the keys
        dropout = self.dropout if self.training else 0.0  # unlike nn.Dropout, SDPA would apply it in evaluation too
        inputs = q.to(k.dtype), k, v, dropout
        y = _recomputed(attend, *inputs) if self.recompute else attend(*inputs)  # (B, nh, T, hs)
        y = y.to(q.dtype).transpose(1, 2).flatten(2)  # (B, T, nh hs): the heads' channels side by side
        return self.resid_dropout(self.c_proj(y))  # (B, T, C), which the block adds to x


def _gelu(x, form):
    if form == "tanh" and torch.compiler.is_compiling():
        # the same function, because (1 + tanh u) / 2 = sigmoid(2 u); compiled for a CPU, tanh takes 2.4 times as long
        return x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    return F.gelu(x, approximate=form)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.inner, bias=config.biases["mlp"])
        if gated := config.mlp == "swiglu":  # arXiv:2002.05202
            self.c_gate = nn.Linear(config.n_embd, config.inner, bias=config.biases["mlp"])
        self.c_proj = nn.Linear(config.inner, config.n_embd, bias=config.biases["mlp"])
        self.dropout = nn.Dropout(config.dropout)
        self.gelu_form, self.gated = FORMS[config.activation], gated

    def forward(self, x):
        h = self.c_fc(x)  # (B, T, C) -> (B, T, inner), 4 C wide in GPT-2
        h = F.silu(self.c_gate(x)) * h if self.gated else _gelu(h, self.gelu_form)
        return self.dropout(self.c_proj(h))  # (B, T, C)


class Block(nn.Module):
    def __init__(self, config, window=None):
        super().__init__()
        self.ln_1 = _norm(config, config.n_embd)
        self.attn = CausalSelfAttention(config, window)
        self.ln_2 = None if config.parallel_block else _norm(config, config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x, *attention_inputs):
        """(B, T, C) to (B, T, C); takes what attention takes after x."""
        # pre-norm: each branch normalises its input; ln_f normalises the sum of all branches once, at the end
        normed = self.ln_1(x)
        attended = self.attn(normed, *attention_inputs)
        if self.ln_2 is None:  # parallel_block: both branches read the same (GPT-J)
            return x + attended + self.mlp(normed)
        x = x + attended  # (B, T, C)
        return x + self.mlp(self.ln_2(x))  # (B, T, C)


def _mask_padding(z, vocab_size):
    """Set the logits z (..., V) of ids from `vocab_size` on to -inf, in place, and return z."""
    V = z.size(-1)
    if vocab_size < V:
        padding = torch.arange(V, device=z.device) >= vocab_size
        z += torch.zeros(V, dtype=z.dtype, device=z.device).masked_fill(padding, float("-inf"))
    return z


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.init_seed = None  # the first init_weights draws it
        # the meta device has no storage: elsewhere PyTorch's initialisation would draw random numbers, and more of them
        # for a padded vocabulary, so that padding would change every other weight
        with torch.device("meta"):
            parts = {"wte": eager.embedding(config.padded_vocab_size, config.n_embd)}
            if config.position == "learned":
                parts["wpe"] = eager.embedding(config.block_size, config.n_embd)
            if config.bigrams:
                parts["wbe"] = eager.embedding(config.bigrams, config.n_embd)
            parts["drop"] = nn.Dropout(config.dropout)
            parts["h"] = nn.ModuleList(Block(config, window) for window in config.windows)
            self.transformer = nn.ModuleDict(parts | {"ln_f": _norm(config, config.n_embd)})
            self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.output_bias)
        eager.to_empty(self)
        self.tie_weights()  # after to_empty, which unties them
        self.init_weights()
        # not compiled: the compiler would reorder the chunks and then take more memory than all logits at once
        self.chunked_loss = torch.compiler.disable(loss.chunked) if config.loss == "chunked" else None
        if config.num_params != (built := self.get_num_params(non_embedding=False)):
            counted = f"GPTConfig.num_params counts {config.num_params:,} parameters, but this model has {built:,}"
            raise UserError(f"{counted}: mend the formula in fusedgpt/dimensions.py, on which all estimates rest")

    def tie_weights(self) -> None:
        """Let the output layer share the weights of the token embedding (arXiv:1608.05859), if the config says so."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self, part: nn.Module | None = None) -> None:
        """Initialise as GPT-2: normal, deviation 0.02, or 0.02 / √(2 n_layer) for each c_proj; biases 0.

        Each weight has random numbers of its own, from `init_seed` and its name: models of one torch.manual_seed have
        equal weights wherever their shapes are equal. Padding draws none. part: initialise only this module.
        """
        if self.init_seed is None:
            self.init_seed = torch.randint(2**62, (), device="cpu").item()
        own = set((part or self).parameters())
        for name, p in self.named_parameters():
            if p.is_meta or p not in own:
                continue
            numbers = torch.Generator(p.device).manual_seed(determinism.number(self.init_seed, name))
            if p.dim() < 2:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
            elif p is self.transformer.wte.weight or p is self.lm_head.weight:
                nn.init.normal_(p[: self.config.vocab_size], std=0.02, generator=numbers)
                nn.init.zeros_(p[self.config.vocab_size :])
            else:
                # 2 n_layer branches add up in the residual stream: shrunk, their variances sum to that of one branch
                shrink = math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, std=0.02 / shrink, generator=numbers)

    def forward(self, idx: Tensor, targets: Tensor | None = None, cache: list | None = None, logits: bool = True):
        """Returns logits (B, T, V) and the mean loss of `targets` (B, T); a target of -1 does not count.

        Without targets: logits of the last position only, (B, 1, V), and no loss. Ids that only pad the vocabulary have
        logit -inf: they get probability 0, learn nothing and are never sampled.
        cache: from generate.new_cache, one for each layer; the keys and values of the tokens before `idx`.
        logits: whether to return logits beside a loss. Training needs none: they would stay in memory, and a compiled
        backward would go through their gradient, all zeros.
        """
        T, past = idx.size(1), cache[0].length if cache else 0
        if past + T > self.config.block_size:
            raise UserError(f"{past + T} tokens are more than block_size={self.config.block_size}: crop the input")
        pos = cache[0].positions(T, idx.device) if cache else torch.arange(T, device=idx.device)
        ids, start, rows = idx, self.config.document_start, self.config.bigrams
        if cache and (rows or start is not None):
            ids = cache[0].extend_ids(idx)
        x, rotation = self.transformer.wte(idx), None  # (B, T, C)
        if rows:  # arXiv:2501.16975; the first token of a text or document has itself before it
            before = ids[:, (pos - 1).clamp(min=0)]  # (B, T)
            if start is not None:
                before = before.where(idx != start, idx)
            x = x + self.transformer.wbe((before * self.config.vocab_size + idx) % rows)
        if self.config.position == "learned":
            x = x + self.transformer.wpe(pos)
        else:
            rotation = rotary.rotation(pos, self.config)
        x = self.transformer.drop(x)
        documents = None if start is None else (ids == start).cumsum(dim=-1)  # (B, Tk): their numbers
        recompute = self.config.recompute == "block" and not cache
        for layer, block in enumerate(self.transformer.h):
            inputs = x, cache[layer] if cache else None, documents, rotation
            x = _recomputed(block, *inputs) if recompute else block(*inputs)
        x = self.transformer.ln_f(x)
        if targets is None:
            # generation needs only the last position, and lm_head is the widest matrix product
            return _mask_padding(self.lm_head(x[:, -1:]), self.config.vocab_size), None
        if self.chunked_loss and not logits:
            return None, self.chunked_loss(x, targets, self.lm_head.weight, self.config.vocab_size, self.lm_head.bias)
        z = self.lm_head(x)  # (B, T, V)
        mean = loss.whole(z, targets, self.config.vocab_size)
        return (_mask_padding(z, self.config.vocab_size) if logits else None), mean

    def use_attention(self, name: str) -> None:
        """From now on, compute attention with ATTENTION[name]. No weight changes."""
        make_ready(name)
        self.config = replace(self.config, attention=name)
        for block in self.transformer.h:
            block.attn.attend = ATTENTION[name]

    @torch.no_grad()
    def attention_weights(self, idx: Tensor) -> Tensor:
        """Each query's weights of the keys in `idx` (1, T): (n_layer, nh, T, T). Call eval() first, against dropout."""
        found, manual = [], ATTENTION["manual"]

        def look(q, k, v, dropout_p=0.0, **masks):
            # attention returns the values' weighted mean: of the rows of an identity matrix, that is the weights
            rows = torch.eye(k.size(2), dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            found.append(manual(q, k, rows, **masks)[0])
            return manual(q, k, v, **masks)

        for block in self.transformer.h:
            block.attn.attend = look
        self(idx)
        self.use_attention(self.config.attention)
        return torch.stack(found)

    def get_num_params(self, non_embedding: bool = True) -> int:
        """The number of parameters. `non_embedding` leaves out embeddings that are only looked up."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.config.looked_up if non_embedding else n

    def estimate_mfu(self, fwdbwd_per_iter: int, dt: float) -> float:
        """Fraction of an A100's 312 TFLOP/s if `fwdbwd_per_iter` sequences take `dt` seconds (nanoGPT's convention)."""
        return self.config.flops_per_token * self.config.block_size * fwdbwd_per_iter / dt / 312e12

    def crop_block_size(self, block_size: int) -> None:
        """Drop the positions from `block_size` on. Raises UserError if the model has fewer."""
        if block_size > self.config.block_size:
            raise UserError(f"block_size={block_size} is more than the model's {self.config.block_size} positions")
        self.config = replace(self.config, block_size=block_size)
        if self.config.position == "learned":
            self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())

    def configure_optimizers(self, weight_decay: float, learning_rate: float, betas: tuple, device_type: str):
        """AdamW in two groups: weight decay for matrices and embeddings, none for biases and LayerNorm."""
        # decay pulls weights towards 0: a matrix learns to do without the ones that it does not need, but a LayerNorm's
        # gain belongs near 1 and a bias wherever the data puts it
        params = [p for p in self.parameters() if p.requires_grad]
        matrices, vectors = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        # fused: one kernel updates all parameters, instead of several small kernels for each
        return eager.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ("cuda", "cpu", "mps"))

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None) -> Tensor:
        """`idx` (B, T) with `max_new_tokens` ids appended, drawn as fusedgpt/generation/generate.py says."""
        return torch.cat([idx, *generate.new_tokens(self, idx, max_new_tokens, temperature, top_k)], dim=1)

    @classmethod
    def from_checkpoint(cls, saved: dict, **changes) -> Self:
        """The model in a checkpoint, `saved` (runs/checkpoint.py), with `changes` to its config, such as dropout.

        If ranks read the weights later, saved["model"] is empty, and the model stays on PyTorch's meta device.
        Raises UserError if its weights and its config do not fit each other.
        """
        try:
            model = cls(GPTConfig(**{**saved["model_args"], **saved["extra_model_args"], **changes}))
            if saved["model"]:  # on the meta device, the model takes over these tensors, which are not read yet
                model.load_state_dict(saved["model"], assign=model.lm_head.weight.is_meta)
                model.tie_weights()
        except (ArithmeticError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            if out_of_memory(error):
                raise
            fit = "the checkpoint's weights and model_args do not fit each other"
            raise UserError(f"{fit}: {error}. Take another checkpoint") from error
        return model

    @classmethod
    def from_pretrained(cls, model_type, override_args: dict | None = None, dtype=torch.float32) -> Self:
        """A GPT with pretrained weights. model_type: an id on the hub, such as gpt2-xl, or a folder in that format.

        `override_args` may set the fields in pretrained.OVERRIDES.
        """
        config, weights = pretrained.load(model_type, override_args or {})
        with torch.device("meta"):
            model = cls(config).to(dtype)
        pretrained.fill(model, weights)
        return model
