"""Cached generation against uncached, and the drawing of ids."""

import pytest
import torch

from fusedgpt.attention.functions import ATTENTION
from fusedgpt.errors import UserError
from fusedgpt.generation import generate
from model import GPT, GPTConfig
from tests.conftest import GPU
from tests.fusedgpt.generation.families import FAMILIES, WINDOWS, family, ids

S = 32
NOT_IN_FLOAT32 = ("flash", "flash3", "flash4", "cudnn")  # on a GPU


def model(attention="sdpa", device="cpu", **config):
    torch.manual_seed(0)
    # heads of 32, because FlexAttention computes some of 16 wrongly (permitted.refusal)
    shape = dict(block_size=S, vocab_size=101, n_layer=3, n_head=2, n_embd=64)
    model = GPT(GPTConfig(**{**shape, **config}, attention=attention)).to(device).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p *= 5  # far from uniform, because near ties would hide or feign errors
    return model


def uncached(model, idx, new):
    """Greedy, with the whole window computed for every id."""
    for _ in range(new):
        logits = model(idx)[0][:, -1]
        idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
    return idx


@pytest.mark.parametrize("length", [1, 2, 7, S - 1, S])
@pytest.mark.parametrize(
    ("attention", "device"),
    [
        *((name, "cpu") for name in ("manual", "blocked", "math", "flash", "sdpa", "masked", "flex")),
        *(pytest.param(name, *GPU.values, marks=GPU.marks) for name in ATTENTION if name not in NOT_IN_FLOAT32),
    ],
)
@torch.no_grad()
def test_cached_equals_uncached(attention, device, length):
    # T16: a cache that admits cached != uncached
    if attention == "flex" and length != 7:
        pytest.skip("flex compiles for a while: one length will do")
    net, reference = model(attention, device), model("manual", device)
    idx = torch.randint(0, 101, (3, length), generator=torch.Generator().manual_seed(1)).to(device)
    new = S - length + 1  # the last id is drawn with the window full
    assert torch.equal(net.generate(idx, new, temperature=0), uncached(reference, idx, new))


