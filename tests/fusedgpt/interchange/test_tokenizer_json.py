"""Tokenizers in Hugging Face's format, against tiktoken, `tokenizers` and our own."""

import json

import numpy as np
import pytest

from fusedgpt.data import encoding, tokenizer
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError
from fusedgpt.interchange import tokenizer_json
from tests.conftest import hugging_face, why_no_bpe
from tests.fusedgpt.data.test_tokenizer import KINDS, TEXT, meta_of

ORDINARY = "I'll say  it's 10 o'clock,\n\n\n   don't\tyou? x = 1  # naïve 漢字 🙂 ñ\r\n\u3000end \n "


def loaded(meta, folder):
    """The tokenizer as AutoTokenizer finds it in a folder."""
    from transformers import AutoTokenizer

    hugging_face(folder, n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=8)  # for the config.json
    tokenizer_json.save(tokenizer_json.tokenizer(meta, max_length=8), folder)
    return AutoTokenizer.from_pretrained(folder)


def random_texts(count):
    """Random texts from all of Unicode, mixed with the characters that the patterns of BPEs look for."""
    rng = np.random.default_rng(0)
    points = np.r_[0:0xD800, 0xE000:0x30000]
    ascii_too = [*"  \n\t\r\x0b\x1c\x85\xa0'stdlvre019.;(", "'ll", " don't", "123", "\r\n\n"]
    for _ in range(count):
        parts = [chr(c) for c in rng.choice(points, 20)] + list(rng.choice(ascii_too, 60))
        rng.shuffle(parts)
        yield "".join(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_ours_and_text_comes_back(kind, tmp_path, shorter):
    # AutoTokenizer used to find nothing, and to turn any text into no ids in silence
    meta = meta_of(kind)
    if kind == "gpt2":
        shorter(kind)
    ours, theirs = Tokenizer(meta), loaded(meta, tmp_path)
    for text in (
        TEXT,
        TEXT * 3,
        TEXT.replace("\n", "\n\n"),
        *([] if kind == "char" else [ORDINARY, *random_texts(50)]),
    ):
        ids = theirs(text).input_ids
        assert ids == ours.encode_text(text).tolist()
        assert theirs.decode(ids) == text
    assert theirs(f"{TEXT}<|endoftext|>").input_ids == ours.encode(f"{TEXT}<|endoftext|>")
    assert theirs.eos_token_id == theirs.bos_token_id == ours.end_of_text == meta.get("end_of_text", 50256)
    assert theirs.decode(ours.encode(f"{TEXT}<|endoftext|>"), skip_special_tokens=True) == TEXT
    # AutoTokenizer of transformers 4.57, and vLLM on it: "Tokenizer class TokenizersBackend does not exist"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["clean_up_tokenization_spaces"] is False and config["model_max_length"] == 8


@pytest.mark.parametrize("kind", ["byte", "char", "json"])
def test_without_an_end_of_text_there_is_no_token_that_ends_one(kind, tmp_path):
    # a character model used to stop at its 65th character, 'z'
    meta = {name: value for name, value in meta_of(kind).items() if name != "end_of_text"}
    if kind == "byte":
        meta["vocab_size"] = 256
    theirs = loaded(meta, tmp_path)
    assert theirs.eos_token_id is None and theirs.bos_token_id is None
    assert theirs(TEXT).input_ids == Tokenizer(meta).encode_text(TEXT).tolist()


def test_an_unknown_character_is_an_error_and_not_left_out(tmp_path):
    with pytest.raises(Exception, match=r"Missing \[UNK\] token from the vocabulary"):
        loaded(meta_of("char"), tmp_path)("Q")


@pytest.mark.parametrize("name", ["r50k_base", "p50k_base", "cl100k_base", "o200k_base"])
def test_other_encodings_keep_their_pattern_and_the_ids_of_their_special_tokens(name, tmp_path, shorter):
    # between ranks and special tokens there are gaps, which transformers' own conversion closes
    bpe = shorter(name)
    end = bpe._special_tokens["<|endoftext|>"]
    meta = {"tokenizer": name, "vocab_size": bpe.n_vocab, "end_of_text": end}
    theirs = loaded(meta, tmp_path)
    for text in (ORDINARY, "(2000)", *random_texts(50)):  # some encodings split numbers of more than three digits
        ids = bpe.encode(text, disallowed_special=())
        assert theirs(text).input_ids == ids and theirs.decode(ids) == text
    assert theirs.eos_token_id == end
    assert theirs.convert_tokens_to_ids(list(bpe._special_tokens)) == list(bpe._special_tokens.values())
    # a special token that ends no text used to be an id here, but text in a prompt
    for text in ("".join(f"{token}a {token}" for token in bpe._special_tokens), *bpe._special_tokens):
        assert theirs(text).input_ids == Tokenizer(meta).encode(text)


def test_gpt2_has_the_50000_merges_of_its_release():
    if reason := why_no_bpe():
        pytest.skip(reason)
    theirs = tokenizer_json.tokenizer(tokenizer.GPT2, 1024)
    content = json.loads(theirs.backend_tokenizer.to_str())
    assert len(content["model"]["vocab"]) == 50257 and len(content["model"]["merges"]) == 50000
    assert content["model"]["merges"][:3] == [["Ġ", "t"], ["Ġ", "a"], ["h", "e"]]
    assert theirs(ORDINARY).input_ids == Tokenizer(tokenizer.GPT2).encode_text(ORDINARY).tolist()


def test_what_surrounds_a_text_is_left_out(tmp_path):
    # a tokenizer.json may put a token before each text, cut it off, or pad it; training does none of it
    from tokenizers import Tokenizer as Theirs

    changed = Theirs.from_str(json.dumps(meta_of("json")["tokenizer_json"]))
    changed.enable_truncation(3)
    changed.enable_padding(length=9)
    meta = meta_of("json") | {"tokenizer_json": json.loads(changed.to_str())}
    assert loaded(meta, tmp_path)(TEXT).input_ids == Tokenizer(meta).encode_text(TEXT).tolist()


def test_a_tokenizer_json_from_outside_becomes_a_meta(tmp_path):
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(json.dumps(meta_of("json")["tokenizer_json"]))
    named = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<|endoftext|>")
    assert tokenizer_json.read(str(tmp_path))[0]["end_of_text"] == 0  # by its name alone
    named.save_pretrained(tmp_path)
    meta = tokenizer_json.read(str(tmp_path))[0]
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"]) == ("json", len(named), 0)
    hugging_face(tmp_path, n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=8)
    assert Tokenizer(meta).encode_text(TEXT).tolist() == AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids


def test_a_folder_without_a_tokenizer_has_gpt2s(tmp_path, capsys):
    assert tokenizer_json.own(str(tmp_path))[0] is None and tokenizer_json.own("gpt2")[0] == tokenizer.GPT2
    assert tokenizer_json.read("gpt2-xl")[0] == tokenizer.GPT2 and not capsys.readouterr().out
    assert tokenizer_json.read(str(tmp_path))[0] == tokenizer.GPT2  # which used to be assumed in silence
    assert f"{tmp_path} has no tokenizer.json and no meta.json, so its ids are taken" in capsys.readouterr().out


def test_a_tokenizer_that_cannot_be_reached_is_not_taken_for_gpt2s(cached, capsys):
    # offline, with only the weights of a Qwen in the cache, its ids were decoded as GPT-2's
    with pytest.raises(UserError, match=r"cannot reach the tokenizer.json of owner/name, try again with a network, or"):
        tokenizer_json.read("owner/name")
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (cached.absent / name).touch()  # the Hub has said, on an earlier day, that there is none
    assert tokenizer_json.read("owner/name")[0] == tokenizer.GPT2
    assert "owner/name has no tokenizer.json" in capsys.readouterr().out


def test_the_end_of_a_text_is_not_lost_with_a_file_that_cannot_be_reached(cached):
    # offline, with tokenizer.json alone in the cache, the id that ends a text was unknown, and texts went on beyond it
    content = json.dumps(meta_of("json")["tokenizer_json"]).replace("<|endoftext|>", "<|im_end|>")
    (cached.files / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"cannot reach the tokenizer_config.json of owner/name, "):
        tokenizer_json.own("owner/name")
    (cached.files / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    assert tokenizer_json.own("owner/name")[0]["end_of_text"] == 0
    (cached.files / "tokenizer_config.json").unlink()
    (cached.absent / "tokenizer_config.json").touch()
    assert "end_of_text" not in tokenizer_json.own("owner/name")


def test_an_export_of_characters_is_read_from_the_hub_too(cached):
    # meta.json was looked for in folders alone, and this tokenizer.json "is not byte-level"
    meta = meta_of("char")
    tokenizer_json.save(tokenizer_json.tokenizer(meta, 8), cached.files)
    (cached.files / "meta.json").write_text(json.dumps(meta))
    assert tokenizer_json.own("owner/name") == (meta, None)


def test_a_folder_that_is_called_gpt2_has_its_own_tokenizer(tmp_path, monkeypatch):
    # as after `python export.py RUN gpt2`: its weights came from the folder, but its ids were GPT-2's
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "meta.json").write_text(json.dumps(meta_of("byte")))
    assert tokenizer_json.own("gpt2")[0] == meta_of("byte")
    (tmp_path / "gpt2" / "meta.json").unlink()
    assert tokenizer_json.own("gpt2")[0] is None


@pytest.mark.parametrize("words", [["▁the", "▁cat"], ["the", "##cat"]])
def test_a_tokenizer_json_that_is_not_byte_level_is_refused(tmp_path, words):
    # texts of the second came back without blanks: "deadthisdead"
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models

    ids = {word: id for id, word in enumerate(words)}
    Theirs(models.WordLevel(ids, unk_token=words[0])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="tokenizer_json is not byte-level"):
        tokenizer_json.read(str(tmp_path))


def of_sentencepiece(metaspace=False):
    """A tokenizer.json as that of Llama 2, or with `metaspace` as newer ones: a BPE that puts a blank before a text."""
    from tokenizers import Tokenizer as Theirs
    from tokenizers import models, pre_tokenizers, trainers

    trained = Theirs(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trained.train_from_iterator(TEXT.splitlines(), trainers.BpeTrainer(vocab_size=200, show_progress=False))
    content = json.loads(trained.to_str())
    vocab = content["model"]["vocab"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(vocab, key=vocab.get)]
    content["model"] |= {"vocab": {name: id for id, name in enumerate(names)}, "byte_fallback": True}
    content["model"] |= {"unk_token": "<unk>", "fuse_unk": True}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    prepend = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]}
    split = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    content |= {"normalizer": None if metaspace else prepend, "pre_tokenizer": split if metaspace else None}
    back = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
    back.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    added = [{"id": id, "content": name} | special for id, name in enumerate(names[:3])]
    return content | {"decoder": {"type": "Sequence", "decoders": back}, "added_tokens": added}


