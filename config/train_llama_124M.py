# after config/train_gpt2.py: a Llama with its parameters and FLOPs, on the same data in the same order
# torchrun --standalone --nproc_per_node=8 train.py config/train_gpt2.py config/train_llama_124M.py

out_dir = "out-llama-124M"
wandb_run_name = "llama-124M"

position = "rotary"
norm = "rmsnorm"
mlp = "swiglu"
n_inner = 2048  # 8/3 of 768: three matrices have as many weights as GPT-2's two
