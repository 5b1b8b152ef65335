"""A stand-in for the model.py of nanoGPT, as far as peers.py uses it."""

MODEL = """
import dataclasses
import torch
import model
from torch.nn import functional as F

@dataclasses.dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

def attend(q, k, v, dropout_p):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)

class GPT(model.GPT):
    def __init__(self, config):
        print("a line that is no row")
        super().__init__(model.GPTConfig(**vars(config), vocab_multiple=1, activation="gelu"))
        for block in self.transformer.h:
            block.attn.attend = attend

    def forward(self, idx, targets=None):
        logits, loss = super().forward(idx, targets)
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        groups = super().configure_optimizers(weight_decay, learning_rate, betas, device_type).param_groups
        groups = [{name: group[name] for name in ("params", "weight_decay")} for group in groups]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=device_type == "cuda")

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        assert top_k == 1
        for _ in range(max_new_tokens):
            idx = torch.cat((idx, self(idx)[0][:, -1:].argmax(dim=-1)), dim=1)
        return idx
"""
