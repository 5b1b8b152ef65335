"""One visit to a contender, in a process of its own: a proof that it computes the same as ours, then its samples.

Contenders are visited in turn (A B C, A B C), so that a machine that slows down does so for all of them.
"""

import dataclasses
import gc
import json
import pathlib
import subprocess
import sys
import types
from typing import Any

import torch
from torch import Tensor

from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import located
from fusedgpt.bench import child, contenders
from fusedgpt.bench.proof import ParityError
from fusedgpt.dimensions import GPTConfig
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.home import SCRIPTS
from fusedgpt.machine import memory, timing
from fusedgpt.machine.device import autocast, dtype_name, resolve_compile, resolve_device, resolve_dtype
from fusedgpt.machine.environment import commit

# largest relative difference of a loss from ours in float32. For GPT-2 124M the difference is 2e-7 in float32, 1e-4 in
# bfloat16, and 6e-3 without a causal mask
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
SAME_IDS = 4  # first ids that must equal ours if both run in float32; later ids may differ by rounding


def run(part: str, peer: str, s: Any, device: torch.device) -> dict:
    """What a visit to `peer` measured. s: the settings of peers.py.

    Raises ParityError if `peer` does not compute the same as ours, UserError if it cannot run here, MemoryError if
    memory runs out, RuntimeError if it ends otherwise.
    """
    asked = dataclasses.asdict(s) | {"device": str(device), "attention": located(s.attention)}
    asked["nanogpt"] = str(pathlib.Path(s.nanogpt).resolve())
    # -B: write no bytecode into nanoGPT's folder
    command = [sys.executable, "-B", "-m", __spec__.name, json.dumps([part, peer, asked])]
    done = subprocess.run(command, cwd=SCRIPTS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise child.error_of(done, peer)
    answer = json.loads(done.stdout.splitlines()[-1])  # nanoGPT prints lines before it
    if "parity failed" in answer:
        raise ParityError(answer["parity failed"])
    return answer


def visit(part: str, peer: str, asked: dict) -> dict:
    """What `run` does in the child process. asked: the settings."""
    s, device = contenders.settings(part, peer, asked), resolve_device(asked["device"])
    if device.type == "cpu":
        memory.keep_freed_memory(keep=True)  # for all contenders, because only train.py does so by itself
    contender, idx, ours = proven(part, peer, s, device)
    shapes = {name: w.shape for name, w in contender.model.named_parameters()}  # before prepare(), which packs weights
    trains = part in contenders.STEPS
    attention = contender.prepare(s, device, backward=trains)
    torch.backends.cuda.matmul.allow_tf32 = s.tf32
    if trains:
        found = _train(contender, *next_ids(idx), ours["loss"], attention, s, device)
    else:
        found = _generate(contender, idx, ours["ids"], s, device)
    if device.type != "cuda":
        del found["peak_memory"]  # the process keeps what the reference and the first loss freed
    (embedding,) = (shape for name, shape in shapes.items() if name.endswith(("wte.weight", "embed_tokens.weight")))
    parameters = sum(shape.numel() for shape in shapes.values())
    # a token reads a row of these and multiplies none: GPTConfig.looked_up
    looked_up = sum(shape.numel() for name, shape in shapes.items() if name.endswith("wpe.weight"))
    looked_up += embedding.numel() * any(name.endswith("lm_head.weight") for name in shapes)
    found["errors"]["float32"] = ours["error"]
    found["ran"] |= {
        "attention": attention,
        "device": str(device),
        "tf32": _multiplies_tf32(s, device),
        "ids": contender.ids,
        "rows_of_embedding": embedding[0],
        "parameters": parameters,
        "looked_up": looked_up,
        # GPT.flops_per_token's rule, for all
        "flops_per_token": 6 * (parameters - looked_up) + ours["flops_in_attention"],
    }
    if isinstance(contender, contenders.NanoGPT):
        found["ran"]["commit"] = commit(s.nanogpt)
    return timing.summary(found["samples_ms"]) | found


def proven(
    part: str, peer: str, s: types.SimpleNamespace, device: torch.device
) -> tuple[contenders.Contender, Tensor, dict]:
    """(the contender `peer`, which computes our loss, the ids of its part, and what ours computes from them).

    s: its settings. The ids are (B, T + 1) to train, (1, T) to generate. What ours computes, in float32: its `loss`,
    the `error` of the contender's, its greedy `ids` (to generate) and the `flops_in_attention` of a token.
    Raises ParityError if the contender computes another loss.
    """
    state = contenders.initial_weights(s)
    contender = contenders.build(peer, state, s)
    contender.model.to(device)
    reference = contenders.reference(contender, state, s).to(device)
    trains = part in contenders.STEPS
    shape = (s.batch_size, s.block_size + 1) if trains else (1, s.prompt_tokens)
    idx = torch.randint(s.vocab_size, shape, generator=torch.Generator().manual_seed(s.seed)).to(device)
    x, y = next_ids(idx)
    with torch.no_grad():
        loss = reference(x, y, logits=False)[1].item()
        error = _same(contender.loss(x, y).item(), loss, ALLOWED[torch.float32], "in float32")
        ids = None if trains else reference.generate(idx, s.new_tokens, temperature=0)
    in_attention = reference.flops_per_token() - 6 * reference.get_num_params()
    del reference, state
    gc.collect()
    return contender, idx, {"loss": loss, "error": error, "ids": ids, "flops_in_attention": in_attention}


def next_ids(idx: Tensor) -> tuple[Tensor, Tensor]:
    """(x, y), both (B, T), from ids (B, T + 1): y has the id after each of x."""
    return idx[:, :-1].contiguous(), idx[:, 1:].contiguous()


def _train(contender, x, y, want, attention, s, device):
    """Time steps of AdamW on one batch of random ids, the same for all contenders. want: our first loss."""
    dtype = resolve_dtype(s.dtype, device)
    if dtype not in ALLOWED:
        raise UserError(f"dtype={dtype_name(dtype)!r} would need a scaler of gradients: take bfloat16 or float32")
    compiled, why_eager = resolve_compile(s.compile, device)
    if s.compile is True and not compiled:
        raise UserError(why_eager)
    if compiled:
        contender.model.compile()
    optimizer, cast = contender.optimizer(s, device), autocast(device, dtype)

    def forward_backward():
        with cast:
            loss = contender.loss(x, y)
        loss.backward()
        return loss.detach()

    forward_backward()  # the first call compiles
    case = Case.of_model(GPTConfig.of(s), s.batch_size, device, dtype)
    receipt = observe(forward_backward, case=case)
    if reason := contradiction(attention, receipt, case):
        raise UserError(reason)
    optimizer.zero_grad(set_to_none=True)
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
    name, allowed = dtype_name(dtype), ALLOWED[torch.bfloat16 if _multiplies_tf32(s, device) else dtype]
    return {
        "samples_ms": ms,
        "tokens": s.batch_size * s.block_size,
        "peak_memory": peak,
        "kernel": receipt,
        "first_loss": losses[0],
        "our_loss": want,
        "last_loss": losses[-1],
        "errors": {"first step": _same(losses[0], want, allowed, f"at the first step in {name}")},
        "ran": {"dtype": name, "compile": compiled, "fused": bool(optimizer.defaults["fused"])},
    }


def _multiplies_tf32(s, device):
    return s.tf32 and device.type == "cuda"


def _same(got, want, allowed, where):
    """The relative difference of a loss from ours. Raises ParityError if it is more than `allowed`."""
    error = abs(got / want - 1)
    if not error <= allowed:  # `not <=` catches NaN too
        raise ParityError(
            f"its loss {where} is {got:.6g}, ours with the same weights and batch {want:.6g}: a difference of"
            f" {error:.1e}, allowed {allowed:.0e}"
        )
    return error


def _generate(contender, idx, want, s, device):
    """Time greedy generation after a random prompt. want: our ids in float32."""
    contender.model.eval()
    got = contender.generate(idx, s.new_tokens)  # also warms up
    if got.shape != want.shape:
        raise ParityError(f"it made {got.size(1) - s.prompt_tokens} new tokens, not {s.new_tokens}")
    memory.reset_peak_memory(device)
    first = timing.samples(lambda: contender.generate(idx, 1), device, s.repeats, warmup=1)
    ms = timing.samples(lambda: contender.generate(idx, s.new_tokens), device, s.repeats, warmup=0)
    equal = (got == want)[0, s.prompt_tokens :].long().cumprod(dim=0).sum().item()
    exact = contender.dtypes == (torch.float32,) * 2 and not _multiplies_tf32(s, device)
    if exact and equal < min(SAME_IDS, s.new_tokens):  # the loss was compared without a cache
        raise ParityError(f"in float32 only its first {equal} ids equal ours, not {min(SAME_IDS, s.new_tokens)}")
    prefill, decode = map(dtype_name, contender.dtypes)
    return {
        "samples_ms": ms,
        "tokens": s.new_tokens,
        "first_token_ms": first,
        "equal_ids": equal,
        "peak_memory": memory.peak_memory(device),
        "bandwidth": memory.bandwidth(device),
        "errors": {},
        "ran": {"compile": s.compile is True, "dtype": prefill, "decodes_in": decode},
    }


if __name__ == "__main__":
    with one_sentence():
        try:
            answer = visit(*json.loads(sys.argv[1]))
        except ParityError as error:
            answer = {"parity failed": str(error)}
        print(json.dumps(answer))
