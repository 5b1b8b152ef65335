"""What replaces parts of PyTorch does the same: steps of AdamW, its saved state, an embedding, an empty module."""

import copy

import pytest
import torch
from torch import nn

from fusedgpt import eager


def stepped(optimizer_class, model, steps, state=None, **options):
    """The weights of `model` after `steps` steps on gradients that follow from the step's number, and the state."""
    optimizer = optimizer_class(model.parameters(), lr=0.1, weight_decay=0.3, **options)
    if state:
        optimizer.load_state_dict(state)
    for step in range(steps):
        for n, p in enumerate(model.parameters()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + n))
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    return [p.detach() for p in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("options", [dict(fused=True), dict(foreach=True), dict(foreach=False)], ids=str)
def test_adamw_steps_as_pytorchs_to_the_bit_and_reads_its_state(options):
    # its `step` comes without the decorator that turns autograd off: the step would have become part of the graph
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))
    ours, theirs = (copy.deepcopy(model) for _ in range(2))
    (got, state), (want, saved) = (
        stepped(eager.AdamW, ours, 3, **options),
        stepped(torch.optim.AdamW, theirs, 3, **options),
    )
    assert all(map(torch.equal, got, want)) and state["param_groups"] == saved["param_groups"]
    got, _ = stepped(eager.AdamW, ours, 2, state=saved, **options)  # a checkpoint of PyTorch's
    want, _ = stepped(torch.optim.AdamW, theirs, 2, state=state, **options)  # and the other way round
    assert all(map(torch.equal, got, want))


def test_an_empty_module_has_the_shapes_dtypes_and_names_of_its_model_on_meta():
    def parts(embedding):
        return nn.ModuleDict({"wte": embedding(6, 4), "ln": nn.LayerNorm(4, dtype=torch.float64)})

    with torch.device("meta"):
        ours, theirs = parts(eager.embedding), parts(nn.Embedding)
    eager.to_empty(ours)
    theirs.to_empty(device="cpu")

    def described(module):
        named = module.named_parameters()
        return {name: (p.shape, p.dtype, p.device, p.requires_grad, type(p)) for name, p in named}

    assert described(ours) == described(theirs) and repr(ours) == repr(theirs)
