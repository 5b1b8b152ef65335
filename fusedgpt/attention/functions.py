"""Causal self-attention, one function per name: `(q, k, v, dropout_p, documents, window) -> y`.

B batch, T queries, Tk keys (T, or more when earlier keys come from a cache), nh heads, nkv heads of keys and values, hs
head size. q is (B, nh, T, hs), k and v are (B, nkv, Tk, hs), y is (B, nh, T, hs). Query i sees keys 0 ... Tk - T + i:
the last query sees every key. Each computes softmax(q kᵀ / √hs) v, equation 1 of "Attention Is All You Need"
(arXiv:1706.03762). If nkv is less than nh, nh / nkv heads in a row share keys and values (arXiv:2305.13245).
documents (B, Tk) numbers the document of each key: a query sees no key of another document. None: all are of one.
window: a query sees only the last `window` of these keys, its own included (arXiv:2004.05150). None: all of them.
"""

import functools
import hashlib
import importlib.util
import pathlib
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fusedgpt.attention.table import check_name
from fusedgpt.errors import UserError

BLOCK = 256  # queries in a block of `blocked`


def manual(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Hand-written: holds every score in memory. Scales after the product, like the baseline of bench.py's articles."""
    # a dot product of hs terms of variance 1 has variance hs: without the scale the softmax would saturate
    return _weighted(_product(q, k.transpose(-2, -1)) * q.size(-1) ** -0.5, v, dropout_p, documents, window)


def _product(x, y):
    """x (B, nh, T, n) times y (B, nkv, n, m): (B, nh, T, m). To y, heads that share it are one with more rows."""
    return (x.reshape(x.size(0), y.size(1), -1, x.size(-1)) @ y).view(*x.shape[:-1], y.size(-1))


def _weighted(scores, v, dropout_p, documents, window):
    """The mean of the values that each query sees, weighted by the softmax of its `scores`, (B, nh, T, Tk)."""
    hidden = ~_visible(*scores.shape[-2:], scores.device, documents, window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    # F.dropout does not know whether the model trains: if it does not, the caller gives 0
    return _product(F.dropout(weights, dropout_p), v)  # (B, nh, T, hs)


def blocked(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """`manual` for BLOCK queries at a time, each on the keys that it sees. This is half of what makes flash fast.

    It computes hardly any score above the diagonal, and the scores of a block fit into a CPU's cache. The other half is
    to split the keys into blocks too, and to correct the softmax after each, in one kernel (arXiv:2205.14135).
    """
    T, Tk = q.size(-2), k.size(-2)
    q, blocks = q * q.size(-1) ** -0.5, []  # scale a query's hs numbers, not its scores
    for start in range(0, T, BLOCK):
        stop = min(start + BLOCK, T)
        last = Tk - T + stop  # keys up to that of the block's last query
        first = max(0, Tk - T + start + 1 - window) if window else 0  # the first key that its first query sees
        scores = _product(q[..., start:stop, :], k[..., first:last, :].transpose(-2, -1))
        some = None if documents is None else documents[:, first:last]
        blocks.append(_weighted(scores, v[..., first:last, :], dropout_p, some, window))
    return torch.cat(blocks, dim=-2)


VERSIONS = {"flash3": "FA3", "flash4": "FA4"}  # PyTorch's names for those of packages; its own is version 2


def make_ready(name: str) -> None:
    """Make PyTorch's flash kernel, in the whole process, the FlashAttention that the kernel `name` means.

    A compiled graph does not call this again: it must be called before. Raises what a package raises; ImportError if it
    is not installed.
    """
    version = VERSIONS.get(name)
    if attention.current_flash_attention_impl() == version:
        return
    if not version:
        attention.restore_flash_attention_impl()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced, but that is the purpose
        attention.activate_flash_attention_impl(version)


# With this mark, a compiled model calls it while it is traced. torch.compiler.assume_constant_result(make_ready) does
# the same, but it imports torch._dynamo, which would delay every start of every script by a second.
make_ready._dynamo_marked_constant = True


def any_kernel(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """SDPA in whichever kernel PyTorch picks. Fewer kernels take the mask of `_with_mask`; none skips hidden scores."""
    return functools.partial(_picked, attend)  # not a function in here, which pickle refuses


def _picked(attend, q, k, v, dropout_p=0.0, documents=None, window=None):
    make_ready("flash")
    # cuDNN, PyTorch's first choice on Hopper, would build a plan for every length of the cache
    if q.is_cuda and (q.size(-2) < k.size(-2) or rounded_by_cudnn(dropout_p)):
        return without_cudnn(attend, q, k, v, dropout_p, documents, window)
    return attend(q, k, v, dropout_p, documents, window)


def rounded_by_cudnn(dropout_p: float) -> bool:
    """Whether cuDNN may drop another share: it may round to sixteenths, as PyTorch 2.13 says (pytorch#174245)."""
    return 16 * dropout_p % 1 != 0


def without_cudnn(attend: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """`attend(*inputs)`, in which SDPA picks any kernel but cuDNN's."""
    with sdpa_kernel(_ALL_BUT_CUDNN):
        return attend(*inputs)


_ALL_BUT_CUDNN = [kind for name, kind in SDPBackend.__members__.items() if name not in ("ERROR", "CUDNN_ATTENTION")]


def _with_flag(q, k, v, dropout_p, documents=None, window=None):
    if documents is not None or window is not None:  # the flag knows of neither
        return _with_mask(q, k, v, dropout_p, documents, window)
    T, Tk = q.size(-2), k.size(-2)
    if Tk == T:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, **_grouped(q, k))
    # is_causal aligns the mask to the top left: the first query after a cache would see the first key only
    return as_rows(q, k, v, None, dropout_p) if T == 1 else _with_mask(q, k, v, dropout_p)


def _with_mask(q, k, v, dropout_p, documents=None, window=None):
    return as_rows(q, k, v, _visible(q.size(-2), k.size(-2), q.device, documents, window), dropout_p)


def as_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float = 0.0) -> Tensor:
    """SDPA of heads that share keys as if each group were one head with more queries, which see what `mask` shows.

    So no kernel copies k and v, as `math` does with enable_gqa, and on a GPU, where flash takes no mask, `efficient`
    runs, which in PyTorch 2.13 does not take enable_gqa. mask: (T or 1, Tk), or (B, 1, T or 1, Tk); None: they see all.
    """
    group = q.size(1) // k.size(1)
    if group == 1:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p)
    rows = q.reshape(q.size(0), k.size(1), -1, q.size(-1))  # (B, nkv, group T, hs)
    if mask is not None and mask.size(-2) > 1:
        mask = mask.repeat(*[1] * (mask.dim() - 2), group, 1)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, dropout_p=dropout_p).reshape(q.shape)


def _grouped(q, k):
    # not enable_gqa=(…): if shapes are dynamic, that would be a SymBool, which SDPA does not take
    return {"enable_gqa": True} if q.size(1) != k.size(1) else {}


def _visible(T, Tk, device, documents=None, window=None):
    """True if a query sees a key: (T, Tk), or (B, 1, T, Tk) with `documents`."""
    earlier = torch.ones(T, Tk, dtype=torch.bool, device=device).tril(Tk - T)
    if window is not None:
        earlier = earlier.triu(Tk - T + 1 - window)
    if documents is None:
        return earlier
    return earlier & (documents[:, None, -T:, None] == documents[:, None, None, :])


def only(backend: SDPBackend, attend: Callable[..., Tensor] = _with_flag, name: str = "flash") -> Callable[..., Tensor]:
    """SDPA restricted to one kernel: if it cannot run, PyTorch raises, because there is no other to fall back to.

    name: which FlashAttention, as make_ready takes it.
    """
    return functools.partial(_forced, backend.name, attend, name)


def _forced(backend, attend, name, q, k, v, dropout_p=0.0, documents=None, window=None):
    make_ready(name)
    # without this, PyTorch 2.5 and later compute `math` in float32, whatever the dtype
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return attend(q, k, v, dropout_p, documents, window)
    finally:  # back to PyTorch's default, for sdpa if it picks math
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)


