"""Convert between Hugging Face's tokenizers and the meta of a data set."""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection
from typing import Any

from fusedgpt.data import dataset
from fusedgpt.data.tokenizer import (
    END_OF_TEXT,
    GPT2,
    Tokenizer,
    byte_characters,
    fails_as,
    tiktoken_bpe,
    without_prefix,
)
from fusedgpt.errors import shown
from fusedgpt.interchange import pretrained

PRETRAINED = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")  # weights on the Hugging Face hub
BYTES = byte_characters()
ONE_CHARACTER = r"[\s\S]"  # a dot does not match line ends


def tokenizer(meta: dict, max_length: int) -> Any:
    """The tokenizer that `meta` describes, as a PreTrainedTokenizerFast for contexts of `max_length` tokens.

    It gives the ids of Tokenizer.encode, except for special tokens of a tokenizer.json in a text. A character that a
    `char` tokenizer does not know is an error in transformers too. Raises UserError if the tokenizer cannot be loaded.
    """
    from transformers import PreTrainedTokenizerFast

    ours = Tokenizer(meta)
    with fails_as(f"the tokenizer {ours.kind!r} cannot be written for transformers"):
        built = {"byte": _byte_level, "char": _of_characters, "json": _of_json}.get(ours.kind, _of_tiktoken)(ours)
        # None if no id ends a text: the model must not stop at GPT-2's id, which transformers takes by default
        end = None if ours.end_of_text is None else built.id_to_token(ours.end_of_text)
        return PreTrainedTokenizerFast(
            tokenizer_object=built,
            bos_token=end,
            eos_token=end,
            model_max_length=max_length,
            clean_up_tokenization_spaces=False,  # True would remove spaces before punctuation
        )


