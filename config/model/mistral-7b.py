# Mistral 7B v0.1: 7,241,732,096 parameters, as in the config.json of mistralai/Mistral-7B-v0.1
# python bench.py plan config/model/mistral-7b.py --block_size=8192 \
#     --parallel=fsdp --batch_size=1 --gradient_accumulation_steps=64 --gpus=64

block_size = 32768
window = 4096
vocab_size = 32000
n_layer = 32
n_head = 32
n_kv_head = 8
n_embd = 4096

position = "rotary"
rope_theta = 10000.0
norm = "rmsnorm"
norm_eps = 1e-5
mlp = "swiglu"
n_inner = 14336
bias = False
tie_embeddings = False
