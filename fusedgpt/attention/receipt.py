"""The kernel receipt: which attention kernels the profiler saw, and whether they are the one that was asked for."""

import pathlib
from collections.abc import Callable

import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.table import KERNELS
from fusedgpt.machine.profiler import factors, profile

_SIGNS = {name: kernel.sign for name, kernel in KERNELS.items() if kernel.sign and not kernel.package}
_PACKAGED = {name: kernel.sign for name, kernel in KERNELS.items() if kernel.package}
_ENTRANCE = "aten::_scaled_dot_product_flash_attention"  # PyTorch's operator for all three versions
_UNFUSED = ["unfused"]
ALIGNMENT = 8  # Inductor pads the columns of a product to a multiple of this, or of 4 in float32


def observe(step: Callable[[], object], trace: pathlib.Path | None = None, ids: int | None = None) -> dict[str, list]:
    """Run `step` (a forward, with or without its backward) under the profiler and name what computed attention.

    Returns {'forward': [...], 'backward': [...], 'ops': [...]}: names of ATTENTION, or 'unfused' if only matrix
    products and a softmax were seen, as in `manual` and in a compiled `math`; and what the profiler calls attention.
    The whole profile is written to the file `trace`, if given, for ui.perfetto.dev, and its table is printed. With
    `ids`, the columns of a model's logits, there is also 'logits': [columns, stride of a row] of the logits in its
    matrix products, which a compiler may pad.

    'flash3' shows as an operator of its package, flash_attn_3::…, and 'flash4' as a device kernel named after its
    module, …flash_attncute…. Both are called by PyTorch's flash operator, which by itself means 'flash', version 2.
    """
    profiled = profile(step, shapes=ids is not None)
    if trace:
        trace.parent.mkdir(parents=True, exist_ok=True)
        for name in (trace.name, f"{trace.name}.tmp"):  # PyTorch would write through links of these names
            trace.with_name(name).unlink(missing_ok=True)
        profiled.export_chrome_trace(str(trace))
        by = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        print(profiled.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=50))
    # read names alone: key_averages() adds up times too, which takes as long as the step
    ops = sorted(filter(_is_attention, {event.name() for event in profiled.kineto_results.events()}))
    packaged = {(name, "bwd" in op) for op in ops for name, sign in _PACKAGED.items() if sign in op}
    replaced = {backward for _, backward in packaged}
    # look at PyTorch's operators, not at device kernels, because cuDNN's kernels have "flash" in their names.
    # FlexAttention has no operator of its own, only Triton kernels with "flex" in their names
    named = [op for op in ops if op.startswith("aten::") or "flex" in op]
    named = [op for op in named if not (op.startswith(_ENTRANCE) and ("backward" in op) in replaced)]
    fused = packaged | {(name, "backward" in op) for op in named for name, sign in _SIGNS.items() if sign in op}
    forward = sorted(name for name, backward in fused if not backward)
    if not forward:
        forward = ["math"] if any("_attention_math" in op for op in ops) else _UNFUSED
    found = {"forward": forward, "backward": sorted(n for n, backward in fused if backward) or _UNFUSED, "ops": ops}
    if ids is not None:
        logits = [matrix for matrix in factors(profiled) if ids <= matrix[0] < ids + ALIGNMENT]
        found["logits"] = sorted(map(list, logits))
    return found


def _is_attention(op):
    # autograd's wrappers only repeat the operator's name
    return not op.startswith("autograd::") and any(
        word in op.lower() for word in ("_attention", "flash_attn", "flash_fwd", "flash_bwd", "fmha", "_sdpa")
    )


def contradiction(name: str, receipt: dict[str, list], case: Case) -> str | None:
    """Why `receipt` shows a kernel other than the one called `name`, in one phrase; None if it agrees."""
    if name not in KERNELS or not KERNELS[name].seen:  # PyTorch picked it, or it is a user's own
        return None
    for direction in ("forward", "backward") if case.backward else ("forward",):
        if receipt[direction] not in [[each] for each in KERNELS[name].seen]:
            ran = " and ".join(receipt[direction])
            return f"attention='{name}' was asked for, but the profiler saw {ran} in the {direction} pass"
    return None
