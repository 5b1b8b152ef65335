# Python's own standard library, byte by byte, on 2 CPU cores in minutes; `make quickstart` runs it

out_dir = "out-quickstart"
dataset = "python_stdlib"

eval_interval = 200
eval_iters = 20
log_interval = 50

batch_size = 16
gradient_accumulation_steps = 1
block_size = 128  # bytes of context

n_layer = 4
n_head = 4
n_embd = 256
activation = "gelu"  # exact, nanoGPT's: a CPU computes it 3 to 6 times as fast as GPT-2's tanh form

optimizer = "muon"
learning_rate = 5e-3
schedule = "wsd"
min_lr = 0.0
warmup_iters = 50
max_iters = 600
lr_decay_iters = 600
beta2 = 0.99
