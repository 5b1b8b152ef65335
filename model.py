"""GPT-2. Its attention is one function of (q, k, v), chosen by name from parts/attention.py.

Shapes: B batch, T sequence, C = n_embd channels, nh heads, hs = C / nh head size, V vocabulary with its padding.
Source: "Language Models are Unsupervised Multitask Learners" (GPT-2); module names are those of its release.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn import functional as F

from parts import decode
from parts.attention import ATTENTION
from parts.errors import UserError

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


@dataclass
class GPTConfig:
    """The shape of a GPT. `vocab_size` ids can occur; the embedding has `padded_vocab_size` rows."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    dropout: float = 0.0
    bias: bool = True  # in every linear layer and LayerNorm, as in GPT-2; False: a bit faster
    vocab_multiple: int = 1  # round the rows of the embedding up to a multiple of this: 64 makes 50257 50304
    attention: str = "sdpa"  # a name from ATTENTION; changes no weight

    def __post_init__(self):
        if self.n_embd % self.n_head:
            raise UserError(f"n_embd={self.n_embd} cannot be split over n_head={self.n_head}: make it a multiple")
        if self.attention not in ATTENTION:
            raise UserError(f"attention={self.attention!r} is unknown: it can be {', '.join(ATTENTION)}")

    @property
    def padded_vocab_size(self):
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head, self.dropout = config.n_head, config.dropout
        self.attend = ATTENTION[config.attention]

    def forward(self, x, cache=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # (B, nh, T, hs)
        if cache is not None:
            k, v = cache.extend(k, v)  # (B, nh, Tk, hs): earlier keys first
        y = self.attend(q, k, v, self.dropout if self.training else 0.0)  # SDPA would drop in evaluation too
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x, cache=None):
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # elsewhere PyTorch's own initialisation draws random numbers: more, with padding
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
        self.lm_head.weight = self.transformer.wte.weight  # tied only now: to_empty unties
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """GPT-2's: normal, 0.02; projections into the residual stream 0.02 / √(2 n_layer); biases 0.

        Padding draws no random numbers: every other weight is the same with and without it.
        """
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.constant_(p, 0.0 if name.endswith("bias") else 1.0)
            elif name == "transformer.wte.weight":
                nn.init.normal_(p[: self.config.vocab_size], std=0.02)
                nn.init.zeros_(p[self.config.vocab_size :])
            else:
                shrink = math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(p, std=0.02 / shrink)

    def forward(self, idx, targets=None, cache=None):
        """Logits (B, T, V) and the mean loss of `targets` (B, T), where -1 does not count.

        Without targets: logits of the last position only, (B, 1, V), and no loss. Ids that only pad the vocabulary have
        logit -inf: they take no share of the softmax, learn nothing and are never sampled. `cache` (decode.new_cache)
        holds the keys and values of the tokens before `idx`. Raises ValueError past block_size.
        """
        T, past = idx.size(1), cache[0].length if cache else 0
        if past + T > self.config.block_size:
            raise UserError(f"{past + T} tokens are more than block_size={self.config.block_size}: crop the input")
        pos = torch.arange(past, past + T, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))  # (B, T, C)
        for layer, block in enumerate(self.transformer.h):
            x = block(x, cache[layer] if cache else None)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self._logits(x[:, -1:]), None
        logits = self._logits(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1)
        return logits, loss

    def _logits(self, x):
        logits = self.lm_head(x)
        if self.config.padded_vocab_size > self.config.vocab_size:
            logits[..., self.config.vocab_size :] = float("-inf")
        return logits

    def use_attention(self, name):
        """Compute attention by another function of ATTENTION from here on. No weight changes."""
        self.config = replace(self.config, attention=name)
        for block in self.transformer.h:
            block.attn.attend = ATTENTION[name]

    def get_num_params(self, non_embedding=True):
        """Parameters; `non_embedding` leaves out positions, not the token embedding: it is the output layer too."""
        n = sum(p.numel() for p in self.parameters())
        return n - self.transformer.wpe.weight.numel() if non_embedding else n

    def flops_per_token(self):
        """Forward and backward: 6 N + 12 L C T (PaLM, arXiv:2204.02311, appendix B), N as get_num_params counts.

        The causal half of attention is counted in full, as nanoGPT and the PaLM paper do.
        """
        c = self.config
        return 6 * self.get_num_params() + 12 * c.n_layer * c.n_embd * c.block_size

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        """Share of an A100's 312 TFLOP/s when `fwdbwd_per_iter` sequences take `dt` seconds (nanoGPT's convention)."""
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / 312e12

    def crop_block_size(self, block_size):
        """Drop the positions from `block_size` on. Raises ValueError where there are fewer."""
        if block_size > self.config.block_size:
            raise UserError(f"block_size={block_size} is more than the model's {self.config.block_size} positions")
        self.config = replace(self.config, block_size=block_size)
        self.transformer.wpe.weight = nn.Parameter(self.transformer.wpe.weight[:block_size].detach().clone())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """AdamW in two groups: weight decay for matrices and embeddings, none for biases and LayerNorm."""
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type in ("cuda", "cpu"))

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        """`idx` (B, T) with `max_new_tokens` ids appended; how they are drawn is told in parts/decode.py."""
        return torch.cat([idx, *decode.stream(self, idx, max_new_tokens, temperature, top_k)], dim=1)

    @classmethod
    def from_checkpoint(cls, saved, **changes):
        """The model in a checkpoint, `saved` (checkpoint.load), with `changes` to its config, such as dropout."""
        try:
            model = cls(GPTConfig(**{**saved["model_args"], **changes}))
            model.load_state_dict(saved["model"])
        except (TypeError, ValueError, RuntimeError) as error:
            raise UserError(f"the checkpoint's weights and model_args do not fit each other: {error}") from error
        return model

    @classmethod
    def from_pretrained(cls, model_type, override_args=None):
        """GPT-2's weights: one of PRETRAINED, from the Hugging Face hub or its cache, or a local folder in that format.

        `override_args` may set dropout, attention and vocab_multiple. Raises UserError where the folder holds another
        architecture, or the weights cannot be had.
        """
        from transformers import GPT2LMHeadModel

        try:
            theirs = GPT2LMHeadModel.from_pretrained(model_type, dtype=torch.float32)
        except Exception as error:  # a missing, damaged or foreign file can raise anything
            why = str(error).splitlines()[0].rstrip(". ")
            raise UserError(
                f"cannot load {str(model_type)!r}: {why}. Without a network, name a local Hugging Face folder"
            ) from error
        c, inner = theirs.config, theirs.config.n_inner or 4 * theirs.config.n_embd
        found = {"model_type": c.model_type, "activation_function": c.activation_function, "n_inner": inner}
        found |= {"layer_norm_epsilon": c.layer_norm_epsilon, "tie_word_embeddings": c.tie_word_embeddings}
        found |= {"scaled_by_layer": c.scale_attn_by_inverse_layer_idx, "scaled": c.scale_attn_weights}
        if list(found.values()) != ["gpt2", "gelu_new", 4 * c.n_embd, 1e-5, True, False, True]:
            raise UserError(f"{model_type} is no GPT-2 as OpenAI built it: {found}")
        shape = dict(n_layer=c.n_layer, n_head=c.n_head, n_embd=c.n_embd)
        config = GPTConfig(block_size=c.n_positions, vocab_size=c.vocab_size, **shape, **(override_args or {}))
        model, state = cls(config), theirs.state_dict()
        with torch.no_grad():
            for name, p in model.named_parameters():
                w = state[name]
                conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))  # stored transposed
                p[: config.vocab_size if name == "transformer.wte.weight" else None] = w.t() if conv1d else w
        return model
