# Llama 3 8B: 8,030,261,248 parameters, as in the config.json of meta-llama/Meta-Llama-3-8B
# python bench.py plan config/model/llama-3-8b.py \
#     --parallel=fsdp --batch_size=1 --gradient_accumulation_steps=64 --gpus=64

block_size = 8192
vocab_size = 128256
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096

position = "rotary"
rope_theta = 500000.0
norm = "rmsnorm"
norm_eps = 1e-5
mlp = "swiglu"
n_inner = 14336
bias = False
tie_embeddings = False