@pytest.mark.parametrize("metaspace", [False, True])
def test_a_tokenizer_of_sentencepiece_is_read_without_the_blank_before_a_text(metaspace, tmp_path):
    # Llama 2's and Mistral's were refused. Their blank before each text would be one before each part of a text
    from tokenizers import Tokenizer as Theirs

    content = of_sentencepiece(metaspace)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    meta = tokenizer_json.own(str(tmp_path))[0]
    prepared = encoding.made(str(tmp_path / "tokenizer.json"), None)
    assert Tokenizer(prepared).tokens == Tokenizer(meta).tokens and meta["end_of_text"] == prepared["end_of_text"] == 2
    ours, theirs = Tokenizer(meta), Theirs.from_str(json.dumps(content))
    back = tokenizer_json.tokenizer(meta, 64)
    for text in (TEXT, f" {TEXT}", ORDINARY, *random_texts(20)):
        ids = ours.encode_text(text).tolist()
        assert ours.decode(ids).decode() == text and ours.byte_lengths()[ids].sum() == len(text.encode())
        assert back(text).input_ids == ids and back.decode(ids) == text
    plain = TEXT.replace("\n", " ")
    assert ours.encode_text(f" {plain}").tolist() == theirs.encode(plain, add_special_tokens=False).ids
    content["model"]["vocab"]["other"] = content["model"]["vocab"].pop("<0x41>")
    with pytest.raises(UserError, match="tokenizer_json is not byte-level"):
        Tokenizer(meta | {"tokenizer_json": content}).byte_lengths()


