# GPT-2 medium: 354,823,168 parameters, as in the config.json of openai-community/gpt2-medium
# python bench.py plan config/model/gpt2-medium.py
n_layer, n_head, n_embd = 24, 16, 1024
vocab_size = 50257
bias = True
