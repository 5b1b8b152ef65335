"""Each hostile tokenizer.json is used, or refused in one sentence, whatever the Rust code does with it."""

import copy
import json

import pytest

from fusedgpt.data import make_tokenizer
from fusedgpt.interchange import tokenizer_json
from tests.faults.processes import rng
from tests.faults.test_inputs import tried
from tests.fusedgpt.data.test_tokenizer import HOSTILE, trained_bpe, used

CASES = 300
THINGS = [None, True, "", "a", "<|endoftext|>", "\0", -1, 0, 1, 7, 300, 2**24, 2**31, 2**32 - 1, 2**63, 1e308, [], {}]
THINGS += ["[UNK]", "é漢", ["a", "b"], [["a", "b"]], {"a": 0}, {"Regex": "(a|a?)+$"}, {"String": ""}, [None]]


def mutated(chance):
    """A tokenizer.json in which some entries have another value, or are gone."""
    content = copy.deepcopy(trained_bpe() | chance.choice([*HOSTILE.values(), *[{}] * 2 * len(HOSTILE)]))
    for _ in range(chance.randint(0, 2)):
        level = content  # descend at random, or nearly all changes would be in vocab and merges
        while chance.random() < 0.7 and (inner := [v for _, v in _pairs(level) if isinstance(v, (dict, list)) and v]):
            level = chance.choice(inner)
        if not level:
            continue
        key, _ = chance.choice(_pairs(level))
        if chance.random() < 0.2:
            del level[key]
        else:
            level[key] = copy.deepcopy(chance.choice(THINGS))
    return content


def _pairs(level):
    return list(level.items() if isinstance(level, dict) else enumerate(level))


@pytest.mark.slow
def test_a_tokenizer_json_is_used_or_refused_in_one_sentence(tmp_path, tell):
    chance, good = rng("tokenizers"), 0
    for _ in range(CASES):
        content = mutated(chance)
        text = json.dumps(content)
        if chance.random() < 0.1:
            text = text[: chance.randrange(len(text))]
        (tmp_path / "tokenizer.json").write_text(text)
        meta = {"tokenizer": "json", "vocab_size": 300, "tokenizer_json": content, "end_of_text": 0}
        tried(used, meta, content)
        tried(lambda meta: tokenizer_json.tokenizer(meta, 16) and None, meta, content)
        if read := tried(lambda name: tokenizer_json.own(name)[0], str(tmp_path), content):
            good += 1
            tried(used, read, content)
        tried(lambda name: make_tokenizer.of(name, None), str(tmp_path / "tokenizer.json"), content)
    tell(f"{CASES:,} tokenizer.json, {good:,} of them read")
    assert 0.02 * CASES < good < 0.98 * CASES
