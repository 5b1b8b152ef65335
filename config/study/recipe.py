# variants for study.py: what each choice in config/train_shakespeare_cpu.py brings, at equal CPU time of one thread
# python study.py config/train_shakespeare_cpu.py config/study/recipe.py --seed=1..5

_gpt2 = dict(position="learned", qk_norm=False)
_nanogpt = _gpt2 | dict(n_layer=4, n_head=4, n_embd=128, learning_rate=1.2e-2)

variants = {
    "recipe": {},
    "tanh GELU": dict(activation="gelu_tanh"),  # at equal iterations
    "learned positions and no QK norm": _gpt2 | dict(max_iters=326, lr_decay_iters=326),
    "the same and 4 layers of 128": _nanogpt | dict(max_iters=104, lr_decay_iters=104),
}
