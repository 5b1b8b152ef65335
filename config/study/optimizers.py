# variants for study.py: optimizers, rates, batches and schedules for the model of nanoGPT's recipe for cheap computers
# python study.py config/train_shakespeare_cpu.py config/study/optimizers.py --seed=1..5

_model = dict(n_layer=4, n_head=4, n_embd=128, position="learned", qk_norm=False)
_adamw = _model | dict(optimizer="adamw", max_iters=400, lr_decay_iters=400)
_muon = _model | dict(optimizer="muon", learning_rate=8e-3, max_iters=400, lr_decay_iters=400)

variants = {
    "Muon 1.2e-2, 350 iterations": _model | dict(learning_rate=1.2e-2, max_iters=350, lr_decay_iters=350),
    "Muon 8e-3": _muon,
    "AdamW 4e-3": _adamw | dict(learning_rate=4e-3),
    "AdamW 8e-3": _adamw | dict(learning_rate=8e-3),
    "Muon 8e-3, batch 12": _muon | dict(batch_size=12),  # evaluated on as many windows as the others
    "Muon 8e-3, batch 12, cosine": _muon | dict(batch_size=12, schedule="cosine"),
}
