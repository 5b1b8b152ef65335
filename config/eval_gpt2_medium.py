# GPT-2 350M as OpenAI trained it, on OpenWebText: nanoGPT reports a validation loss of 2.84
# python data/openwebtext/prepare.py && python train.py config/eval_gpt2_medium.py

init_from = "gpt2-medium"
eval_only = True
batch_size = 8
eval_iters = 500  # batches
