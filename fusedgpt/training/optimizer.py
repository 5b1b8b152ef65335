"""The optimizer of a run: its learning rate, AdamW or Muon, a step that waits for no device, and averaged weights."""

import collections
import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from fusedgpt import eager
from fusedgpt.parallel.distributed import is_shared, local
from fusedgpt.settings import Settings

COOLDOWN = 0.5  # share of lr_decay_iters in which schedule=wsd lowers the learning rate
MOMENTUM = 0.95  # Muon's
TWIN = "twin"  # in a weight's state: its average; while they have changed places (`averaged`, a checkpoint), the weight
# weights that Muon updates at once: on a GPU its products take four stacks, 0.27 GB; on a CPU larger ones cost 3 % more
STACK = {"cpu": 2**18, "cuda": 2**24, "mps": 2**24}


def learning_rate(it: int, s: Settings) -> float:
    """The learning rate of step `it`: with decay_lr, linear warm-up, then the schedule.

    cosine: SGDR, arXiv:1608.03983. wsd (warm-up, stable, decay): MiniCPM, arXiv:2404.06395; its linear and long
    cooldown: arXiv:2405.18392.
    """
    if not s.decay_lr:
        return s.learning_rate
    # AdamW's running means rest on few gradients at first, so the first steps are small; + 1, so that none is 0
    if it < s.warmup_iters:
        return s.learning_rate * (it + 1) / (s.warmup_iters + 1)
    if s.schedule == "constant":
        return s.learning_rate
    if it >= s.lr_decay_iters:
        return s.min_lr
    if s.schedule == "wsd":
        share = min(1.0, (s.lr_decay_iters - it) / (COOLDOWN * s.lr_decay_iters))
    else:
        done = (it - s.warmup_iters) / (s.lr_decay_iters - s.warmup_iters)
        share = 0.5 * (1 + math.cos(math.pi * done))
    return s.min_lr + share * (s.learning_rate - s.min_lr)


class MuonAndAdamW(eager.Optimizer):
    """Muon for the matrices of a model's layers, its last group, and AdamW for all else, seen as one optimizer."""

    # rows: {matrix: those of each of its parts}, which Muon takes as matrices of their own
    def __init__(self, rows: dict[Tensor, tuple[int, ...]], s: Settings, adamw: AdamW, dtype: torch.dtype):
        muon = {"params": [*rows], "lr": s.learning_rate, "weight_decay": s.weight_decay, "momentum": MOMENTUM}
        self.rows, self.adamw, self.dtype = rows, adamw, dtype
        super().__init__([*adamw.param_groups, muon], {})
        self._share()

    def __setstate__(self, state: dict) -> None:  # load_state_dict makes new groups and new state
        super().__setstate__(state)
        self._share()

    def _share(self):
        self.adamw.param_groups, self.adamw.state = self.param_groups[:-1], self.state


def build_optimizer(model: Any, s: Settings, device_type: str, dtype: torch.dtype) -> Optimizer:
    """The optimizer that `s` names, for a GPT on a device of `device_type`. dtype: of Muon's products, as the run's."""
    adamw = model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device_type)
    if s.optimizer == "adamw":
        return adamw
    rows = {p: (p.size(0),) for p in model.transformer.h.parameters() if p.dim() == 2 and p.requires_grad}
    for attn in (block.attn for block in model.transformer.h):  # queries, keys and values apart: docs/findings.md
        rows[attn.c_attn.weight] = tuple(n * attn.head_size for n in attn.heads)
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if p not in rows]
    return MuonAndAdamW(rows, s, adamw, dtype)


def update_weights(optimizer: Optimizer, norm: Tensor, limit: float) -> None:
    """Step on gradients of norm `norm`, clipped to the norm `limit` (0: not clipped), unless `norm` is not finite.

    Muon and a fused AdamW decide that on the device. On MPS the host waits for the norm: there PyTorch's fused kernel
    ignored grad_scale and found_inf until recently (pytorch#186360).
    """
    if isinstance(optimizer, MuonAndAdamW):
        _update_hidden(optimizer, norm, limit)
        optimizer = optimizer.adamw
    if optimizer.defaults["fused"] and norm.device.type != "mps":
        # as GradScaler does: gradients are divided by grad_scale, and nothing changes if found_inf is 1
        optimizer.grad_scale = (norm / limit).clamp(min=1) if limit else None
        optimizer.found_inf = 1 - norm.isfinite().float()
        optimizer.step()
    elif norm.isfinite():
        if limit:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grads_with_norm_(params, limit, norm)
        optimizer.step()


@torch.no_grad()
def exchange(model: Any, optimizer: Optimizer) -> None:
    """Exchange the weights of `model` with their averages, which the optimizer's state holds if a run has any."""
    pairs = [(local(p), local(state[TWIN])) for p, state in optimizer.state.items() if TWIN in state]
    for weight, twin in pairs:
        was = weight.clone()
        weight.copy_(twin)
        twin.copy_(was)
    if pairs and is_shared(model):
        model.reshard()  # drop the whole embeddings, which ranks keep after a forward without a backward


