"""A training step in the benchmark's own process."""

import torch

from fusedgpt.bench import step
from model import GPT, GPTConfig


def test_each_call_is_a_step_towards_the_next_ids(monkeypatch):
    seen = []

    class Seen(GPT):
        def forward(self, idx, targets, **how):
            found = super().forward(idx, targets, **how)
            seen.append((self, idx, targets, found[1].item()))
            return found

    monkeypatch.setattr(step, "GPT", Seen)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, vocab_size=65)
    one = step.training_step(config, 3, torch.device("cpu"), torch.float32)
    for _ in range(5):
        one()
    model, x, y, _ = seen[0]
    assert x.shape == (3, 8) and torch.equal(x[:, 1:], y[:, :-1])
    losses = [loss for *_, loss in seen]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    assert all(p.grad is None for p in model.parameters())
