# variants for study.py: what is worth its time in a small GPT? Each changes one thing of a GPT-2 that AdamW trains
# python study.py config/quickstart.py config/study/findings.py --minutes=1 --seed=1..8

import json
import pathlib

# the rate of each variant: the best of a study of rates with another seed, which has no --minutes (docs/findings.md)
_file = pathlib.Path(f"out-rates/{dataset}-{n_layer}x{n_embd}/outcomes.jsonl")
_rows = [json.loads(line) for line in _file.read_text("utf-8").splitlines()] if minutes and _file.exists() else []
_ended = [(row["evals"]["val_bits_per_byte"][-1], row["variant"]) for row in _rows if row["status"] == "finished"]
_rates = {}
for _, _name in sorted(_ended):
    _rates.setdefault(_name.partition(",")[0], dict(learning_rate=float(_name.partition("=")[2])))

_gpt2 = dict(position="learned", bigrams=None, qk_norm=False, optimizer="adamw")
_gpt2 |= dict(schedule="cosine", warmup_iters=30, beta2=0.99)
_changes = {
    "GPT-2": {},
    "Muon": dict(optimizer="muon"),
    "rotary": dict(position="rotary"),
    "QK norm": dict(qk_norm=True),
    "RMSNorm": dict(norm="rmsnorm"),
    "SwiGLU": dict(mlp="swiglu", n_inner=8 * round(n_embd / 3)),
    "grouped queries": dict(n_kv_head=n_head // 2, n_inner=9 * n_embd // 2),
    "untied head": dict(tie_embeddings=False),
    "no weight decay": dict(weight_decay=0.0),
    "WSD": dict(schedule="wsd"),
    "EMA": dict(ema_decay=0.98),
    "dropout 0.1": dict(dropout=0.1),
    "half the batch": dict(batch_size=batch_size // 2),
    "deeper": dict(n_layer=2 * n_layer, n_head=3 * n_head // 4, n_embd=3 * n_embd // 4),
    "wider": dict(n_layer=n_layer // 2, n_head=3 * n_head // 2, n_embd=3 * n_embd // 2),
}
variants = {name: _gpt2 | each | _rates.get(name, {}) for name, each in _changes.items()}
