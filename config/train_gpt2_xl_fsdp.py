# GPT-2 XL (1.6B) on OpenWebText, sharded over the 8 GPUs of a node. Each GPU holds 3.1 of the 24.9 GB of weights,
# gradients and AdamW's moments. Not yet measured on a GPU
# python data/openwebtext/prepare.py && torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_xl_fsdp.py
# on several nodes, with one copy of the model on each node:
# sbatch slurm/train.sh config/train_gpt2_xl_fsdp.py --shard_size=8 --out_dir=/shared/out-gpt2-xl

out_dir = "out-gpt2-xl"
parallel = "fsdp"
recompute = "block"

n_layer = 48
n_head = 25
n_embd = 1600

batch_size = 4
block_size = 1024
gradient_accumulation_steps = 16 * 8  # 4 x 1024 x 16 on each of 8 GPUs = 524,288 tokens per step

learning_rate = 2e-4  # GPT-3's for 1.3B (arXiv:2005.14165, table 2.1)
min_lr = 2e-5
max_iters = 60000  # 31B tokens, 20 for each parameter (arXiv:2203.15556)
lr_decay_iters = 60000

eval_interval = 1000
eval_iters = 25
