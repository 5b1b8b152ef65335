"""Sampling, run as a user does."""

import json
import re

import pytest
import torch

import sample
from configurator import configure
from fusedgpt.attention import choose
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.generation import auto, engines
from fusedgpt.runs import checkpoint, run_folder
from model import GPT
from tests.conftest import as_nanogpt_wrote, checkpoint_of, hugging_face, rows

BYTES = {"tokenizer": "byte", "vocab_size": 256}


def quick(run, **settings):
    """Settings of a short sampling of a run on a CPU."""
    short = dict(device="cpu", dtype="float32", start="!", num_samples=2, max_new_tokens=40)
    return sample.Settings(**{"out_dir": str(run), **short, **settings})


def drawn(run, capsys, **settings):
    """The samples that sample.py prints, without what it says around them."""
    capsys.readouterr()
    sample.main(quick(run, **settings))
    head, _, text = capsys.readouterr().out.partition("\n")
    assert head.startswith(f"sampling from {run}")
    assert text.endswith("\n---------------\n")
    return text.removesuffix("\n---------------\n").split("\n---------------\n")


def test_where_the_text_comes_from_what_was_chosen_and_how_fast_it_was_is_said(small_run, capsys):
    sample.main(quick(small_run, dtype="auto", max_new_tokens=9))
    said = capsys.readouterr()
    saved, path = run_folder.load_best(small_run)
    (row,) = [row for row in rows(small_run, "eval") if row["iter"] == saved["iter_num"]]
    losses = f"validation loss {row['val_loss']:.4f}, validation bits per byte {row['val_bits_per_byte']:.4f}"
    assert said.out.startswith(f"sampling from {path}, after {saved['iter_num']} iterations, {losses}\n!")
    kinds = "(float32|float16|bfloat16)"
    again = rf"the same again: --dtype={kinds}( --decode_dtype={kinds})?"
    assert re.search(rf"^prompt in {kinds}.*; tokens after it in {kinds} .*; {again}$", said.err, re.M), said.err
    last = r"2 x 9 tokens in [\d.]+ s: [\d.,]+ tokens/s, the first after [\d.]+ s "
    assert re.search(rf"^{last}\(attention sdpa, prefill {kinds}, decode {kinds}, cpu\)$", said.err, re.M), said.err


def test_the_speeds_are_those_of_the_clock(small_run, capsys):
    # 2 samples of 5 tokens: the first tokens after 2 s, the other four steps in 1 s more
    engine = auto.prepare(s := quick(small_run), sample.load(s)[0], 1, torch.device("cpu"), print)
    said = sample.report(engine, s, 5, 2.0, 1.0, torch.device("cpu"))
    assert said.startswith("2 x 5 tokens in 3.0 s: 3.3 tokens/s, the first after 2.00 s (")


def test_the_flags_that_auto_names_make_the_same_text(small_run, capsys, monkeypatch):
    # two runs of one seed draw two dtypes on a busy machine, and so two texts
    words = "prompt in float32; tokens in another"  # of a dtype that is given, nothing is said
    monkeypatch.setattr(engines, "fastest_dtypes", lambda *_: ((torch.float32, torch.bfloat16), words))
    monkeypatch.setattr(choose, "fastest", lambda *_, **__: ("math", {}))
    texts, lines = [], []
    by_hand = dict(decode_dtype="bfloat16", attention="math")
    for given in (dict(attention="auto"), dict(by_hand, dtype="float32"), by_hand):
        sample.main(quick(small_run, **(dict(dtype="auto") | given)))
        said = capsys.readouterr()
        texts.append(said.out)
        lines.append([line for line in said.err.splitlines() if "the same again" in line])
    assert texts[0] == texts[1] == texts[2] and not lines[1]
    assert lines[2] == ["prompt in float32; the same again: --dtype=float32 --decode_dtype=bfloat16"]
    assert lines[0] == [
        "prompt in float32; tokens in another; the same again: --dtype=float32 --decode_dtype=bfloat16",
        "attention math; the same again: --attention=math",
    ]


def test_samples_are_as_many_and_as_long_as_asked_and_the_same_for_a_seed(small_run, capsys):
    texts = drawn(small_run, capsys, num_samples=3)
    assert [len(text) for text in texts] == [41, 41, 41]
    assert all(text.startswith("!") for text in texts) and len(set(texts)) == 3
    assert texts == drawn(small_run, capsys, num_samples=3) != drawn(small_run, capsys, num_samples=3, seed=2)


