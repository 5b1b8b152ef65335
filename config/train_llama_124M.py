# a Llama with the parameters and FLOPs of config/train_gpt2.py, on the same data in the same order
# python data/openwebtext/prepare.py && torchrun --standalone --nproc_per_node=8 train.py config/train_llama_124M.py

out_dir = "out-llama-124M"
wandb_log = True
wandb_project = "owt"
wandb_run_name = "llama-124M"

position = "rotary"
norm = "rmsnorm"
mlp = "swiglu"
n_inner = 2048  # 8/3 of 768: three matrices have as many weights as GPT-2's two

batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8  # 12 x 1024 x 5 on each of 8 GPUs = 491,520 tokens per step

max_iters = 600000  # 295B tokens
lr_decay_iters = 600000

eval_interval = 1000
eval_iters = 200
log_interval = 10

weight_decay = 1e-1
