# attention alone as in AMD's article "Accelerating Large Language Models with Flash Attention on AMD GPUs":
# python bench.py sweep config/bench_amd_sweep.py

lengths = "256-4096-64"
heads = "32x128"
dtype = "float16"
