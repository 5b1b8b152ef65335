"""Attention alone over a range of lengths: from which length on one kernel overtakes another.

AMD's article "Accelerating Large Language Models with Flash Attention on AMD GPUs" has causal attention, batch 1, 256
to 4096 tokens by 64, hand-written against fused. Here kernels take turns at each length. Lengths go from coarse to
fine, so that a sweep that ends early has a figure of all kernels.
"""

import dataclasses
import functools
from typing import Literal

import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.case import Case
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import options
from fusedgpt.bench.comparison import Comparison
from fusedgpt.bench.proof import prove, refusals
from fusedgpt.bench.report import Shown
from fusedgpt.errors import UserError
from fusedgpt.machine import timing
from fusedgpt.machine.device import dtype_name, resolve_dtype
from fusedgpt.machine.turns import Turn

BASELINE = "manual"

TRAINS, TOGETHER, TURN = False, True, 0.02
UNUSED = ("attention",)


@dataclasses.dataclass
class Settings(options.Common):
    seconds: float = 20.0  # take turns for at most so many seconds at each length
    heads: str = "32x128,12x64"  # heads x head size, comma-separated
    lengths: str = "256-4096-64,8192,16384"  # numbers of tokens, as first-last-step or one by one
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    attention: str = "auto"  # path/to/file.py:function, to measure this kernel of your own too


GPU = {"dtype": "float16"}  # AMD's article
CPU = {"lengths": "256,512,1024,2048", "heads": "8x128,12x64"}


def comparisons(s: Settings, device: torch.device) -> list[Comparison]:
    """All kernels at one length, for each shape and direction, before the next length.

    Raises UserError if --heads or --lengths cannot be read.
    """
    own = options.own_kernel(s.attention)
    return [
        Comparison(
            {"heads": f"{nh}x{hs}", "pass": direction, "T": T},
            # flex is compiled for each length
            tuple(name for name in (*SINGLE_KERNELS, "masked", *own) if name != "flex" or T.bit_count() == 1),
            BASELINE,
        )
        for T in sorted(set(options.lengths(s.lengths)), key=lambda T: (T.bit_count() > 1, T))  # powers of two first
        for nh, hs in options.heads(s.heads)
        for direction in ("forward", "forward + backward")
    ]


def build(workload: dict, name: str, s: Settings, device: torch.device) -> tuple[Turn, dict]:
    """A kernel at a length, with parity with float64 and its receipt."""
    if name == "flex":
        torch.compiler.reset()  # PyTorch counts recompilations over a whole process, and stops at its limit
    ((nh, hs),) = options.heads(workload["heads"])
    dtype, T = resolve_dtype(s.dtype, device), workload["T"]
    case = Case((1, nh, T, hs), device, dtype, backward=workload["pass"] != "forward")
    if reason := _refusal(name, dataclasses.replace(case, shape=(1, 1, 256, hs))):
        raise UserError(reason)
    attend, inputs = ATTENTION[name], _inputs(case)

    def step():
        return case.run(attend, *inputs)

    with refusals():
        found = prove(attend, case)
        receipt = observe(step)
        if reason := contradiction(name, receipt, case):
            raise UserError(reason)
        turn, how = timing.of_a_kernel(step, device)
    if device.type == "cuda" and how == "calls":
        raise UserError("it cannot become a CUDA graph, as others do: it waits for the GPU, or memory is short")
    return turn, found | {"kernel": receipt, "timed": how, "dtype": dtype_name(dtype)}


_inputs = functools.lru_cache(maxsize=1)(Case.inputs)  # kernels share them, because drawing them is slow
_refusal = functools.lru_cache(permitted.refusal)  # for one length; if a kernel refuses another length, it raises there


SHOWN = Shown("causal attention alone, batch 1", "ms per call", ("flash",))
