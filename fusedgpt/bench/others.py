"""Other projects' models, and ours beside them, as contenders of peers.py: a training step, and greedy generation.

Before it takes turns, each computes our loss in float32, with the same weights and batch.
"""

import dataclasses

import torch
from torch import nn

from fusedgpt.attention.case import Case
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.bench import training
from fusedgpt.bench.foreign import NanoGPT, Transformers
from fusedgpt.bench.proof import ParityError
from fusedgpt.data.dataloader import DataLoader
from fusedgpt.errors import UserError
from fusedgpt.generation import engines, generate
from fusedgpt.interchange.pretrained import to_transformers
from fusedgpt.machine import determinism, flops, memory, timing
from fusedgpt.machine.device import autocast, dtype_name, resolve_compile, resolve_dtype
from fusedgpt.machine.environment import commit
from fusedgpt.machine.turns import Turn
from fusedgpt.training.optimizer import learning_rate
from model import GPT, GPTConfig

# largest relative difference of a loss from ours in float32. For GPT-2 124M the difference is 2e-7 in float32, 1e-4 in
# bfloat16, and 6e-3 without a causal mask
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 3e-3}
SAME_IDS = 4  # first ids that must equal ours if both run in float32; later ids may differ by rounding
INITIAL_SCALE = 4  # factor on the blocks' matrices to generate; without it, greedy ids soon repeat, whatever the dtype


def training_step(name: str, s, device: torch.device) -> tuple[Turn, dict]:
    """A training step of another project's model, on the batches that ours gets."""
    step = _Step(name, s, device)
    kernel, (peak, source) = step.prove(), flops.peak_flops(device, step.dtype)
    ran = {"attention": "sdpa", "dtype": dtype_name(step.dtype), "compile": step.compiled, "ids": step.contender.ids}
    if name.startswith("nanoGPT"):
        ran["commit"] = commit(s.nanogpt)
    turn, found = training.warmed_up(step, device)
    return turn, found | {
        "tokens": s.batch_size * s.block_size,
        "kernel": kernel,
        "errors": step.errors,
        "ran": ran,
        "flops_per_token": step.flops_per_token,
        "peak_flops": peak,
        "peak_source": source,
    }


