"""All facts about each attention kernel, except its code. It needs no PyTorch, so that --help is quick."""

import os
from dataclasses import dataclass
from typing import Literal

from fusedgpt.errors import UserError


@dataclass(frozen=True)
class Kernel:
    """The facts about one kernel. ATTENTION in functions.py has its function under the same name."""

    # what the receipt may name, in either direction; empty: PyTorch picks one of the others
    seen: tuple[str, ...]
    sign: str  # a part of its operators' names; empty: it has no operators of its own
    color: str  # in every figure
    mark: str
    scores: Literal["all", "a block", "none"] = "none"  # how much of the T x Tk scores its forward holds
    gpu_only: bool = False
    takes_mask: bool = False  # can attend to a buffer that is filled in part
    package: str = ""  # the package that provides it; empty: PyTorch


# in colours that the colour-blind can tell apart
KERNELS = {
    "manual": Kernel(("unfused",), "", "#000000", "o", scores="all"),
    "blocked": Kernel(("unfused",), "", "#882255", "p", scores="a block"),
    "math": Kernel(("math", "unfused"), "", "#e69f00", "s", scores="all"),  # compiled, it is products and a softmax
    "efficient": Kernel(("efficient",), "efficient", "#56b4e9", "^", gpu_only=True),
    "flash": Kernel(("flash",), "flash", "#0072b2", "D"),
    "cudnn": Kernel(("cudnn",), "cudnn", "#009e73", "v", gpu_only=True),
    "flash3": Kernel(("flash3",), "flash_attn_3::", "#332288", "<", gpu_only=True, package="flash-attn-3"),
    "flash4": Kernel(("flash4",), "flash_attncute", "#8c564b", ">", gpu_only=True, package="flash-attn-4"),
    "flex": Kernel(("flex",), "flex", "#d55e00", "P", gpu_only=True),  # on a CPU it has no backward
    "sdpa": Kernel((), "", "0.5", "x", takes_mask=True),
    "masked": Kernel((), "", "#cc79a7", "X", takes_mask=True),
}
# each of these names means one kernel; for sdpa and masked, PyTorch picks the kernel
SINGLE_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.seen)
OWN = "path/to/file.py:function"  # the form of the name of a user's own kernel


def is_own(name: str) -> bool:
    """Whether `name` means a function in a file of the user's own."""
    return ".py:" in name


def located(name: str) -> str:
    """`name`, but a user's own kernel with the full path of its file: a resumed run may start in another folder."""
    path, _, function = name.rpartition(":")
    return f"{os.path.abspath(path)}:{function}" if is_own(name) else name


def check_name(name: str, *others: str) -> None:
    """Raise UserError unless `name` is a kernel of ours, a user's own, or one of `others`."""
    if name not in (*KERNELS, *others) and not is_own(name):
        raise UserError(f"attention={name!r} is unknown: it can be {', '.join((*KERNELS, *others))}, or {OWN}")


def scores_held(name: str) -> str:
    """How much of the scores the forward of the kernel `name` holds. A user's own is assumed to hold none."""
    return KERNELS[name].scores if name in KERNELS else "none"
