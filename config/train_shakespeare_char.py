# characters of Shakespeare: a good first run, minutes on a GPU
# python data/shakespeare_char/prepare.py && python train.py config/train_shakespeare_char.py

out_dir = "out-shakespeare-char"
dataset = "shakespeare_char"
wandb_project = "shakespeare-char"
wandb_run_name = "mini-gpt"

eval_interval = 250  # often, because the model overfits soon
eval_iters = 200
log_interval = 10
always_save_checkpoint = False  # keep the best only

batch_size = 64
gradient_accumulation_steps = 1
block_size = 256  # characters of context

n_layer = 6
n_head = 6
n_embd = 384
dropout = 0.2
activation = "gelu"  # exact, nanoGPT's: a CPU computes it 3 to 6 times as fast as GPT-2's tanh form

learning_rate = 1e-3  # small models can take a higher rate
min_lr = 1e-4
warmup_iters = 100
max_iters = 5000
lr_decay_iters = 5000
beta2 = 0.99  # a step has few tokens, so average over more steps
