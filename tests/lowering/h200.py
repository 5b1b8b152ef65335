"""An H200 for PyTorch's compiler where there is none: what the compiler asks a device, answered from its data sheet.

Nothing can run on it. tests/lowering/guard.cpp has the part of it that PyTorch's C++ code asks.
"""

import types

import torch
from torch._subclasses import fake_tensor

PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=150_000_000_000,
    L2_cache_size=60 * 2**20,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    gcnArchName="",
    is_integrated=0,
)


class Driver:
    """Triton's view of the device."""

    utils = types.SimpleNamespace(
        get_device_properties=lambda device: {
            "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
            "multiprocessor_count": PROPERTIES.multi_processor_count,
            "warpSize": PROPERTIES.warp_size,
            "max_num_regs": PROPERTIES.regs_per_multiprocessor,
        },
        load_binary=None,
    )

    @classmethod
    def is_active(cls):
        return True

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 10 * PROPERTIES.major + PROPERTIES.minor, PROPERTIES.warp_size)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)


def install() -> None:
    """Make PyTorch and Triton of this process find the device."""
    import triton

    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "get_device_name": PROPERTIES.name,
        "mem_get_info": (PROPERTIES.total_memory, PROPERTIES.total_memory),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "synchronize": None,
        "set_device": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice", "getCurrentRawStream"):
        setattr(torch._C, f"_cuda_{name}", lambda *_: 0)
    torch._C._cuda_getDeviceCount = lambda: 1
    torch.version.cuda = "13.0"
    torch.accelerator.is_available = lambda: False
    fake_tensor.init_gpu_context = lambda device: None
    triton.runtime.driver.set_active(Driver())
