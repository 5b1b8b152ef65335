# Phi-2: 2,779,683,840 parameters, as in the config.json of microsoft/phi-2; its vocabulary holds ids that pad it
# python bench.py plan config/model/phi-2.py --parallel=fsdp --batch_size=4 --gpus=8

block_size = 2048
vocab_size = 51200
n_layer = 32
n_head = 32
n_embd = 2560
parallel_block = True

position = "rotary"
rope_theta = 10000.0
rope_fraction = 0.4  # 32 of a head's 80 channels
norm = "layernorm"
norm_eps = 1e-5
mlp = "gelu"
activation = "gelu_tanh"
n_inner = 10240
bias = True
output_bias = True
tie_embeddings = False
