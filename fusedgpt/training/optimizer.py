"""The optimizer of a run: its learning rate at each step, AdamW or Muon, and a step that waits for no device."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from fusedgpt.machine.device import multiplies_bfloat16
from fusedgpt.settings import Settings

COOLDOWN = 0.5  # share of lr_decay_iters in which schedule=wsd lowers the learning rate
MOMENTUM = 0.95  # Muon's


def learning_rate(it: int, s: Settings) -> float:
    """The learning rate of step `it`: linear warm-up, then the schedule.

    All but `constant` reach min_lr at lr_decay_iters. cosine: SGDR, arXiv:1608.03983. wsd (warm-up, stable, decay):
    MiniCPM, arXiv:2404.06395; its linear and long cooldown: arXiv:2405.18392.
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


class MuonAndAdamW(Optimizer):
    """Muon for the matrices of a model's layers, AdamW for all else: whoever saves or unscales it sees one optimizer.

    `update_weights` makes its steps. The last group is Muon's.
    """

    def __init__(self, matrices: list[Tensor], s: Settings, adamw: AdamW):
        muon = {"params": matrices, "lr": s.learning_rate, "weight_decay": s.weight_decay, "momentum": MOMENTUM}
        self.adamw = adamw
        super().__init__([*adamw.param_groups, muon], {})
        self._share()

    def __setstate__(self, state: dict) -> None:
        """Called by load_state_dict, which makes new groups and new state."""
        super().__setstate__(state)
        self._share()

    def _share(self):
        self.adamw.param_groups, self.adamw.state = self.param_groups[:-1], self.state


def build_optimizer(model: Any, s: Settings, device_type: str) -> Optimizer:
    """The optimizer that `s` names, for a GPT on a device of `device_type`."""
    adamw = model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device_type)
    if s.optimizer == "adamw":
        return adamw
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    hidden = set(matrices)
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if p not in hidden]
    return MuonAndAdamW(matrices, s, adamw)


def update_weights(optimizer: Optimizer, norm: Tensor, limit: float) -> None:
    """Step on gradients of norm `norm`, clipped to the norm `limit` (0: not clipped), unless `norm` is not finite.

    Muon and a fused AdamW decide that on the device, so that the host need not wait for the norm.
    """
    if isinstance(optimizer, MuonAndAdamW):
        _update_hidden(optimizer, norm, limit)
        optimizer = optimizer.adamw
    if optimizer.defaults["fused"]:
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
def _update_hidden(optimizer, norm, limit):
    """Muon's step on the last group if `norm` is finite, the same to the bit as torch.optim.Muon's.

    torch.optim.Muon cannot decide on the device to skip a step, and multiplies in bfloat16 even on CPUs that cannot.
    """
    group = optimizer.param_groups[-1]
    finite, scale = norm.isfinite(), (norm / limit).clamp(min=1) if limit else 1
    dtype = torch.bfloat16 if multiplies_bfloat16(norm.device) else torch.float32
    for p in group["params"]:
        gradient, mean = p.grad / scale, optimizer.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        new_mean = mean.lerp(gradient, 1 - group["momentum"])
        ahead = gradient.lerp(new_mean, group["momentum"])  # Nesterov momentum
        rate = group["lr"] * 0.2 * math.sqrt(max(p.shape))  # arXiv:2502.16982: the update has the size of AdamW's
        moved = (p * (1 - group["lr"] * group["weight_decay"])).add_(orthogonalised(ahead, dtype), alpha=-rate)
        mean.copy_(torch.where(finite, new_mean, mean))
        p.copy_(torch.where(finite, moved, p))


def orthogonalised(m: Tensor, dtype: torch.dtype) -> Tensor:
    """`m` (rows, columns) with all its singular values near 1: five steps of Newton-Schulz in `dtype`.

    Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks", with its coefficients.
    """
    tall = m.size(0) > m.size(1)
    x = (m.T if tall else m).to(dtype)
    x = x / x.norm().clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(5):
        a = x @ x.T
        x = torch.addmm(x, torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x
