"""Which attention a model has, and what a kernel is given of it."""

import pytest
import torch

from fusedgpt.attention.case import Case
from fusedgpt.dimensions import GPTConfig
from fusedgpt.settings import Settings

CPU = torch.device("cpu")
LLAMA = dict(block_size=64, n_layer=6, n_head=6, n_kv_head=2, head_size=40, n_embd=96, window=16, vocab_size=65)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [16]),
        ({"window_pattern": "SSL"}, [16, None]),
        ({"window_pattern": "L"}, [None]),
        ({"window": 63}, [63]),
        ({"window": 64}, [None]),  # it hides nothing, so that kernels without a window may run
        ({"window": None}, [None]),
    ],
)
@pytest.mark.parametrize("of", [GPTConfig, Settings])
def test_layers_with_and_without_a_window_are_two_cases(of, changes, windows):
    # only the first layer's attention was tried, so that a kernel could fail in the third
    cases = Case.of_layers(of(**LLAMA | changes), 3, CPU, torch.float32, dropout=0.1)
    assert [case.window for case in cases] == windows
    assert {(case.shape, case.kv_heads, case.dropout) for case in cases} == {((3, 6, 64, 40), 2, 0.1)}


def test_a_query_after_a_cache_sees_no_more_than_the_window_keeps():
    case = Case.of_layers(GPTConfig(**LLAMA), 3, CPU, torch.float32, backward=False)[0].one_query()
    assert (case.shape, case.keys, case.window) == ((3, 6, 1, 40), 16, None)
    q, k, v, dy = case.inputs()
    assert (q.shape, k.shape, v.shape, dy.shape) == ((3, 6, 1, 40), (3, 2, 16, 40), (3, 2, 16, 40), (3, 6, 1, 40))


def test_fewer_heads_share_keys_as_all_do():
    few = Case((3, 12, 64, 40), CPU, torch.float32, kv_heads=4).of_heads(2, 1)
    assert (few.shape, few.kv_heads) == ((2, 3, 64, 40), 1)
    alone = Case((3, 12, 64, 40), CPU, torch.float32).of_heads(2, 1)
    assert (alone.shape, alone.kv_heads) == ((2, 1, 64, 40), 1)
