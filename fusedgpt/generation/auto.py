"""What 'auto' means for a text: the kernel, and the dtypes of its prompt and of its tokens, timed or remembered."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from fusedgpt.attention import choose
from fusedgpt.attention.case import Case
from fusedgpt.errors import UserError
from fusedgpt.generation import engines, generate
from fusedgpt.machine import choices
from fusedgpt.machine.device import DTYPES, dtype_name, resolve_compile, resolve_dtype


def prepare(s: Any, model: Any, prompt_length: int, device: torch.device, say: Callable[[str], None]) -> engines.Engine:
    """The GPT `model`, ready to generate on the device, with the settings of sample.py, `s`.

    Raises UserError if the kernel cannot run here, or be compiled.
    """
    remembered = choices.Choices(again=s.choose == "again")
    compiled, why_eager = resolve_compile(s.compile, device)
    model.use_attention("sdpa")  # dtypes are timed with it, because a kernel is tried in the dtype that it runs in
    dtypes, chosen = _dtypes(s, model, prompt_length, device, compiled, remembered)
    # a trial at all of a long context could take more time and memory than the text will
    longest = generate.capacity(model.config, prompt_length + s.max_new_tokens)
    read = dataclasses.replace(model.config, block_size=longest)
    prompts = Case.of_layers(read, s.num_samples, device, dtypes[0], backward=False)
    # a kernel may take a whole prompt but refuse one token after many, which attends in the cache's dtype
    cached = generate.cache_dtype(device, dtypes[1])
    cases = [*prompts, *(dataclasses.replace(case.one_query(), dtype=cached) for case in prompts)]
    attention, words = _attention(s.attention, cases, compiled, remembered)
    model.use_attention(attention)
    engine = engines.prepare(model, device, dtypes, s.num_samples, prompt_length, s.max_new_tokens, compiled)
    engine.chosen = "\n".join([*chosen, *words])
    for line in filter(None, [why_eager, *remembered.notes]):
        say(line)
    return engine


def _attention(name, cases, compiled, remembered):
    """The kernel that the setting `name` means for `cases`, and a line on what 'auto' chose, if it chose."""
    if name != "auto":
        return choose.choose(name, *cases, compiled=compiled)[0], []
    case = {"for": "attention", **choices.machine(cases[0].device), "cases": [*map(str, cases)], "compiled": compiled}
    past = remembered.recall(case)
    if not (past and choose.still_runs(past["attention"], *cases, compiled=compiled)):
        past = {"attention": choose.choose(name, *cases, compiled=compiled)[0]}
        remembered.remember(case, past)
    chosen = past["attention"]
    return chosen, [f"attention {chosen}, {_when(past)}; the same again: --attention={chosen}"]


def _when(past):
    return f"remembered from {past['when']}" if "when" in past else "timed now"


def _dtypes(s, model, prompt_length, device, compiled, remembered):
    """The dtypes of the prompt and of the tokens after it, and a line on what 'auto' chose, if it chose."""
    if s.decode_dtype and device.type != "cpu":  # keys would have two dtypes
        raise UserError(f"decode_dtype={s.decode_dtype} is for CPUs, and this is {device}: give --dtype alone")
    second = DTYPES.get(s.decode_dtype)
    if s.dtype != "auto" or device.type != "cpu":
        first = resolve_dtype(s.dtype, device)
        return (first, second or first), []
    rows = engines.timed_rows(model.config, s.num_samples, prompt_length)
    shape = {"samples": s.num_samples, "rows": rows, "compiled": compiled}
    case = {"for": "dtypes", **choices.machine(device), "model": str(model.config), **shape}
    past = remembered.recall(case)
    if not past:
        dtypes, words = engines.fastest_dtypes(model, s.num_samples, prompt_length, compiled)
        past = dict(zip(("prompt", "tokens"), map(dtype_name, dtypes)), words=words)
        remembered.remember(case, past)
    first, second = DTYPES[past["prompt"]], second or DTYPES[past["tokens"]]
    flags = f"--dtype={dtype_name(first)} --decode_dtype={dtype_name(second)}"
    return (first, second), [f"{past['words']}, {_when(past)}; the same again: {flags}"]