@contextlib.contextmanager
def averaged(model: Any, optimizer: Optimizer) -> Iterator[None]:
    """A context in which `model` has the averages of its weights, if a run keeps any."""
    exchange(model, optimizer)
    try:
        yield
    finally:
        exchange(model, optimizer)


@torch.no_grad()
def _update_hidden(optimizer, norm, limit):
    """Muon's step on the last group, if `norm` is finite: torch.optim.Muon's to the bit. Overwrites the gradients.

    torch.optim.Muon cannot decide on the device to skip a step, multiplies in bfloat16 even on CPUs that only emulate
    it, and takes one matrix at a time.
    """
    group = optimizer.param_groups[-1]
    finite, scale = norm.isfinite(), (norm / limit).clamp(min=1) if limit else 1
    for rows, matrices in _batches([p for p in group["params"] if p.grad is not None], optimizer.rows):
        for p in matrices:
            if "momentum_buffer" not in optimizer.state[p]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        means = [local(optimizer.state[p]["momentum_buffer"]) for p in matrices]
        _update_batch(matrices, means, group, finite, scale, rows, optimizer.dtype)


def _batches(matrices, rows):
    """Group `matrices` into lists of one shape and parts, with at most STACK weights, or one larger matrix."""
    alike = collections.defaultdict(list)
    for p in matrices:
        alike[p.shape, rows[p]].append(p)
    for (shape, parts), each in alike.items():
        n = max(1, STACK[each[0].device.type] // shape.numel())
        yield from ((parts, each[start : start + n]) for start in range(0, len(each), n))


def _update_batch(matrices, means, group, finite, scale, rows, dtype):
    weights, gradients = [local(p) for p in matrices], [local(p.grad) for p in matrices]
    torch._foreach_div_(gradients, scale)
    new_means = torch._foreach_lerp(means, gradients, 1 - group["momentum"])
    torch._foreach_lerp_(gradients, new_means, group["momentum"])  # Nesterov momentum
    for mean, new_mean in zip(means, new_means):
        torch.where(finite, new_mean, mean, out=mean)
    del new_means, new_mean  # free them before the stack is made
    rate = group["lr"] * 0.2 * math.sqrt(max(rows[0], matrices[0].size(1)))  # arXiv:2502.16982: as large as AdamW's
    for p, update in zip(weights, _updates(matrices, gradients, rows, dtype)):
        moved = (p * (1 - group["lr"] * group["weight_decay"])).add_(update, alpha=-rate)
        torch.where(finite, moved, p, out=p)


def _updates(matrices, gradients, rows, dtype):
    """The orthogonalised gradients of `matrices`. If ranks share their rows: from and for this rank's rows of each."""
    if not hasattr(matrices[0], "device_mesh"):
        return _by_parts(gradients, rows, dtype)
    from torch.distributed.tensor import DTensor, distribute_tensor  # takes a second to import

    # bfloat16, in which they are divided by their norms, halves the messages and changes no result; float16 changes it
    sent_in = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    shared = matrices[0].device_mesh, matrices[0].placements
    like = {"run_check": False, "shape": matrices[0].shape, "stride": matrices[0].stride()}
    whole = [DTensor.from_local(each.to(sent_in), *shared, **like).full_tensor() for each in gradients]
    return [distribute_tensor(x, *shared, src_data_rank=None).to_local() for x in _by_parts(whole, rows, dtype)]


def _by_parts(matrices, rows, dtype):
    updates = [orthogonalised(each, dtype) for each in zip(*(m.split(rows) for m in matrices))]
    for update, n in zip(updates[1:], rows[1:]):  # the rate of a step is for the size of the first
        update *= math.sqrt(max(n, update.size(2)) / max(rows[0], update.size(2)))
    return torch.cat(updates, dim=1) if len(rows) > 1 else updates[0]


def orthogonalised(matrices: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`matrices` (rows, columns) with all singular values near 1, as a stack (n, rows, columns) in `dtype`.

    Five steps of Newton-Schulz. Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks".
    """
    # float16 rounds gradients below 3e-8 to 0, so cast to it what has been divided
    divided_in = torch.float32 if dtype == torch.float16 else dtype
    x = torch.empty(len(matrices), *matrices[0].shape, dtype=divided_in, device=matrices[0].device)
    torch._foreach_copy_(x.unbind(), matrices)
    x /= torch.stack(torch._foreach_norm(x.unbind())).clamp(min=1e-7)[:, None, None]  # now no singular value is above 1
    x = x.to(dtype)
    tall = x.size(1) > x.size(2)
    x = x.mT if tall else x
    for _ in range(5):
        a = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.mT if tall else x
