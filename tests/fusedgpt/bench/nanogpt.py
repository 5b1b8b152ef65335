"""A stand-in for nanoGPT: its model.py and its train.py, as far as peers.py uses them."""

# what peers.py takes of nanoGPT, around our own model; the tests that need NANOGPT have the real one
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
TRAIN = """
import pathlib, pickle, sys
flags = dict(arg.removeprefix("--").split("=") for arg in sys.argv[1:])
data = pathlib.Path("data", flags["dataset"])
assert pickle.loads((data / "meta.pkl").read_bytes())["vocab_size"] == 65
assert (data / "train.bin").stat().st_size == 40_000 and flags["device"] == "cpu" and flags["n_embd"] == "128"
for n in range(int(flags["max_iters"]) + 1):
    if n % int(flags["eval_interval"]) == 0:
        print(f"step {n}: train loss 4.2000, val loss 4.1234")
    print(f"iter {n}: loss {4 - n / 100:.4f}, time {1000 if n < 5 else n}.25ms, mfu -100.00%")
"""