def flex(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, documents: Tensor | None = None, window: int | None = None
) -> Tensor:
    """FlexAttention. It ignores `dropout_p`: permitted.refusal refuses flex before a model trains with dropout."""
    import torch.nn.attention.flex_attention  # here, because PyTorch 2.14 imports sympy with it, which takes 0.7 s

    T, Tk, mask = q.size(-2), k.size(-2), None
    inside = torch.compiler.is_compiling()  # a model that is being compiled traces flex into its own graph
    if documents is not None:
        mask = (_document_mask if inside else _last_document_mask)(T, documents, window)
    elif T > 1 or window is not None:
        mask = (_block_mask if inside else _kept_block_mask)(T, Tk, q.device, window)
    attend = attention.flex_attention.flex_attention if inside else _compiled_flex(dynamic=not q.requires_grad)
    # Below 128 queries PyTorch 2.11 to 2.13 would take its kernel for decoding. Its log-sum-exp has a padded stride
    # from one sequence to the next, which the backward does not know: gradients of a second sequence were wrong
    options = {"FORCE_USE_FLEX_ATTENTION": True} if q.requires_grad else None
    return attend(q, k, v, block_mask=mask, kernel_options=options, **_grouped(q, k))


def _near(past, window):
    """Whether the query `i` after `past` other keys sees the key `j`, as flex asks it."""

    def causal(b, h, i, j):
        return j <= i + past

    def within(b, h, i, j):
        return (j <= i + past) & (i + past - j < window)

    return causal if window is None else within


