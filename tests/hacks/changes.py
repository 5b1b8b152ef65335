"""Changes that people make to a GPT after reading CONTRIBUTING.md: in each file, old text and new."""

WEIGHT_NORM = {
    "train.py": [
        (
            'return {"loss": loss_sum / len(micro_steps), "grad_norm": norm}',
            "weight_norm = state.model.lm_head.weight.detach().norm()\n"
            '    return {"loss": loss_sum / len(micro_steps), "grad_norm": norm, "weight_norm": weight_norm}',
        )
    ]
}

# BLOOM's LayerNorm of the embeddings: arXiv:2211.05100
EMBEDDING_NORM = {
    "model.py": [
        (
            '            parts["drop"] = nn.Dropout(config.dropout)\n',
            '            parts["ln_0"] = _norm(config, config.n_embd)\n'
            '            parts["drop"] = nn.Dropout(config.dropout)\n',
        ),
        ("        x = self.transformer.drop(x)\n", "        x = self.transformer.drop(self.transformer.ln_0(x))\n"),
    ]
}
# what the refusal of the above asks for
AND_ITS_COUNT = {
    **EMBEDDING_NORM,
    "fusedgpt/dimensions.py": [("blocks + of_norm * C + output", "blocks + 2 * of_norm * C + output")],
}

# Gemma multiplies the embeddings: a field without weights of its own
EMBEDDING_SCALE = {
    "fusedgpt/dimensions.py": [
        (
            "    n_embd: int = 768  # channels, the width of the model\n",
            "    n_embd: int = 768  # channels, the width of the model\n"
            "    embedding_scale: float = 1.0  # factor of the token embeddings\n",
        ),
        ('COUNTED = (*FAMILIES, "document_start")', 'COUNTED = (*FAMILIES, "document_start", "embedding_scale")'),
    ],
    "model.py": [
        (
            "x, rotation = self.transformer.wte(idx), None",
            "x, rotation = self.transformer.wte(idx) * self.config.embedding_scale, None",
        )
    ],
}

# ALiBi (arXiv:2108.12409) lowers scores by the distance. As a kernel, it computes another function
_ALIBI = """
def alibi(q, k, v, dropout_p=0.0, documents=None, window=None):
    distances = torch.arange(k.size(2))[None] - torch.arange(k.size(2) - q.size(2), k.size(2))[:, None]
    slopes = 2.0 ** (-8 * torch.arange(1, q.size(1) + 1) / q.size(1))
    bias = (slopes[:, None, None] * distances).masked_fill(distances > 0, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q), dropout_p=dropout_p)
"""
ALIBI_AS_A_KERNEL = {
    "fusedgpt/attention/functions.py": [
        ("\n\ndef sdpa(", f"\n{_ALIBI}\n\ndef sdpa("),
        ("(manual, blocked, flex, sdpa, masked)", "(manual, blocked, flex, sdpa, masked, alibi)"),
    ],
    "fusedgpt/attention/table.py": [
        ('    "masked": Kernel', '    "alibi": Kernel((), "", "0.5", "*"),\n    "masked": Kernel')
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
from fusedgpt.data.texts import Files
from fusedgpt.errors import one_sentence


def main():
    args = prepare.parser(__file__, "Any text, line by line.").parse_args()
    lines = Files(args.input, args.out_dir, paragraphs=True)
    prepare.prepare(lines, "char", args.out_dir, lambda documents: prepare.by_text(documents, 0.2))


if __name__ == "__main__":
    with one_sentence():
        main()
"""
