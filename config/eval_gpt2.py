# GPT-2 124M as OpenAI trained it, on OpenWebText: nanoGPT reports a validation loss of 3.12
# python data/openwebtext/prepare.py && python train.py config/eval_gpt2.py

init_from = "gpt2"
eval_only = True
batch_size = 8
eval_iters = 500  # batches
