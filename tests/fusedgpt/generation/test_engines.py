"""Two dtypes, static shapes and CUDA graphs against plain float32 generation, on a model that has learnt something."""

import copy

import pytest
import torch

from fusedgpt.errors import UserError
from fusedgpt.generation import engines, generate
from model import GPT, GPTConfig
from tests.conftest import GPU
from tests.fusedgpt.generation.families import FAMILIES, WITHIN, family, greedy, ids

CPU = torch.device("cpu")
S = 64
TEXT = "the cat sat on the mat; the dog lay on the log; a fox ran to the box and the hen hid in the den. "


@pytest.fixture(scope="module")
def trained():
    """A model that has read TEXT, with words in another order each time: its logits are neither flat nor certain."""
    torch.manual_seed(0)
    net = GPT(GPTConfig(block_size=S, vocab_size=128, n_layer=2, n_head=4, n_embd=64))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    words = TEXT.split()
    for _ in range(80):
        order = torch.randint(len(words) - 3, (8, 12))
        lines = [" ".join(" ".join(words[i : i + 3]) for i in row) for row in order.tolist()]
        ids = torch.tensor([list(line.encode()[: S + 1]) for line in lines])
        loss = net(ids[:, :-1], ids[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 1.5  # untrained it is 4.9
    return net.eval()


def prompts(B=1, T=20):
    return torch.tensor([list(TEXT.encode()[7 * b : 7 * b + T]) for b in range(B)])


def engine_of(net, prefill, one):
    return engines.Engine(engines.converted(net, CPU, prefill), engines.converted(net, CPU, one), (prefill, one), "")


def assert_ties(net, prompt, got, want, allowed):
    """The first ids that differ in each row of `got` and `want` must be a tie in the float32 `net`, but for rounding.

    allowed: the largest gap between their logits, as a share of the largest logit.
    """
    S = net.config.block_size
    for one, other, window in zip(got, want, prompt.split(1)):
        for at in (one != other).nonzero().flatten().tolist()[:1]:
            for new in other[:at]:  # the window is the one that new_tokens reads
                window = torch.cat((window, new.view(1, 1)), dim=1)
                window = window[:, -S // 2 :] if window.size(1) > S else window
            logits = net(window)[0][0, -1]
            gap = (logits[other[at]] - logits[one[at]]).abs()
            assert gap <= allowed * logits.abs().max(), f"token {at}: {gap}"


@pytest.mark.parametrize(
    ("attention", "one"),
    [("manual", torch.bfloat16), *((name, torch.float16) for name in ("blocked", "flash", "sdpa", "masked"))],
    ids=str,
)
@torch.no_grad()
def test_two_dtypes_say_what_float32_says(trained, attention, one):
    # a cache in the wrong dtype, a key at the wrong position or a prefill read by the wrong copy changes the text
    trained.use_attention("manual")
    want = greedy(trained, prompts(), 100)
    trained.use_attention(attention)
    got = greedy(engine_of(trained, torch.bfloat16, one), prompts(), 100)
    assert_ties(trained, prompts(), got, want, 2 * torch.finfo(torch.bfloat16).eps)


@torch.no_grad()
def test_one_dtype_for_both_is_the_model_itself_and_not_measured(trained, monkeypatch):
    monkeypatch.setattr(engines, "_milliseconds", lambda *_: pytest.fail("measured"))
    trained.use_attention("sdpa")
    engine = engines.prepare(trained, CPU, "float32", batch_size=3)
    assert engine.dtypes == (torch.float32, torch.float32) and engine.prefill is engine.decode and not engine.chosen
    assert torch.equal(greedy(engine, prompts(3), 100), greedy(trained, prompts(3), 100))


@pytest.mark.parametrize(("name", "document_start"), WITHIN)
@torch.no_grad()
def test_static_shapes_compute_what_growing_ones_do(name, document_start):
    # fails for an unmasked or misplaced position, and for a cache that is reused with more or fewer samples;
    # documents begin elsewhere in each sample
    net = family(name, document_start=document_start)
    text, S = ids(3, net.config.block_size), net.config.block_size
    text[0, [5, 30]], text[1, 21] = 3, 3
    engine = engines.prepare(net, CPU, "float32", new_tokens=S)
    engine.decode = engines.StaticStep(engine.prefill)
    whole, _ = net(text, text)
    for B, T, to in ((3, 17, S), (1, 1, 14), (1, 1, 4)):  # the last while a later document is in the buffers
        generate.empty(engine.cache)
        for n in range(T, to + 1):
            got, want = engine(text[:B, (n - 1 if n > T else 0) : n], engine.cache)[0], whole[:B, n - 1 : n]
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())
    prompt = ids(2, S - 9)
    assert torch.equal(greedy(engine, prompt, 12, cache=engine.cache), greedy(net, prompt, 12))  # S ids and more


@pytest.mark.parametrize("document_start", [None, 3])
@torch.no_grad()
def test_static_shapes_follow_buffers_that_grow(document_start):
    # steps went on with the old keys, in silence
    net = family("pattern", window_pattern="SL", block_size=1024, document_start=document_start)
    engine = engines.prepare(net, CPU, "float32", prompt_length=9, new_tokens=30)
    engine.decode = engines.StaticStep(engine.prefill)
    for T in (9, 240, 600):  # there is room for 256, then for more
        prompt = ids(1, T)
        assert torch.equal(greedy(engine, prompt, 30, cache=engine.cache), greedy(net, prompt, 30))
    assert all(layer.k.size(2) > 256 for layer in engine.cache)


@pytest.mark.parametrize("document_start", [None, 3])  # with it, a window that hides keys waited half a minute
@torch.no_grad()
def test_no_token_waits_for_another_graph(document_start, monkeypatch):
    # a graph of its own for a step beyond the window takes seconds in the middle of a text
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **_: compile_(model, dynamic=True, backend="eager"))
    net = family("mistral", n_layer=1, document_start=document_start)
    engine = engines.prepare(net, CPU, "float32", batch_size=2, prompt_length=9, new_tokens=30, compiled=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(greedy(engine, ids(2, 1), 60, cache=engine.cache), greedy(net, ids(2, 1), 60))


def test_a_copy_keeps_ties_and_leaves_the_model_alone(trained):
    half = engines.converted(trained, CPU, torch.float16)
    assert half.lm_head.weight is half.transformer.wte.weight and half.lm_head.weight.dtype == torch.float16
    assert {p.dtype for p in trained.parameters()} == {torch.float32}
    for p, q in zip(trained.parameters(), half.parameters()):
        assert torch.equal(p.half(), q)
    same = engines.converted(trained, CPU, torch.float32)  # a model that is so already is not held twice
    assert same.lm_head.weight.data_ptr() == trained.lm_head.weight.data_ptr()


def times(prefill, one):
    """A stand-in for the clock: milliseconds in float32, float16 and bfloat16."""
    table = {rows: dict(zip(engines.PRECISE_FIRST, ms, strict=True)) for rows, ms in (("many", prefill), ("one", one))}

    def milliseconds(blocks, shape, dtypes):
        return {dtype: table["one" if shape[1] == 1 else "many"][dtype] for dtype in dtypes}

    return milliseconds


@pytest.mark.parametrize(
    ("prefill", "one", "dtypes"),
    [
        ((5, 10, 1), (7, 2, 1.9), ("bfloat16", "float16")),  # 5 % are noise
        ((5, 10, 4.9), (7, 6.9, 6.8), ("float32", "float32")),
        ((5, 1, 3), (7, 9, 3), ("bfloat16", "bfloat16")),  # no CPU multiplies float16 faster, whatever a clock says
    ],
)
def test_auto_takes_what_is_fastest_and_says_so(trained, monkeypatch, prefill, one, dtypes):
    monkeypatch.setattr(engines, "cpu_multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(engines, "_milliseconds", times(prefill, one))
    engine = engines.prepare(trained, CPU)
    assert engine.dtypes == tuple(getattr(torch, name) for name in dtypes)
    used = [next(each.parameters()).dtype for each in (engine.prefill, engine.decode)]
    assert used == list(engine.dtypes)
    assert f"bfloat16 {prefill[2]:.2f}" in engine.chosen and f"float16 {one[1]:.2f}" in engine.chosen


@pytest.mark.parametrize("overflows", [False, True])
def test_a_cpu_without_bfloat16_reads_no_prompt_in_16_bits(trained, monkeypatch, overflows):
    # beside other programs a clock said so, and the prompt took 3.2 times as long. And a model like Qwen2, whose
    # residual stream reaches 1.7e5, was given float16 for being fast, and no text
    monkeypatch.setattr(engines, "cpu_multiplies_bfloat16", lambda: False)
    monkeypatch.setattr(engines, "_milliseconds", times((5, 1, 1), (7, 2, 3)))
    model = copy.deepcopy(trained)
    with torch.no_grad():
        model.transformer.h[-1].mlp.c_proj.weight *= 1e7 if overflows else 1
    engine = engines.prepare(model, CPU, prompt_length=20)
    assert engine.dtypes == (torch.float32, torch.bfloat16 if overflows else torch.float16)
    assert "prompt in float32; tokens" in engine.chosen


def test_an_overflow_in_the_dtype_of_decode_is_one_sentence(trained):
    # bfloat16 has the range of float32: the logits after the prompt are finite, the next ones are not
    net = copy.deepcopy(trained)
    with torch.no_grad():
        net.transformer.ln_f.weight *= 1e5
    with pytest.raises(UserError, match="not finite: its weights have diverged, or overflow in this dtype"):
        greedy(engine_of(net, torch.bfloat16, torch.float16), prompts(), 2)


@pytest.mark.parametrize("device", [GPU])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # cuDNN, which is slow for one query, takes only the latter
@torch.no_grad()
def test_a_cuda_graph_decodes_every_family(name, device, dtype):
    net = family(name)
    plain = engines.prepare(net, torch.device(device), dtype)
    engine = engines.prepare(net, torch.device(device), dtype, prompt_length=9, new_tokens=100, compiled=True)
    assert isinstance(engine.decode, engines.GraphedStep)
    exact = net.to(device)  # after prepare, which copies what it converts
    for B in (1, 3):
        idx = ids(B, 9).to(device)
        want = greedy(plain, idx, 100)
        captured, replayed = (greedy(engine, idx, 100, cache=engine.cache) for _ in range(2))
        assert torch.equal(captured, replayed)
        # in bfloat16 another kernel adds up in another order, and both round: twice what one may be off
        assert_ties(exact, idx, captured, want, 4 * torch.finfo(getattr(torch, dtype)).eps)
