# Python's own standard library, byte by byte, on 2 CPU cores in minutes; `make quickstart` runs it

out_dir = "out-quickstart"
dataset = "python_stdlib"

eval_interval = 100
eval_iters = 20
log_interval = 50

batch_size = 16
gradient_accumulation_steps = 1
block_size = 128  # bytes of context
attention = "auto"

n_layer = 4
n_head = 4
n_embd = 256

learning_rate = 2e-3
min_lr = 2e-4
warmup_iters = 100
max_iters = 1500
lr_decay_iters = 1500
beta2 = 0.99
