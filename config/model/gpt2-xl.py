# GPT-2 xl: 1,557,611,200 parameters, as in the config.json of openai-community/gpt2-xl
# python bench.py plan config/model/gpt2-xl.py
n_layer, n_head, n_embd = 48, 25, 1600
vocab_size = 50257
bias = True
