"""One visit to a contender, in a process of its own: proof that it computes the same as ours, then its samples.

Contenders are visited in turn (A B C, A B C), so that a machine that slows down does so for all of them.
"""

import contextlib
import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
from typing import Any

import torch

from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.bench import child, contenders
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import autocast, dtype_name, resolve_compile, resolve_device, resolve_dtype
from fusedgpt.machine.environment import commit

ROOT = pathlib.Path(__file__).resolve().parents[2]
# how much a loss may differ, as a share, from ours in float32. For GPT-2 124M the difference is 2e-7 in float32, 1e-4
# in bfloat16, and 6e-3 without a causal mask
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
SAME_IDS = 4  # first ids that must equal ours if both run in float32; later ids may differ by rounding


def run(part: str, peer: str, s: Any, device: torch.device) -> dict:
    """What a visit to `peer` measured. s: the settings of peers.py.

    Raises ParityError if it does not compute the same as ours, UserError if it cannot run here, MemoryError if memory
    runs out, RuntimeError for any other end.
    """
    asked = dataclasses.asdict(s) | {
        "device": str(device),
        "nanogpt": s.nanogpt and str(pathlib.Path(s.nanogpt).resolve()),
    }
    done = subprocess.run(
        [sys.executable, "-B", "-m", __spec__.name],  # -B: nothing is written into nanoGPT's folder
        input=json.dumps({"part": part, "peer": peer, "settings": asked}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise child.error_of(done, peer)
    answer = json.loads(done.stdout.splitlines()[-1])
    if "parity failed" in answer:
        raise ParityError(answer["parity failed"])
    return answer


def visit(part: str, peer: str, asked: dict) -> dict:
    """The part of `run` that runs in the child process."""
    s, device = contenders.settings(part, peer, asked), resolve_device(asked["device"])
    if device.type == "cpu":
        memory.keep_freed_memory(keep=True)  # for every contender, though only train.py does so by itself
    state = contenders.initial_weights(s)
    contender = contenders.build(peer, state, s)
    measure = {"training": _train, "generation": _generate}[part]
    found = measure(contender, state, s, device)
    embedding = contender.model.get_parameter("transformer.wte.weight")
    ran = {"device": str(device), "ids": contender.ids, "rows_of_embedding": len(embedding)}
    ran |= {"parameters": sum(p.numel() for p in contender.model.parameters())}
    ran |= {"positions": contender.model.get_parameter("transformer.wpe.weight").numel()}
    if isinstance(contender, contenders.NanoGPT):
        ran["commit"] = commit(s.nanogpt)
    return {**timing.summary(found["samples_ms"]), **found, "ran": found["ran"] | ran}


def _train(contender, state, s, device):
    """Steps of AdamW on one batch of random ids, the same for every contender."""
    dtype = resolve_dtype(s.dtype, device)
    if dtype not in ALLOWED:
        raise UserError(f"dtype={dtype_name(dtype)!r} would need a scaler of gradients: take bfloat16 or float32")
    idx = _random_ids(s, (s.batch_size, s.block_size + 1), device)
    x, y = idx[:, :-1].contiguous(), idx[:, 1:].contiguous()
    contender.model.to(device)
    reference = contenders.reference(contender, state, s).to(device)
    want, errors = _prove(contender, reference, x, y)
    del reference
    attention = contender.prepare(s, device, backward=True)
    compiled, why_eager = resolve_compile(s.compile, device)
    if s.compile is True and not compiled:
        raise UserError(why_eager)
    torch.backends.cuda.matmul.allow_tf32 = s.tf32
    if compiled:
        contender.model.compile()
    optimizer, cast = contender.optimizer(s, device), autocast(device, dtype)

    def forward_backward():
        with cast:
            loss = contender.loss(x, y)
        loss.backward()
        return loss.detach()

    forward_backward()  # the first call compiles
    receipt = observe(forward_backward)
    if reason := contradiction(attention, receipt, Case.of_model(s, s.batch_size, device, dtype)):
        raise UserError(reason)
    optimizer.zero_grad(set_to_none=True)
    state.clear()
    gc.collect()
    gc.freeze()
    memory.reset_peak_memory(device)
    clock, losses = timing.StepClock(device), []
    for _ in range(s.steps):
        clock.start()
        losses.append(forward_backward())
        contender.update(optimizer, s)
        optimizer.zero_grad(set_to_none=True)
        clock.stop()
    ms, peak, losses = clock.read()[child.WARM_UP :], memory.peak_memory(device), torch.stack(losses).tolist()
    rounded = torch.bfloat16 if s.tf32 and device.type == "cuda" else dtype
    errors["first step"] = _same(losses[0], want, ALLOWED[rounded], f"at the first step in {dtype_name(dtype)}")
    ran = {
        "attention": attention,
        "dtype": dtype_name(dtype),
        "compile": compiled,
        "fused": bool(optimizer.defaults["fused"]),
    }
    found = {"samples_ms": ms, "tokens": s.batch_size * s.block_size, "peak_memory": peak, "kernel": receipt}
    found |= {"first_loss": losses[0], "our_loss": want, "last_loss": losses[-1], "errors": errors}
    return found | {"ran": ran}


def _random_ids(s, shape, device):
    return torch.randint(s.vocab_size, shape, generator=torch.Generator().manual_seed(s.seed)).to(device)


@torch.no_grad()
def _prove(contender, reference, x, y):
    """Our loss, and its difference from `contender`'s, both in float32. Raises ParityError if it differs too much."""
    want = reference(x, y, logits=False)[1].item()
    error = _same(contender.loss(x, y).item(), want, ALLOWED[torch.float32], "in float32")
    return want, {"float32": error}


def _same(got, want, allowed, where):
    error = abs(got / want - 1)
    if not error <= allowed:  # `not <=` catches NaN too
        raise ParityError(
            f"its loss {where} is {got:.6g}, ours with the same weights and batch {want:.6g}: a difference of"
            f" {error:.1e}, allowed {allowed:.0e}"
        )
    return error


def _generate(contender, state, s, device):
    """The likeliest ids after a random prompt, one sample."""
    idx = _random_ids(s, (1, s.prompt_tokens), device)
    contender.model.to(device).eval()
    reference = contenders.reference(contender, state, s).to(device).eval()
    _, errors = _prove(contender, reference, idx[:, :-1], idx[:, 1:])
    want = reference.generate(idx, s.new_tokens, temperature=0)
    del reference
    state.clear()
    gc.collect()
    attention = contender.prepare(s, device, backward=False)
    torch.backends.cuda.matmul.allow_tf32 = s.tf32
    got = contender.generate(idx, s.new_tokens)  # warms up, too
    if got.shape != want.shape:
        raise ParityError(f"it made {got.size(1) - s.prompt_tokens} new tokens, and {s.new_tokens} were asked for")
    memory.reset_peak_memory(device)
    first = timing.samples(lambda: contender.generate(idx, 1), device, s.repeats, warmup=1)
    ms = timing.samples(lambda: contender.generate(idx, s.new_tokens), device, s.repeats, warmup=0)
    equal = (got == want)[0, s.prompt_tokens :].long().cumprod(dim=0).sum().item()
    exact = contender.dtypes == (torch.float32,) * 2 and not (s.tf32 and device.type == "cuda")
    if exact and equal < min(SAME_IDS, s.new_tokens):  # the proof before this was of a prompt, without a cache
        raise ParityError(f"in float32 it generates {equal} ids that are ours, and then others")
    found = {"samples_ms": ms, "tokens": s.new_tokens, "first_token_ms": first, "equal_ids": equal, "errors": errors}
    found |= {"peak_memory": memory.peak_memory(device), "bandwidth": memory.bandwidth(device)}
    prefill, one = map(dtype_name, contender.dtypes)
    ran = {"attention": attention, "compile": s.compile is True, "dtype": prefill, "decodes_in": one}
    return found | {"ran": ran}


if __name__ == "__main__":
    with one_sentence():
        task = json.load(sys.stdin)
        with contextlib.redirect_stdout(sys.stderr):  # nanoGPT prints
            try:
                answer = visit(task["part"], task["peer"], task["settings"])
            except ParityError as error:
                answer = {"parity failed": str(error)}
        print(json.dumps(answer))
