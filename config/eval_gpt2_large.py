# GPT-2 774M as OpenAI trained it, on OpenWebText: nanoGPT reports a validation loss of 2.67
# python data/openwebtext/prepare.py && python train.py config/eval_gpt2_large.py

init_from = "gpt2-large"
eval_only = True
batch_size = 8
eval_iters = 500  # batches
