"""Which FlashAttention is PyTorch's flash kernel: its own, which is version 2, or version 3 or 4 from a package."""

import warnings

from torch.nn import attention


def use(version: str | None) -> None:
    """Make FlashAttention "FA3" or "FA4" the flash kernel of the whole process, or PyTorch's own again (None).

    Raises what the package raises; ImportError if it is not installed.
    """
    if attention.current_flash_attention_impl() == version:
        return
    if not version:
        attention.restore_flash_attention_impl()
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced, but that is the purpose
        attention.activate_flash_attention_impl(version)


# With this mark, a compiled model calls `use` while it is traced. torch.compiler.assume_constant_result(use) does the
# same, but it imports torch._dynamo, which would delay every start of every script by a second.
use._dynamo_marked_constant = True