def test_a_prompt_from_a_file_of_windows_is_the_text_alone(tmp_path):
    # the BOM, which data loses when they are prepared, was read as three more bytes of the prompt
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes("\ufeffé\r\n".encode())
    assert sample.read_prompt(f"FILE:{prompt}", Tokenizer(BYTES)) == ("é\n", [*"é\n".encode()])
    assert configure(sample.Settings(), ["--start=~/x"], "").start == "~/x"  # no path
    prompt.write_bytes("é".encode("cp1252"))
    with pytest.raises(UserError, match="cannot be written in UTF-8"):
        sample.read_prompt(f"FILE:{prompt}", Tokenizer(BYTES))


def test_temperature_0_and_top_k_1_are_greedy(small_run, capsys):
    # T15: both used to crash
    greedy = drawn(small_run, capsys, temperature=0.0)
    assert greedy == drawn(small_run, capsys, temperature=0.0, top_k=0, init_from="auto")  # of a config
    assert greedy == drawn(small_run, capsys, top_k=1) == drawn(small_run, capsys, top_p=1e-6)


def test_a_model_of_transformers_is_sampled_by_its_folder_alone(tmp_path, capsys):
    # the refusal knew which flag was meant
    hugging_face(tmp_path / "hf", n_layer=2, n_head=2, n_embd=32, n_positions=16, vocab_size=256)
    (tmp_path / "hf" / "meta.json").write_text(json.dumps(BYTES))
    sample.main(quick(tmp_path / "hf", max_new_tokens=4))
    assert f"sampling from {tmp_path / 'hf'}" in capsys.readouterr().out


def test_ids_without_a_text_are_never_drawn(small_run, capsys, tmp_path):
    # T15: nanoGPT does not mark the padding of its vocabulary, so its tokenizer meets ids that it does not know
    saved = checkpoint_of(small_run, "best.pt")
    saved["model_args"]["vocab_size"], saved["extra_model_args"]["vocab_multiple"] = 128, 1
    torch.save(saved, tmp_path / "ckpt.pt")
    for text in drawn(tmp_path, capsys, temperature=50.0, top_k=0):
        assert len(text) == 41 and "\N{REPLACEMENT CHARACTER}" not in text


def test_a_kept_checkpoint_is_sampled_by_its_name(done, capsys):
    # sample.py took folders alone, and so only the best checkpoint
    (earlier,) = sorted(done.glob("ckpt-*.pt"))[-1:]
    sample.main(quick(earlier, num_samples=1, max_new_tokens=5))
    iteration = checkpoint_of(done, earlier.name)["iter_num"]
    assert f"sampling from {earlier}, after {iteration} iterations, validation loss" in capsys.readouterr().out


def test_a_text_is_whole_and_ends_where_it_ends(small_run, monkeypatch, capsys):
    # the end of a document and the next document used to be printed; in a prompt, it does not end the sample
    tokenizer, load, asked = Tokenizer(BYTES | {"vocab_size": 257, "end_of_text": 256}), sample.load, []
    monkeypatch.setattr(sample, "load", lambda s: (load(s)[0], tokenizer))
    monkeypatch.setattr(sample, "read_prompt", lambda *_: ("<|endoftext|>é", [0]))
    first = [*"a漢".encode(), 256, *b"other", 256]  # an id is a part of a character
    second = [*"😀".encode(), 200, 256, *b"more"]

    def new_tokens(*args, **how):
        for pair in zip(first, second):
            asked.append(pair)
            yield torch.tensor(pair)[:, None]

    monkeypatch.setattr(sample.generate, "new_tokens", new_tokens)
    assert drawn(small_run, capsys) == ["<|endoftext|>éa漢", "<|endoftext|>é😀\N{REPLACEMENT CHARACTER}"]
    assert len(asked) == 6  # both have ended


def test_a_nanogpt_checkpoint_is_sampled_with_the_exact_gelu(small_run, tmp_path, capsys):
    # it used to be sampled with GPT-2's tanh form in silence
    torch.save(as_nanogpt_wrote(checkpoint_of(small_run, "best.pt")), tmp_path / "ckpt.pt")
    idx = torch.arange(16)[None]
    for asked, used, said in ((None, "gelu", 1), ("gelu_tanh", "gelu_tanh", 0), ("gelu", "gelu", 0)):
        model, tokenizer = sample.load(sample.Settings(out_dir=str(tmp_path), activation=asked))
        assert capsys.readouterr().out.count(checkpoint.NANOGPTS_ACTIVATION) == said
        want = GPT.from_checkpoint(checkpoint.load(small_run / "best.pt"), activation=used)
        torch.testing.assert_close(model(idx, idx)[0][..., :65], want(idx, idx)[0][..., :65], rtol=0, atol=0)
        assert tokenizer.encode("!") == [0]
