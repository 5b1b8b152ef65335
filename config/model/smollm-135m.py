# SmolLM 135M: 134,515,008 parameters, as in the config.json of HuggingFaceTB/SmolLM-135M
# python train.py config/train_gpt2.py config/model/smollm-135m.py --vocab_size=50257   (in GPT-2's BPE)

block_size = 2048
vocab_size = 49152
n_layer = 30
n_head = 9
n_kv_head = 3
n_embd = 576

position = "rotary"
rope_theta = 10000.0
norm = "rmsnorm"
norm_eps = 1e-5
mlp = "swiglu"
n_inner = 1536
bias = False
tie_embeddings = True
