# GPT-2 124M on OpenWebText: validation loss about 2.85 after 300B tokens, 4 days on 8 A100 (nanoGPT)
# python data/openwebtext/prepare.py && torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py

wandb_log = True
wandb_project = "owt"
wandb_run_name = "gpt2-124M"

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8  # 12 x 1024 x 5 on each of 8 GPUs = 491,520 tokens per step

max_iters = 600000  # 295B tokens
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
