# the recipe of config/train_shakespeare_cpu.py with a Llama of as many parameters
# python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_llama_cpu.py

out_dir = "out-shakespeare-llama-cpu"
dataset = "shakespeare_char"
device = "cpu"

eval_interval = 150
eval_iters = 10  # 240 windows of each split, as many as the recipe's 20 batches of 12
log_interval = 50
always_save_checkpoint = False

batch_size = 24  # twice the recipe's, because Muon's part of a step costs the same for any batch
gradient_accumulation_steps = 1
block_size = 64

n_layer = 2
n_head = 3
n_embd = 96
dropout = 0.0
position = "rotary"
norm = "rmsnorm"
mlp = "swiglu"
n_inner = 256  # 3 x 256, as many parameters as 2 x 384

optimizer = "muon"
learning_rate = 1.8e-2
schedule = "wsd"
min_lr = 0.0
warmup_iters = 20
max_iters = 300
lr_decay_iters = 300
