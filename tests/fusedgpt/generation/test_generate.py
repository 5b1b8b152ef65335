"""Cached generation against uncached, and the drawing of ids."""

import pytest
import torch

from fusedgpt.attention.functions import ATTENTION
from fusedgpt.errors import UserError
from fusedgpt.generation import generate
from tests.conftest import GPU
from tests.fusedgpt.generation.families import WITHIN, family, greedy, ids

S = 32
NOT_IN_FLOAT32 = ("flash", "flash3", "flash4", "cudnn")  # on a GPU


def assert_greedy(net, text, start):
    """Each id of `text` from `start` on is the likeliest after those before it, computed without a cache."""
    logits, _ = net(text[:, :-1], text[:, 1:])
    assert torch.equal(logits[:, start - 1 :].argmax(-1), text[:, start:])


def assert_same_logits(net, text, chunks, cache):
    """Reading `text` in `chunks` with a cache gives the logits of reading all of it at once without one."""
    whole, _ = net(text, text)
    read = 0
    for chunk in text.split(chunks, dim=1):
        read += chunk.size(1)
        want = whole[:, read - 1 : read]
        torch.testing.assert_close(net(chunk, cache=cache)[0], want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.usefixtures("uncompiled_flex")
@pytest.mark.parametrize(
    ("attention", "device", "document_start"),
    [
        *((name, "cpu", n) for name in ("manual", "blocked", "math", "flash", "sdpa", "masked") for n in (None, 3)),
        ("flex", "cpu", None),
        *(pytest.param(name, *GPU.values, 3, marks=GPU.marks) for name in ATTENTION if name not in NOT_IN_FLOAT32),
    ],
)
@torch.no_grad()
def test_cached_equals_uncached(attention, device, document_start):
    # T16: a cache that admits cached != uncached, or without the ids, so that a token saw the document before its own.
    # T17: a chunk after a cache has fewer queries than keys
    # heads of 32, because FlexAttention computes some of 16 wrongly (permitted.refusal)
    how = dict(block_size=S, n_head=2, document_start=document_start)
    net, reference = (family("gpt2", attention=name, **how).to(device) for name in (attention, "manual"))
    for length in (1, 12, S):
        idx = ids(3, length).to(device)
        if length == 12:  # documents begin elsewhere in each sample
            idx[0, 4], idx[1, [2, 9]], idx[2, 11] = 3, 3, 3
        text = net.generate(idx, S - length + 1, temperature=0)  # the last id is drawn with the window full
        assert_greedy(reference, text, length)
        assert_same_logits(net, text[:, :S], (1, 9, 21, 1), generate.new_cache(net.config))


@pytest.mark.parametrize(("name", "document_start"), WITHIN)
@torch.no_grad()
def test_every_family_generates_with_a_cache_what_it_does_without(name, document_start):
    # the prompt is longer than the windows
    net = family(name, document_start=document_start)
    S = net.config.block_size
    text = net.generate(ids(3, 17), S - 17, temperature=0)
    assert_greedy(net, text, 17)
    text[0, 4], text[1, [2, 9, 20]], text[2, [11, 30, 33]] = 3, 3, 3  # documents begin elsewhere in each sample
    for length in (0, S):  # a cache that grows, and one that has room for all
        assert_same_logits(net, text, [17] + [1] * (S - 17), generate.new_cache(net.config, length))
        assert_same_logits(net, text, [1, 1, 9, 3, 4, 1, 14, 2, S - 35], generate.new_cache(net.config, length))


@torch.no_grad()
def test_a_cache_serves_one_text_after_another():
    net = family("mistral")
    cache = generate.new_cache(net.config)
    for B, T, new in ((2, 3, 4), (2, 17, 12), (1, 30, 3), (3, 1, 50), (2, 3, 4)):
        assert torch.equal(greedy(net, ids(B, T), new, cache=cache), greedy(net, ids(B, T), new)), (B, T, new)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
@torch.no_grad()
def test_past_block_size_the_older_half_is_dropped(name):
    # learned positions cannot shift, and rotary ones beyond block_size were never trained
    net = family(name, block_size=S)
    window = ids(2, 3 * S)  # of a longer prompt, the end is kept
    got, window = net.generate(window, S + 8, temperature=0)[:, 3 * S :], window[:, -S:]
    for n in range(S + 8):  # the same rule, written out without a cache
        window = window[:, -S // 2 :] if window.size(1) > S else window
        window = torch.cat((window, net(window)[0][:, -1].argmax(-1, keepdim=True)), dim=1)
        assert torch.equal(got[:, n], window[:, -1])


def test_padded_ids_are_never_drawn():
    # T15: an id beyond the tokenizer's makes it panic
    net = family("gpt2", vocab_multiple=64)
    assert net.lm_head.weight.shape[0] == 128
    assert net.generate(torch.zeros(8, 1, dtype=torch.long), 24, temperature=100.0).max() < 101


def drawn(logits, **options):
    generator = torch.Generator().manual_seed(0)
    many = torch.tensor([logits]).repeat(4000, 1)
    return generate.sample(many, generator=generator, **options)[:, 0].bincount(minlength=len(logits)) / 4000


def test_draws_follow_the_distribution():
    logits = [2.0, 1.0, 0.0, -1.0]
    p = torch.tensor(logits).softmax(0)
    torch.testing.assert_close(drawn(logits), p, atol=0.03, rtol=0)
    torch.testing.assert_close(drawn(logits, temperature=2.0), (torch.tensor(logits) / 2).softmax(0), atol=0.03, rtol=0)
    for none in (0, None, 4, 1000):
        torch.testing.assert_close(drawn(logits, top_k=none), p, atol=0.03, rtol=0)
    assert (drawn(logits, top_k=2)[2:] == 0).all() and (drawn(logits, top_k=2)[:2] > 0).all()


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    for top_p, kept in ((0.4, 1), (0.5, 1), (0.6, 2), (0.79, 2), (0.9, 3), (0.99, 4), (1.0, 4), (0.0, 4), (1e-9, 1)):
        assert (drawn(logits, top_p=top_p) > 0).sum() == kept, top_p


def test_top_p_of_1_drops_no_id(monkeypatch):
    # a third of these could not be drawn, because in float32 the likelier ones already add up to 1
    seen = []
    monkeypatch.setattr(torch, "multinomial", lambda p, *_, **__: seen.append(p) or p.argmax(-1, keepdim=True))
    logits = 4 * torch.randn(1, 50257, generator=torch.Generator().manual_seed(0))
    for top_p in (None, 0.0, 1.0):
        generate.sample(logits, top_p=top_p)
        assert (seen[-1] > 0).all() and torch.equal(seen[-1], seen[0]), top_p


@pytest.mark.parametrize("temperature", [0, 1e-30])
def test_a_temperature_of_next_to_nothing_draws_the_likeliest(temperature):
    # T15: it used to divide by 0, or to make NaN of every probability. No padding is drawn
    assert drawn([0.5, 2.0, 1.0, -float("inf")], temperature=temperature).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("options", [dict(temperature=-1.0), dict(top_k=-1), dict(top_p=1.1)], ids=str)
def test_what_means_nothing_is_refused(options):
    with pytest.raises(UserError, match="must be 0 or more, and top_p at most 1"):
        drawn([1.0, 2.0], **options)
