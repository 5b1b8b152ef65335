"""nanoGPT's files, read by PyTorch and pickle alone; tests/test_nanogpt.py runs nanoGPT's sample.py."""

import pickle

import pytest
import torch

from fusedgpt.data import dataset
from fusedgpt.errors import UserError
from fusedgpt.interchange import nanogpt
from fusedgpt.runs import checkpoint
from model import GPT, GPTConfig
from tests.fusedgpt.data.test_tokenizer import TEXT, meta_of

SAVED = {"model_args": dict.fromkeys(checkpoint.NANOGPTS), "iter_num": 7, "best_val_loss": 1.5}


@pytest.mark.parametrize("bias", [True, False])
def test_a_checkpoint_has_no_padding_and_names_only_its_data(bias, tmp_path):
    shape = dict(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=65, bias=bias, activation="gelu")
    model = GPT(GPTConfig(**shape, vocab_multiple=64)).eval()
    torch.save(nanogpt.checkpoint(model.config, model.state_dict(), SAVED, "plays"), tmp_path / "ckpt.pt")
    found = torch.load(tmp_path / "ckpt.pt", weights_only=True)
    assert found["model_args"] == {name: shape.get(name, 0.0) for name in checkpoint.NANOGPTS}
    assert found["config"] == {"dataset": "plays"} and (found["iter_num"], found["best_val_loss"]) == (7, 1.5)
    assert found["model"]["lm_head.weight"].shape == (65, 16)
    assert found["model"].keys() == model.state_dict().keys()
    # the padding would otherwise be in the file, since a slice is saved with its whole tensor
    assert found["model"]["transformer.wte.weight"].untyped_storage().nbytes() == 65 * 16 * 4
    back = GPT.from_checkpoint(checkpoint.load(tmp_path / "ckpt.pt")).eval()
    ids = torch.arange(8)[None]
    torch.testing.assert_close(back(ids, ids)[0], model(ids, ids)[0][..., :65], rtol=1e-5, atol=1e-5)


def read(meta):
    """stoi and itos of a meta.pkl."""
    found = pickle.loads(pickle.dumps(nanogpt.characters(meta)))
    return found["stoi"], found["itos"]


def test_characters_are_those_of_the_data(tmp_path):
    stoi, itos = read(meta_of("char"))
    assert "".join(itos[stoi[c]] for c in TEXT) == TEXT and itos[meta_of("char")["end_of_text"]] == "<|endoftext|>"
    assert [stoi[c] for c in TEXT] == [meta_of("char")["itos"].index(c) for c in TEXT]
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(nanogpt.characters(meta_of("char"))))
    assert dataset.read_meta(tmp_path)["itos"] == meta_of("char")["itos"]


def test_tokenizers_that_nanogpt_has_not_are_refused():
    assert nanogpt.characters({"tokenizer": "gpt2", "vocab_size": 50257}) is None  # nanoGPT's default
    for kind in ("byte", "json"):
        with pytest.raises(UserError, match=f"not the tokenizer {kind}"):
            nanogpt.characters(meta_of(kind))