@pytest.mark.parametrize("attention", ["manual", "blocked", "math", "flash", "sdpa", "masked"])
@torch.no_grad()
def test_cached_equals_uncached_within_documents(attention):
    # a cache without the ids would let a token see the document before its own
    net = model(attention, document_start=3)
    idx = torch.randint(0, 101, (3, 12), generator=torch.Generator().manual_seed(1))
    idx[0, 4], idx[1, [2, 9]], idx[2, 11] = 3, 3, 3  # they begin elsewhere in each sample
    assert torch.equal(net.generate(idx, S - 11, temperature=0), uncached(net, idx, S - 11))
    across = model(attention).generate(idx, S - 11, temperature=0)
    assert not torch.equal(net.generate(idx, S - 11, temperature=0), across)
    at_once, _ = net(idx)
    cache = generate.new_cache(net.config)
    for chunk in idx.split((1, 8, 2, 1), dim=1):
        logits, _ = net(chunk, cache=cache)
    torch.testing.assert_close(logits, at_once, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prefill_in_chunks_equals_prefill_at_once():
    # T17: a chunk after a cache has fewer queries than keys
    for attention in ("manual", "blocked", "math", "flash", "sdpa", "masked"):
        net = model(attention)
        idx = torch.randint(0, 101, (2, S), generator=torch.Generator().manual_seed(1))
        at_once, _ = net(idx)
        cache = generate.new_cache(net.config)
        for chunk in idx.split((1, 9, 21, 1), dim=1):
            logits, _ = net(chunk, cache=cache)
        torch.testing.assert_close(logits, at_once, rtol=1e-4, atol=1e-4)


def assert_same_logits(net, text, chunks, cache):
    """Reading `text` in `chunks` with a cache gives the logits of reading each beginning of it without one."""
    read = 0
    for chunk in text.split(chunks, dim=1):
        read += chunk.size(1)
        got, want = net(chunk, cache=cache)[0], net(text[:, :read])[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_family_generates_with_a_cache_what_it_does_without(name):
    # the prompt is longer than the windows, and the text goes round their buffers several times
    net, idx = family(name), ids(3, 17)
    S = net.config.block_size
    text = net.generate(idx, S - 17, temperature=0)
    assert torch.equal(text, uncached(net, idx, S - 17))
    for length in (0, S):  # a cache that grows, and one that has room for all
        assert_same_logits(net, text, [17] + [1] * (S - 17), generate.new_cache(net.config, length))
        assert_same_logits(net, text, [1, 1, 9, 3, 4, 1, 14, 2, S - 35], generate.new_cache(net.config, length))


@pytest.mark.parametrize("attention", ["manual", "blocked", "math", "masked"])
@torch.no_grad()
def test_every_kernel_fits_the_cache_of_a_window(attention):
    net, reference = family("pattern", attention=attention), family("pattern", attention="manual")
    text = reference.generate(ids(2, 17), 20, temperature=0)
    assert torch.equal(net.generate(text[:, :17], 20, temperature=0), text)
    assert_same_logits(net, text, [3, 5, 14, 1, 1, 13], generate.new_cache(net.config))


@pytest.mark.parametrize("name", ["gpt2", *WINDOWS])
@torch.no_grad()
def test_a_token_sees_neither_another_document_nor_beyond_its_window(name):
    net, idx = family(name, document_start=3), ids(3, 12)
    idx[0, 4], idx[1, [2, 9]], idx[2, 11] = 3, 3, 3  # they begin elsewhere in each sample
    S = net.config.block_size
    text = uncached(net, idx, S - 12)
    text[1, 20], text[2, [30, 33]] = 3, 3
    assert not torch.allclose(net(text)[0], family(name)(text)[0])
    assert_same_logits(net, text, [12] + [1] * (S - 12), generate.new_cache(net.config))
    assert_same_logits(net, text, [1, 9, 3, 20, 2, S - 35], generate.new_cache(net.config))


def held(cache):
    """Bytes of a cache's keys and values."""
    return sum(x.numel() * x.element_size() for layer in cache for x in (layer.k, layer.v))


@torch.no_grad()
def test_a_window_bounds_the_memory_of_the_cache():
    net = family("pattern", block_size=4096)  # windows of 6 in three of four layers, two heads of 16 channels
    cache = generate.new_cache(net.config)
    list(generate.new_tokens(net, ids(2, 700), 120, temperature=0, cache=cache))
    a_key = 2 * 2 * 2 * 16 * 4  # keys and values of 2 samples, in float32
    assert [layer.window for layer in cache] == [6, 6, None, 6]
    assert held(cache) == a_key * (3 * 12 + 1024)  # the text has 820 tokens


@torch.no_grad()
def test_a_long_context_takes_memory_for_the_text_alone():
    # a cache of all 131,072 positions would take 2 GiB a sample in this small model
    config = dict(block_size=131_072, n_head=16, n_kv_head=8, head_size=32, n_layer=8)
    net = family("llama", **config)
    cache = generate.new_cache(net.config)
    first = [net.generate(ids(1, 9), 30, temperature=0)]
    first.append(torch.cat([ids(1, 9), *generate.new_tokens(net, ids(1, 9), 30, temperature=0, cache=cache)], dim=1))
    assert torch.equal(*first) and held(cache) == 8 * 2 * 8 * 32 * 256 * 4
    alone = generate.new_cache(net.config)  # it does not know how long the text will be
    for token in ids(1, 40).split(1, dim=1):
        net(token, cache=alone)
    assert held(alone) == 8 * 2 * 8 * 32 * 64 * 4


@torch.no_grad()
def test_a_cache_serves_one_text_after_another():
    net = family("mistral")
    cache = generate.new_cache(net.config)
    for B, T, new in ((2, 3, 4), (2, 17, 40), (1, 30, 3), (3, 1, 60), (2, 3, 4)):
        got = torch.cat([ids(B, T), *generate.new_tokens(net, ids(B, T), new, temperature=0, cache=cache)], dim=1)
        assert torch.equal(got, net.generate(ids(B, T), new, temperature=0)), (B, T, new)


@pytest.mark.parametrize("net", [model(), family("llama", block_size=S), family("mistral", block_size=S)])
@torch.no_grad()
def test_past_block_size_the_older_half_is_dropped(net):
    # learned positions cannot shift, and rotary ones beyond block_size were never trained
    idx = torch.randint(0, 101, (2, 5), generator=torch.Generator().manual_seed(1))
    got = net.generate(idx, 3 * S, temperature=0)
    assert got.shape == (2, 5 + 3 * S)
    window = idx
    for position in range(5, 5 + 3 * S):  # the same rule, written out without a cache
        window = window[:, -S // 2 :] if window.size(1) > S else window
        window = uncached(net, window, 1)
        assert torch.equal(got[:, position], window[:, -1])


@torch.no_grad()
def test_a_prompt_longer_than_block_size_keeps_its_end():
    net = model()
    long = torch.randint(0, 101, (1, 3 * S))
    short = net.generate(long[:, -S:], 4, temperature=0)
    assert torch.equal(net.generate(long, 4, temperature=0)[:, -4:], short[:, -4:])


def test_padded_ids_are_never_drawn():
    # T15: an id beyond the tokenizer's makes it panic
    net = model(vocab_multiple=64)
    assert net.lm_head.weight.shape[0] == 128
    assert net.generate(torch.zeros(8, 1, dtype=torch.long), 24, temperature=100.0).max() < 101
    nanogpt = model()  # nanoGPT's own padding is not marked as such: the tokenizer's size is the bound
    drawn = torch.cat(
        list(generate.new_tokens(nanogpt, torch.zeros(8, 1, dtype=torch.long), 24, 100.0, vocab_size=65)), dim=1
    )
    assert drawn.max() < 65


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


@pytest.mark.parametrize(
    "options", [dict(temperature=0), dict(temperature=1e-320), dict(temperature=1e-40), dict(top_p=1e-320)], ids=str
)
def test_what_is_0_in_float32_draws_the_likeliest(options):
    # T15: it used to divide by 0, or to make NaN of every probability
    logits = [0.5, 2.0, 1.0, -float("inf")]
    assert drawn(logits, **options).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("temperature", [1e300, float("inf"), 10**400], ids=["1e300", "inf", "10**400"])
def test_what_is_infinite_in_float32_draws_all_alike_but_no_padding(temperature):
    p = drawn([5.0, 2.0, -float("inf")], temperature=temperature, top_k=10**30)
    torch.testing.assert_close(p, torch.tensor([0.5, 0.5, 0.0]), atol=0.03, rtol=0)


@pytest.mark.parametrize(
    "options", [dict(temperature=-1.0), dict(temperature=float("nan")), dict(top_k=-1), dict(top_p=1.1)], ids=str
)
def test_what_means_nothing_is_refused(options):
    with pytest.raises(UserError, match="must be 0 or more, and top_p at most 1"):
        drawn([1.0, 2.0], **options)


def test_weights_that_have_diverged_are_one_sentence():
    # it used to be a RuntimeError of torch.multinomial's
    net = model()
    with torch.no_grad():
        net.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(UserError, match="the model's logits are not finite"):
        net.generate(torch.zeros(1, 3, dtype=torch.long), 2)


def test_a_prompt_is_attended_to_in_its_own_dtype_on_a_cpu():
    # the cache is float32 there: 2048 queries in it took three times as long as in bfloat16
    seen, gpt = [], model().bfloat16()
    for block in gpt.transformer.h:
        attend = block.attn.attend
        block.attn.attend = lambda q, k, v, *rest, attend=attend: (
            seen.append((k.size(2), k.dtype)) or attend(q, k, v, *rest)
        )
    cache = generate.new_cache(gpt.config)
    for part in torch.tensor([[5, 7, 11, 13]]).split([2, 1, 1], dim=1):
        gpt(part, cache=cache)
    assert seen == [(2, torch.bfloat16)] * 3 + [(3, torch.float32)] * 3 + [(4, torch.float32)] * 3


@pytest.mark.parametrize(
    "changes", [{}, {"parallel_block": True}, {"position": "rotary", "n_kv_head": 1, "qk_norm": True}]
)
def test_after_the_keys_of_the_last_layer_only_the_last_token_is_computed(changes):
    # all tokens of a prompt went through the last layer, for logits that nobody reads
    gpt, rows = model(**changes), {}
    for n, block in enumerate(gpt.transformer.h):
        block.mlp.register_forward_hook(lambda module, args, y, n=n: rows.setdefault(n, []).append(y.size(1)))
    idx, cache = torch.arange(12)[None], generate.new_cache(gpt.config)
    with torch.no_grad():
        got = [gpt(part, cache=cache)[0] for part in idx.split([9, 2, 1], dim=1)]
        assert rows == {0: [9, 2, 1], 1: [9, 2, 1], 2: [1, 1, 1]}
        want = [gpt(idx[:, :n])[0] for n in (9, 11, 12)]
    assert rows[2][3:] == [9, 11, 12]  # without a cache every layer computes all, as a reference for the cached
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