@pytest.mark.parametrize("around", ["", "begin", "begin and end"])
def test_a_prompt_begins_as_transformers_has_it(around, tmp_path):
    # a Llama was given its prompt without <s>, and "<s>" in a prompt was three letters
    from transformers import AutoTokenizer

    content, ids = of_sentencepiece(), {"<s>": 1, "</s>": 2}
    single = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ids]
    single.insert(1, {"Sequence": {"id": "A", "type_id": 0}})
    single = single[: 1 + len(around.split())] if around != "begin and end" else single
    special = {name: {"id": name, "ids": [id], "tokens": [name]} for name, id in ids.items()}
    if around:
        after = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
        content |= {"post_processor": after}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    names = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    meta, ours = tokenizer_json.own(str(tmp_path))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("the cat", TEXT, ""):
        want = theirs(text).input_ids[: -1 if "end" in around else None]  # a prompt goes on
        assert tokenizer_json.OfModel(meta, ours, ()).encode(text) == want
    one = tokenizer_json.OfModel(meta, ours, ())
    assert one.begin == [1] * bool(around) and one.encode("<s>a")[len(one.begin)] == 1


def test_the_two_files_of_an_older_gpt2_are_read(tmp_path):
    # vocab.json and merges.txt were passed over, and the ids taken for GPT-2's
    from transformers import AutoTokenizer

    hugging_face(tmp_path, n_layer=1, n_head=1, n_embd=8, n_positions=8, vocab_size=8)
    model = meta_of("json")["tokenizer_json"]["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"]))
    meta, theirs = tokenizer_json.own(str(tmp_path))
    assert Tokenizer(meta).encode_text(TEXT).tolist() == AutoTokenizer.from_pretrained(tmp_path)(TEXT).input_ids
    assert meta["end_of_text"] == 0 and theirs.eos_token == "<|endoftext|>"
    (tmp_path / "merges.txt").unlink()
    assert tokenizer_json.own(str(tmp_path)) == (None, None)
