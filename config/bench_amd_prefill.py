# time to the first token as in AMD's article "Accelerating Large Language Models with Flash Attention on AMD GPUs":
# python bench.py prefill config/bench_amd_prefill.py

models = "mistral-7b,llama-3-8b,phi-2"
lengths = "512,1024,2048"
dtype = "bfloat16"
