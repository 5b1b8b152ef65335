# variants for study.py: GPT-2 with parts of Llama and Qwen3, one at a time and together, for models of 128 channels
# python study.py config/train_shakespeare_cpu.py config/study/families.py --seed=1..3

_rotary = dict(position="rotary")
_rmsnorm = dict(norm="rmsnorm")
_swiglu = dict(mlp="swiglu", n_inner=344)  # 3 x 344, about as many parameters as 2 x 512
_qk_norm = dict(qk_norm=True)

variants = {
    "GPT-2": {},
    "rotary": _rotary,
    "RMSNorm": _rmsnorm,
    "SwiGLU": _swiglu,
    "QK norm": _qk_norm,
    "grouped queries": dict(n_kv_head=2, n_inner=576),  # a wider MLP has the parameters that keys and values lack
    "Llama": _rotary | _rmsnorm | _swiglu,
    "Llama + QK norm": _rotary | _rmsnorm | _swiglu | _qk_norm,
    "GPT-2 + rotary + QK norm": _rotary | _qk_norm,
}
