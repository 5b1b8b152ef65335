# the run of PyTorch's article "Accelerating Large Language Models with Accelerated Transformers": GPT-2 124M
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2_blog.py

out_dir = "out-gpt2-blog"
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 8  # one micro-batch on each of 8 GPUs

dropout = 0.0
attention = "flash"
vocab_multiple = 64  # 50257 -> 50304
dtype = "bfloat16"
compile = True

max_iters = 600000
lr_decay_iters = 600000
eval_interval = 1000
log_interval = 10
