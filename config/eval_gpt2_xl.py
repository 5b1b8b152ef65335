# GPT-2 1558M as OpenAI trained it, on OpenWebText: nanoGPT reports a validation loss of 2.54
# python data/openwebtext/prepare.py && python train.py config/eval_gpt2_xl.py

init_from = "gpt2-xl"
eval_only = True
batch_size = 8
eval_iters = 500  # batches
