# variants for study.py: GPT-2 with parts of Llama and Qwen3, one at a time and together, for models of 128 channels
# python study.py config/quickstart.py config/study/families.py --seed=1..3

_gpt2 = dict(position="learned", qk_norm=False)
_rotary = dict(position="rotary")
_rmsnorm = dict(norm="rmsnorm")
_swiglu = dict(mlp="swiglu", n_inner=344)  # 3 x 344, about as many parameters as 2 x 512
_qk_norm = dict(qk_norm=True)

variants = {
    "GPT-2": _gpt2,
    "rotary": _gpt2 | _rotary,
    "RMSNorm": _gpt2 | _rmsnorm,
    "SwiGLU": _gpt2 | _swiglu,
    "QK norm": _gpt2 | _qk_norm,
    "grouped queries": _gpt2 | dict(n_kv_head=2, n_inner=576),  # the MLP has the parameters that keys and values lack
    "Llama": _gpt2 | _rotary | _rmsnorm | _swiglu,
    "Llama + QK norm": _gpt2 | _rotary | _rmsnorm | _swiglu | _qk_norm,
    "GPT-2 + rotary + QK norm": _gpt2 | _rotary | _qk_norm,
}
