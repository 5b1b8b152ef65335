"""The optimizer of a run: its learning rate at each step, AdamW or Muon, and a step that waits for no device."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Muon, Optimizer

from fusedgpt.settings import Settings

COOLDOWN = 0.5  # share of lr_decay_iters in which schedule=wsd lowers the learning rate


def learning_rate(it: int, s: Settings) -> float:
    """The learning rate of step `it`: linear warm-up, then the schedule, which reaches min_lr at lr_decay_iters.

    cosine: SGDR, arXiv:1608.03983. wsd (warm-up, stable, decay): MiniCPM, arXiv:2404.06395; its linear and long
    cooldown: arXiv:2405.18392.
    """
    if not s.decay_lr:
        return s.learning_rate
    # AdamW's running means rest on few gradients at first, so the first steps are small; + 1, because none should be 0
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
    """Muon for the matrices of a model's layers, AdamW for all else: one optimizer to whoever saves or unscales it.

    `update_weights` makes its steps. Source: "Muon: An optimizer for hidden layers in neural networks" (K. Jordan).
    """

    def __init__(self, muon: Muon, adamw: AdamW):
        self.muon, self.adamw = muon, adamw
        super().__init__([*adamw.param_groups, *muon.param_groups], {})
        self._share()

    def __setstate__(self, state: dict) -> None:
        """Called by load_state_dict, which makes new groups and new state."""
        super().__setstate__(state)
        self._share()

    def _share(self):
        self.adamw.param_groups, self.muon.param_groups = self.param_groups[:-1], self.param_groups[-1:]
        self.adamw.state = self.muon.state = self.state


def build_optimizer(model: Any, s: Settings, device_type: str) -> Optimizer:
    """The optimizer that `s` names, for a GPT on a device of `device_type`.

    Muon orthogonalises the update of each hidden matrix, and has the size of AdamW's (adjust_lr_fn="match_rms_adamw",
    arXiv:2502.16982), so that one learning rate and weight decay serve both.
    """
    adamw = model.configure_optimizers(s.weight_decay, s.learning_rate, (s.beta1, s.beta2), device_type)
    if s.optimizer == "adamw":
        return adamw
    matrices = [p for p in model.transformer.h.parameters() if p.dim() == 2]
    hidden = set(matrices)
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if p not in hidden]
    muon = Muon(matrices, s.learning_rate, s.weight_decay, adjust_lr_fn="match_rms_adamw")
    return MuonAndAdamW(muon, adamw)


def update_weights(optimizer: Optimizer, norm: Tensor, limit: float) -> None:
    """Step on gradients of norm `norm`, scaled down to the norm `limit` if that is not 0; if `norm` is finite.

    Muon and a fused AdamW decide that on the device, so that the host need not wait for the norm.
    """
    if isinstance(optimizer, MuonAndAdamW):
        _update_hidden(optimizer.muon, norm, limit)
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
def _update_hidden(muon, norm, limit):
    # Muon cannot be told to skip a step. With its running mean as the gradient that mean stays as it is, to the bit;
    # the weights are put back. For as long as the step lasts the copies take the memory of AdamW's second moment
    finite, params = norm.isfinite(), muon.param_groups[0]["params"]
    scale = (norm / limit).clamp(min=1) if limit else 1
    for p in params:
        if not muon.state[p]:
            muon.state[p]["momentum_buffer"] = torch.zeros_like(p)
        p.grad = torch.where(finite, p.grad / scale, muon.state[p]["momentum_buffer"])
    before = [p.clone() for p in params]
    muon.step()
    for p, was in zip(params, before):
        p.copy_(torch.where(finite, p, was))
