# finetune GPT-2 XL on tiny Shakespeare: minutes on one large GPU
# python data/shakespeare/prepare.py && python train.py config/finetune_shakespeare.py

import time

out_dir = "out-shakespeare"
init_from = "gpt2-xl"
dataset = "shakespeare"
wandb_project = "shakespeare"
wandb_run_name = "ft-" + str(time.time())

eval_interval = 5
eval_iters = 40
always_save_checkpoint = False  # keep the best only

batch_size = 1  # 1 x 32 x 1024 = 32,768 tokens per step; the corpus has 301,966: nine steps read it once
gradient_accumulation_steps = 32
max_iters = 20

learning_rate = 3e-5
decay_lr = False