def save(tokenizer: Any, folder: str | os.PathLike) -> None:
    """Write tokenizer.json and tokenizer_config.json, which name the class as transformers 4 does; 5 knows it too."""
    tokenizer.save_pretrained(folder)
    file = pathlib.Path(folder, "tokenizer_config.json")
    config = json.loads(file.read_text(encoding="utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _of_tiktoken(ours):
    from tokenizers import Regex, pre_tokenizers

    bpe = tiktoken_bpe(ours.kind)
    special = {bpe.encode_single_token(text) for text in bpe.special_tokens_set}
    ranks = {token: id for id, token in enumerate(ours.tokens) if token is not None and id not in special}
    # {1,3}+ is possessive in tiktoken's regular expressions, but `tokenizers` would repeat {1,3}. In cl100k_base it
    # ends an alternative, so {1,3} matches the same
    pattern = re.sub(r"(\{\d+,\d+\})\+", r"\1", bpe._pat_str)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return _byte_level(ours, [_last_merge(token, ranks) for token in ranks if len(token) > 1], [split])


def _last_merge(token, ranks):
    """The two tokens whose merge makes `token`. A BPE merges the pair of the lowest rank first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        at = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], math.inf))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_level(ours, merges=(), splits=()):
    """A byte-level BPE with the tokens of `ours`. The only special token that a text can contain is end-of-text."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    ids = {byte_level_name(token): id for id, token in enumerate(ours.tokens) if token is not None}
    # ignore_merges: a word that is a token becomes that token, as in tiktoken, even if no merges make it
    built = tokenizers.Tokenizer(
        models.BPE(ids, [tuple(map(byte_level_name, pair)) for pair in merges], ignore_merges=True)
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    built.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    built.decoder = decoders.ByteLevel()
    if ours.end_of_text is not None:
        built.add_special_tokens([tokenizers.AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return built


def byte_level_name(token: bytes) -> str:
    """The name of a token in the vocabulary of a byte-level BPE."""
    return "".join(BYTES[byte] for byte in token)


def _of_characters(ours):
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    ids = {c: id for id, c in enumerate(ours.itos) if c is not None}
    built = tokenizers.Tokenizer(models.WordLevel(ids))  # its unknown token has no id, hence the error
    built.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(ONE_CHARACTER), "isolated")
    built.decoder = decoders.Fuse()
    return built


def _of_json(ours):
    """The tokenizer.json without what Tokenizer.encode leaves out: truncation, padding, and ids added around a text."""
    import tokenizers

    ours.encode_text("")  # raises UserError if it is damaged
    content = ours.meta["tokenizer_json"] | dict.fromkeys(("truncation", "padding", "post_processor"))
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def read(name: str, say: Callable[[str], None] = print) -> tuple[dict, Any]:
    """As `own`, but a model without a tokenizer is taken to have GPT-2's BPE, and told of."""
    meta, theirs = own(name)
    if not meta:
        say(f"{name} has no tokenizer.json and no meta.json, so its ids are taken for GPT-2's: if not, put one there")
    return meta or GPT2, theirs


def own(name: str) -> tuple[dict | None, Any]:
    """A model's tokenizer: the meta of data in its ids, or None, and what transformers has for it, or None.

    name: hub id or folder of the model. The meta comes from export.py's meta.json, or else from tokenizer.json, or from
    vocab.json and merges.txt: a BPE of bytes, or of SentencePiece's with a token for each byte. In data, no text begins
    with a blank of its own. Raises UserError if a file is damaged or cannot be reached, or for another tokenizer.
    """
    if name in PRETRAINED and not os.path.isdir(name):  # a folder has its own, as it has its own weights
        return GPT2, None
    if pathlib.Path(name, "meta.json").exists():
        return dataset.read_meta(name), None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast
    if not _reached(name, "tokenizer.json"):
        kind = AutoTokenizer  # vocab.json and merges.txt do not say how text is split: the class of the model does
        if not (_reached(name, "vocab.json") and _reached(name, "merges.txt")):
            return None, None
    _reached(name, "tokenizer_config.json")  # which names the end of a text: transformers would go on without it
    with fails_as(f"cannot read the tokenizer of {name}"):  # a damaged file can raise anything
        theirs = kind.from_pretrained(name)
        ids, content = theirs.get_vocab(), without_prefix(json.loads(theirs.backend_tokenizer.to_str()))
        if content["model"]["type"] == "WordLevel" and (file := _reached(name, "meta.json")):  # an export on the hub
            return dataset.read_meta(os.path.dirname(file)), None
        meta = {"tokenizer": "json", "vocab_size": 1 + max(ids.values()), "tokenizer_json": content}
        end = ids.get(END_OF_TEXT) if theirs.eos_token_id is None else theirs.eos_token_id
        if end is not None:
            meta["end_of_text"] = end
    Tokenizer(meta).byte_lengths()  # raises UserError if it is not byte-level
    return meta, theirs


class OfModel(Tokenizer):
    """The tokenizer of a model from elsewhere, as `read` gives it. A prompt gets the ids that transformers gives it.

    ends: more ids at which a text ends.
    """

    def __init__(self, meta: dict, theirs: Any, ends: Collection[int]):
        super().__init__(meta)
        self.theirs, self.begin = theirs, []
        self.ends |= set(ends)
        if theirs:
            whole, text = theirs("a").input_ids, theirs("a", add_special_tokens=False).input_ids
            self.begin = next((whole[:n] for n in range(len(whole)) if whole[n : n + len(text)] == text), [])

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt. Special tokens in it count, and a blank comes first if the tokenizer puts one there."""
        if self.theirs is None:
            return super().encode(text)
        with fails_as(f"the model's tokenizer cannot tokenize the prompt {shown(text)}"):
            return self.begin + self.theirs(text, add_special_tokens=False).input_ids


def _reached(name, file):
    """As pretrained.find_file, with one sentence for all errors."""
    with fails_as(f"cannot reach the {file} of {name}, try again with a network, or name a folder that has it"):
        return pretrained.find_file(name, file)