class _Step:
    """A step of another project's model: autocast, clipping and AdamW around it, as in its own loop."""

    def __init__(self, name, s, device):
        folder, meta = training.data(s)
        self.s, self.device, self.dtype = s, device, resolve_dtype(s.dtype, device)
        if self.dtype not in ALLOWED:
            raise UserError(f"dtype={dtype_name(self.dtype)!r} needs a scaler of gradients: take bfloat16 or float32")
        self.compiled, why_eager = resolve_compile(s.compile, device)
        if s.compile is True and not self.compiled:
            raise UserError(why_eager)
        memory.keep_freed_memory(keep=True)  # as train.py does
        self.contender, ours = _beside_ours(name, s, _config(s, s.vocab_size or meta["vocab_size"]), device)
        self.batches = DataLoader(folder, meta, s.block_size, s.batch_size, s.seed, device, 0, 1).batches(0, range(1))
        self.batch, self.iteration = next(self.batches), 0
        with torch.no_grad():
            self.want = ours(*self.batch, logits=False)[1].item()
            got = self.contender.loss(*self.batch).item()
        self.errors = {"float32": _same(got, self.want, ALLOWED[torch.float32], "in float32")}
        self.flops_per_token = ours.config.flops_per_token
        if self.compiled:
            self.contender.model.compile()
        self.optimizer, self.cast = _adamw(name, self.contender, s, device), autocast(device, self.dtype)

    def prove(self):
        """The receipt of a step. Raises ParityError if the first loss is not ours, UserError for another kernel."""
        first = self._forward_backward().item()  # compiles
        self.errors["first step"] = _same(first, self.want, ALLOWED[self.dtype], f"in {dtype_name(self.dtype)}")
        case, *_ = Case.of_layers(_config(self.s, self.contender.ids), self.s.batch_size, self.device, self.dtype)
        receipt = observe(self._forward_backward)
        if reason := contradiction("sdpa", receipt, case):
            raise UserError(reason)
        self.optimizer.zero_grad(set_to_none=True)
        return receipt

    def _forward_backward(self):
        with self.cast:
            loss = self.contender.loss(*self.batch)
        loss.backward()
        return loss.detach()

    def __call__(self):
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.iteration, self.s)
        loss = self._forward_backward()
        self.batch, self.iteration = next(self.batches), self.iteration + 1
        if self.s.grad_clip:
            nn.utils.clip_grad_norm_(self.contender.model.parameters(), self.s.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss


@torch.no_grad()
def generation(name: str, s, device: torch.device) -> tuple[Turn, dict]:
    """Greedy generation after a random prompt; before, its loss and its first ids are compared with ours."""
    memory.keep_freed_memory(keep=True)
    vocab_size = s.vocab_size or training.data(s)[1]["vocab_size"]
    config, dtypes = _config(s, vocab_size), (resolve_dtype(s.dtype, device),) * 2
    idx = torch.randint(vocab_size, (1, s.prompt_tokens), generator=torch.Generator().manual_seed(s.seed)).to(device)
    if name.startswith("ours"):
        determinism.seed(s.seed, "init")
        ours = GPT(config).to(device)
        _scale(ours)
        sizes = dict(prompt_length=s.prompt_tokens, new_tokens=s.new_tokens, compiled=s.compile is True)
        engine = engines.prepare(ours, device, s.dtype, **sizes)
        dtypes = engine.dtypes

        def sample():
            ids = generate.new_tokens(engine, idx, s.new_tokens, temperature=0, cache=engine.cache)
            return torch.cat([idx, *ids], dim=1)
    else:
        contender, ours = _beside_ours(name, s, config, device)
        _scale(ours)
        _scale(contender.model)
        x, y = idx[:, :-1], idx[:, 1:].contiguous()
        _same(contender.loss(x, y).item(), ours(x, y)[1].item(), ALLOWED[torch.float32], "in float32")
        contender.model.to(dtypes[0]).eval()
        if s.compile is True:
            contender.compile_decode(device)

        def sample():
            return contender.generate(idx, s.new_tokens)

    want, got = ours.generate(idx, s.new_tokens, temperature=0), sample()
    if got.shape != want.shape:
        raise ParityError(f"it made {got.size(1) - s.prompt_tokens} new tokens, not {s.new_tokens}")
    equal, least = (got == want)[0, s.prompt_tokens :].long().cumprod(dim=0).sum().item(), min(SAME_IDS, s.new_tokens)
    if set(dtypes) == {torch.float32} and equal < least:  # the loss was compared without a cache
        raise ParityError(f"in float32 only its first {equal} ids equal ours, not {least}")
    ran = {"compile": s.compile is True, "prompt": dtype_name(dtypes[0]), "tokens": dtype_name(dtypes[1])}
    return timing.Steps(sample, device), {"tokens": s.new_tokens, "equal_ids": equal, "ran": ran}


def _config(s, vocab_size):
    return GPTConfig.of(s, vocab_size=vocab_size, activation=s.activation or "gelu_tanh", dropout=0.0)


def _beside_ours(name, s, config, device):
    """(the contender, our GPT with its weights, which computes what it should), both in float32 on `device`."""
    determinism.seed(s.seed, "init")
    ours = GPT(config)
    if name.startswith("nanoGPT"):  # it does not tell padding from other ids
        ours = GPT(dataclasses.replace(config, vocab_size=config.padded_vocab_size))
    state = ours.state_dict()
    if name.startswith("Hugging"):  # GPT2LMHeadModel always has biases; new ones are 0
        contender = Transformers(to_transformers(config, state, attn_implementation="sdpa"))
    else:
        contender = NanoGPT(s.nanogpt, ours.config, state)
    contender.model.to(device)
    ours.use_attention("manual")
    return contender, ours.to(device)


def _adamw(name, contender, s, device):
    if name.startswith("nanoGPT"):
        model = contender.model
        return model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device.type)
    groups = [
        {"params": [p for p in contender.model.parameters() if p.dim() >= 2], "weight_decay": s.weight_decay},
        {"params": [p for p in contender.model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=s.learning_rate, betas=(s.beta1, s.beta2), fused=True)


def _same(got, want, allowed, where):
    """The relative difference of a loss from ours. Raises ParityError if it is more than `allowed`."""
    error = abs(got / want - 1)
    if not error <= allowed:  # `not <=` catches NaN too
        raise ParityError(
            f"its loss {where} is {got:.6g}, ours with the same weights and batch {want:.6g}: a difference of"
            f" {error:.1e}, allowed {allowed:.0e}"
        )
    return error


def _scale(model):
    for name, p in model.named_parameters():
        if p.dim() == 2 and ".h." in name:
            p *= INITIAL_SCALE
