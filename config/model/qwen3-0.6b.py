# Qwen3 0.6B: 596,049,920 parameters, as in the config.json of Qwen/Qwen3-0.6B
# python bench.py plan config/model/qwen3-0.6b.py --block_size=4096 --batch_size=2 --gpus=8

block_size = 40960
vocab_size = 151936
n_layer = 28
n_head = 16
n_kv_head = 8
head_size = 128  # not n_embd / n_head: heads have twice the channels of the model
n_embd = 1024

position = "rotary"
rope_theta = 1000000.0
qk_norm = True
norm = "rmsnorm"
norm_eps = 1e-6
mlp = "swiglu"
n_inner = 3072
bias = False
tie_embeddings = True
