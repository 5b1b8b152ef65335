# your own text on a CPU: samples resemble it after minutes
# python data/text/prepare.py --input=book.txt --tokenizer=train:2048 && python train.py config/train_text_cpu.py

out_dir = "out-text"
dataset = "text"
device = "cpu"

eval_interval = 100
eval_iters = 10
sample_interval = 100

batch_size = 16
gradient_accumulation_steps = 1
block_size = 128

n_layer = 4
n_head = 4
n_embd = 256
# 600 iterations read a book of 1 MB three or four times, too few to overfit: with dropout 0.1 the validation loss ended
# higher, a step took longer, and the fused kernels have no dropout on a CPU. A run many times as long may need it
dropout = 0.0
activation = "gelu"  # exact, nanoGPT's: a CPU computes it 3 to 6 times as fast as GPT-2's tanh form

optimizer = "muon"
learning_rate = 5e-3
schedule = "wsd"
min_lr = 0.0
warmup_iters = 50
max_iters = 600
lr_decay_iters = 600
beta2 = 0.99
