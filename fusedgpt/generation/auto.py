"""What 'auto' means for a text: the kernel, and the dtypes of its prompt and of its tokens, timed on this machine."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.errors import UserError
from fusedgpt.generation import engines, generate
from fusedgpt.machine.device import DTYPES, dtype_name, resolve_compile, resolve_dtype


def prepare(s: Any, model: Any, prompt_length: int, device: torch.device, say: Callable[[str], None]) -> engines.Engine:
    """The GPT `model`, ready to generate on the device, with the settings of sample.py, `s`.

    Raises UserError if the kernel cannot run here, or be compiled.
    """
    compiled, why_eager = resolve_compile(s.compile, device)
    model.use_attention("sdpa")  # dtypes are timed with it, because a kernel is tried in the dtype that it runs in
    dtypes, chosen = _dtypes(s, model, prompt_length, device)
    # a trial at all of a long context could take more time and memory than the text will
    longest = generate.capacity(model.config, prompt_length + s.max_new_tokens)
    read = dataclasses.replace(model.config, block_size=longest)
    prompts = Case.of_layers(read, s.num_samples, device, dtypes[0], backward=False)
    # a kernel may take a whole prompt but refuse one token after many, which attends in the cache's dtype
    cached = generate.cache_dtype(device, dtypes[1])
    cases = [*prompts, *(dataclasses.replace(case.one_query(), dtype=cached) for case in prompts)]
    attention, _ = choose.choose(s.attention, *cases, compiled=compiled)
    model.use_attention(attention)
    if s.attention == "auto":
        chosen.append(f"attention {attention}; the same again: --attention={attention}")
    engine = engines.prepare(model, device, dtypes, s.num_samples, prompt_length, s.max_new_tokens, compiled)
    engine.chosen = "\n".join(chosen)
    if why_eager:
        say(why_eager)
    return engine


def _dtypes(s, model, prompt_length, device):
    """The dtypes of the prompt and of the tokens after it, and a line on what 'auto' chose, if it chose."""
    if s.decode_dtype and device.type != "cpu":  # keys would have two dtypes
        raise UserError(f"decode_dtype={s.decode_dtype} is for CPUs, and this is {device}: give --dtype alone")
    second = DTYPES.get(s.decode_dtype)
    if s.dtype != "auto" or device.type != "cpu":
        first = resolve_dtype(s.dtype, device)
        return (first, second or first), []
    (first, of_tokens), words = engines.fastest_dtypes(model, s.num_samples, prompt_length)
    words, second = (words.partition("; ")[0], second) if second else (words, of_tokens)
    flags = f"--dtype={dtype_name(first)} --decode_dtype={dtype_name(second)}"
    return (first, second), [f"{words}; the same again: {flags}"]
