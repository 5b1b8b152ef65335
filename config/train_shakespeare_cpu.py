# characters of Shakespeare in seconds on a CPU, to the loss of nanoGPT's recipe for cheap computers, by a smaller model
# python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_cpu.py

out_dir = "out-shakespeare-cpu"
dataset = "shakespeare_char"
device = "cpu"

eval_interval = 90
eval_iters = 10  # 240 windows of each split, as many as the recipe's 20 batches of 12
log_interval = 50
always_save_checkpoint = False

batch_size = 24  # twice the recipe's, because Muon's part of a step costs the same for any batch
gradient_accumulation_steps = 1
block_size = 64

# 4/7 of the time of 2 layers a step: at equal time, more steps of a small model learn more (docs/running.md)
n_layer = 1
n_head = 3
n_embd = 96
bigrams = 65 * 65  # a row for each pair of characters: without them, a layer has to find out what stands before
activation = "gelu"  # exact, nanoGPT's: a CPU computes it 3 to 6 times as fast as GPT-2's tanh form
position = "rotary"  # gains much by itself (docs/findings.md)
qk_norm = True

optimizer = "muon"  # gains much by itself at 2 x 128 (docs/findings.md)
learning_rate = 1.8e-2
schedule = "wsd"
min_lr = 0.0
warmup_iters = 10
max_iters = 180
lr_decay_iters = 180
