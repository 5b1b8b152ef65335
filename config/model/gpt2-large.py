# GPT-2 large: 774,030,080 parameters, as in the config.json of openai-community/gpt2-large
# python bench.py plan config/model/gpt2-large.py
n_layer, n_head, n_embd = 36, 20, 1280
vocab_size = 50257
bias = True
