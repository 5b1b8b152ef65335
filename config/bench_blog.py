# the setting of PyTorch's article "Accelerating Large Language Models with Accelerated Transformers", for one device:
# python bench.py ladder config/bench_blog.py

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 12
gradient_accumulation_steps = 1
vocab_size = 50257

dtype = "bfloat16"
compile = True
