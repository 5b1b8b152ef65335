# the recipe of config/train_shakespeare_cpu.py with a Llama of as many parameters
# python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_llama_cpu.py

out_dir = "out-shakespeare-llama-cpu"
dataset = "shakespeare_char"
device = "cpu"
compile = False  # compiling takes longer than the run

eval_interval = 175
eval_iters = 10  # 240 windows of each split, as many as the recipe's 20 batches of 12
log_interval = 50
always_save_checkpoint = False

batch_size = 24  # twice the recipe's, because Muon's part of a step costs the same for any batch
gradient_accumulation_steps = 1
block_size = 64

n_layer = 4
n_head = 4
n_embd = 128
dropout = 0.0
position = "rotary"
norm = "rmsnorm"
mlp = "swiglu"
n_inner = 344  # 3 x 344, about as many parameters as 2 x 512

optimizer = "muon"
learning_rate = 1.2e-2
schedule = "wsd"
min_lr = 0.0
warmup_iters = 20
max_iters = 350
lr_decay_iters = 350
