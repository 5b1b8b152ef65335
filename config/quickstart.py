# Python's own standard library, byte by byte, on any CPU; `make quickstart` gives it two minutes in all:
# python train.py config/quickstart.py --minutes=1.8

out_dir = "out-quickstart"
dataset = "python_stdlib"

eval_interval = 250
eval_iters = 20
log_interval = 100
sample_interval = 500
sample_prompts = "def "

batch_size = 16
gradient_accumulation_steps = 1
block_size = 128  # bytes of context

# small, because in two minutes on a CPU many steps of a small model learn more than few steps of a large one; a
# Qwen3, because rotary positions gain much (docs/findings.md), and transformers opens it
n_layer = 2
n_head = 4
n_embd = 128
position = "rotary"
norm = "rmsnorm"
mlp = "swiglu"
n_inner = 344  # 3 matrices, with about as many parameters as 2 of 4 n_embd
qk_norm = True

optimizer = "muon"  # gains much by itself at this size (docs/findings.md)
learning_rate = 1e-2
schedule = "wsd"
min_lr = 0.0
warmup_iters = 50
max_iters = 2000  # without --minutes
lr_decay_iters = 2000
beta2 = 0.99
