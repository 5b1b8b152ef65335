"""Six changes that people make to a GPT after reading CONTRIBUTING.md: in each file, old text and new."""

WEIGHT_NORM = {
    "train.py": [
        (
            'return {"loss": loss_sum / len(micro_steps), "grad_norm": norm}',
            "weight_norm = state.model.lm_head.weight.detach().norm()\n"
            '    return {"loss": loss_sum / len(micro_steps), "grad_norm": norm, "weight_norm": weight_norm}',
        )
    ]
}

ROTATED = """

def _rotate(x, pos):
    half = x.size(-1) // 2
    angle = pos[:, None] * 10000.0 ** (-torch.arange(half, device=x.device) / half)  # (T, hs / 2)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1).to(x.dtype)


class CausalSelfAttention(nn.Module):"""
ROPE_AND_RMSNORM = {
    "model.py": [
        ("\n\nclass CausalSelfAttention(nn.Module):", ROTATED),
        (
            "        if cache is not None:\n            k, v = cache.extend",
            "        pos = torch.arange(T, device=x.device) if cache is None else cache.positions(T, x.device)\n"
            "        q, k = _rotate(q, pos), _rotate(k, pos)\n"
            "        if cache is not None:\n            k, v = cache.extend",
        ),
        ("self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)", "self.ln_1 = nn.RMSNorm(config.n_embd)"),
        ("self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)", "self.ln_2 = nn.RMSNorm(config.n_embd)"),
        ('"ln_f": nn.LayerNorm(config.n_embd, bias=config.bias),', '"ln_f": nn.RMSNorm(config.n_embd),'),
        ('                    "wpe": nn.Embedding(config.block_size, config.n_embd),\n', ""),
        ("self.transformer.wte(idx) + self.transformer.wpe(pos)", "self.transformer.wte(idx)"),
    ]
}
# what the refusal of the above asks for
AND_ITS_COUNT = {
    "model.py": [
        *ROPE_AND_RMSNORM["model.py"],
        ("return n - self.transformer.wpe.weight.numel() if non_embedding else n", "return n"),
    ],
    "fusedgpt/dimensions.py": [
        ("layer_norm = C + biases", "layer_norm = C"),
        ("(self.padded_vocab_size + self.block_size) * C", "self.padded_vocab_size * C"),
    ],
}

GROUPED_QUERIES = {
    "fusedgpt/dimensions.py": [
        (
            "    n_embd: int = 768  # channels, the width of the model\n",
            "    n_embd: int = 768  # channels, the width of the model\n"
            "    n_kv_head: int | None = None  # heads of keys and values; None: as many as of queries\n",
        ),
        ('COUNTED = ("document_start",)', 'COUNTED = ("document_start", "n_kv_head")'),
        (
            "block = 12 * C * C + 9 * biases",
            "share = (self.n_kv_head or self.n_head) / self.n_head\n"
            "        block = int((10 + 2 * share) * C * C + (7 + 2 * share) * biases)",
        ),
    ],
    "model.py": [
        (
            "self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)",
            "self.n_kv_head = config.n_kv_head or config.n_head\n"
            "        self.kv = config.n_embd // config.n_head * self.n_kv_head\n"
            "        self.c_attn = nn.Linear(config.n_embd, config.n_embd + 2 * self.kv, bias=config.bias)",
        ),
        (
            "qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, 3, nh, hs)\n"
            "        q, k, v = qkv.permute(2, 0, 3, 1, 4)",
            "qkv = self.c_attn(x).split((C, self.kv, self.kv), dim=-1)\n"
            "        q, k, v = (y.unflatten(-1, (-1, C // self.n_head)).transpose(1, 2) for y in qkv)",
        ),
        (
            "        # softmax(q kᵀ",
            "        k, v = (y.repeat_interleave(self.n_head // self.n_kv_head, dim=1) for y in (k, v))\n"
            "        # softmax(q kᵀ",
        ),
    ],
}

# as a kernel: refused, because it computes another function
WINDOW_AS_A_KERNEL = {
    "fusedgpt/attention/functions.py": [
        (
            "\n\ndef sdpa(",
            "\n\ndef window(q, k, v, dropout_p=0.0, documents=None):\n"
            "    T, Tk = q.size(-2), k.size(-2)\n"
            "    seen = _visible(T, Tk, q.device).triu(Tk - T - 7)\n"
            "    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout_p)\n"
            "\n\ndef sdpa(",
        ),
        ("(manual, blocked, flex, sdpa, masked)", "(manual, blocked, flex, sdpa, masked, window)"),
    ],
    "fusedgpt/attention/table.py": [
        ('    "masked": Kernel', '    "window": Kernel((), "", "0.5", "*"),\n    "masked": Kernel')
    ],
}
# as part of the model: saved with the weights
WINDOW_IN_THE_MODEL = {
    "fusedgpt/dimensions.py": [
        (
            "    n_embd: int = 768  # channels, the width of the model\n",
            "    n_embd: int = 768  # channels, the width of the model\n"
            "    window: int | None = None  # keys that a query sees; None: all before it\n",
        ),
        ('COUNTED = ("document_start",)', 'COUNTED = ("document_start", "window")'),
    ],
    "model.py": [
        ("        self.n_head, self.dropout", "        self.window = config.window\n        self.n_head, self.dropout"),
        (
            "        # softmax(q kᵀ",
            "        if self.window:\n"
            "            seen = torch.ones(T, k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - T)\n"
            "            seen = seen.triu(k.size(2) - T - self.window + 1)\n"
            "            y = F.scaled_dot_product_attention(q.to(k.dtype), k, v, attn_mask=seen).to(q.dtype)\n"
            "            return self.c_proj(y.transpose(1, 2).reshape(B, T, C))\n"
            "        # softmax(q kᵀ",
        ),
    ],
}

SCHEDULE = {
    "fusedgpt/settings.py": [('Literal["cosine", "wsd", "constant"]', 'Literal["cosine", "wsd", "constant", "sqrt"]')],
    "fusedgpt/training/optimizer.py": [
        (
            '    if s.schedule == "constant"',
            '    if s.schedule == "sqrt":\n'
            "        return s.learning_rate * (s.warmup_iters / max(it, s.warmup_iters, 1)) ** 0.5\n"
            '    if s.schedule == "constant"',
        )
    ],
}

DATA_SET = """
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from fusedgpt.data import prepare
from fusedgpt.data.corpus import Files
from fusedgpt.errors import one_sentence


def main():
    args = prepare.parser(__file__, "Any text, line by line.").parse_args()
    lines = Files(args.input, paragraphs=True)
    prepare.prepare(lines, "char", args.out_dir, lambda ends: prepare.draw(ends, 0.2))


if __name__ == "__main__":
    with one_sentence():
        main()
"""
