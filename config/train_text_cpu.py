# your own text on a CPU: samples resemble it after minutes
# python data/text/prepare.py --input=book.txt --tokenizer=train:2048 && python train.py config/train_text_cpu.py

out_dir = "out-text"
dataset = "text"
device = "cpu"

eval_interval = 100
eval_iters = 10
sample_interval = 100
patience = 5  # evaluations that tell overfitting, and end the run

batch_size = 16
gradient_accumulation_steps = 1
block_size = 128

# a small Qwen3, which transformers opens: at equal time, more steps of a small model learn more (docs/running.md)
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
warmup_iters = 20
max_iters = 800  # without --minutes
lr_decay_iters = 800
beta2 = 0.99