def _block_mask(T, Tk, device, window):
    return attention.flex_attention.create_block_mask(_near(Tk - T, window), None, None, T, Tk, device=device)


def _document_mask(T, documents, window):
    B, Tk = documents.shape
    past, near = Tk - T, _near(Tk - T, window)

    def seen(b, h, i, j):
        return near(b, h, i, j) & (documents[b, i + past] == documents[b, j])

    return attention.flex_attention.create_block_mask(seen, B, None, T, Tk, device=documents.device)


_kept_block_mask = functools.lru_cache(maxsize=64)(_block_mask)
# all layers get the same tensor of documents; some may have a window, and the others none
_last_document_mask = functools.lru_cache(maxsize=2)(_document_mask)


@functools.lru_cache(maxsize=2)
def _compiled_flex(dynamic):  # in generation, where lengths vary
    # raise beyond the recompilation limit: PyTorch would run flex uncompiled there, with every score in memory
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = 64  # of PyTorch's 8 graphs a process, the proof alone takes all
    return torch.compile(attention.flex_attention.flex_attention, dynamic=dynamic)


SDPA = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class Functions(dict):
    """Name to function. The first look-up of a user's own kernel loads it from its file."""

    def __missing__(self, name: str) -> Callable[..., Tensor]:
        check_name(name)
        self[name] = load(name)
        return self[name]


def digest(name: str) -> str | None:
    """The SHA-256 of the file of a user's own kernel `name`; None if there is none."""
    path = pathlib.Path(name.rpartition(":")[0])
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def load(name: str) -> Callable[..., Tensor]:
    """The function `name`, path/to/file.py:function. Raises what the file raises, or UserError."""
    path, _, function = name.rpartition(":")
    # torch.compile looks modules up by name
    spec = importlib.util.spec_from_file_location("own_" + re.sub(r"\W", "_", path), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(pathlib.Path(path).resolve().parent))  # it may import files beside it
    spec.loader.exec_module(module)
    if not callable(found := getattr(module, function, None)) or isinstance(found, torch.nn.Module):
        raise UserError(f"attention={name}: {path} has no function {function}, and a Module would be part of the model")
    return found


ATTENTION = Functions(
    manual=manual,
    blocked=blocked,
    **{name: only(backend) for name, backend in SDPA.items()},
    **{name: only(SDPBackend.FLASH_ATTENTION, name=name) for name in VERSIONS},
    flex=flex,
    sdpa=any_kernel(_with_flag),
    masked=any_kernel(_with_mask),
)
MASKED = {f"{name}, masked": only(backend, _with_mask) for name, backend in SDPA.items()}  # to measure a mask's cost
