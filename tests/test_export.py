"""A run as a Hugging Face GPT-2."""

import torch

import export
from fusedgpt import run_folder
from fusedgpt.dataset import read_meta
from model import GPT
from tests.conftest import as_nanogpt_wrote, fails, script


def test_export_has_the_same_logits_without_padding(small_run, tmp_path):
    # T18
    from transformers import GPT2LMHeadModel

    script("export.py", str(small_run), str(tmp_path / "hf"))
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert theirs.transformer.wte.weight.shape == (65, 32)
    ours = GPT.from_checkpoint(run_folder.load_best(small_run)[0]).eval()
    idx = torch.randint(0, 65, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(idx, idx)[0][..., :65]
        torch.testing.assert_close(theirs(idx).logits, logits, rtol=1e-5, atol=1e-5)
        back = GPT.from_pretrained(tmp_path / "hf").eval()
        torch.testing.assert_close(back(idx, idx)[0], logits, rtol=1e-5, atol=1e-5)
    assert "name a run and a folder" in fails("export.py")
    assert "python export.py OUT_DIR FOLDER" in script("export.py", "--help").stdout
    ask = ["--device=cpu", "--start=!", "--num_samples=1", "--max_new_tokens=5"]
    sampled = script("sample.py", f"--init_from={tmp_path / 'hf'}", *ask)
    assert len(sampled.stdout.splitlines()[1]) == 6  # in the run's own characters
    (tmp_path / "file").write_text("")
    assert "is a file" in fails("export.py", str(small_run), str(tmp_path / "file"))


def test_a_nanogpt_checkpoint_is_exported_with_the_tokenizer_of_its_data(small_run, data, tmp_path):
    # its folder used to have no meta.json, so that sample.py took its ids for GPT-2's
    saved = as_nanogpt_wrote(torch.load(small_run / "ckpt.pt", weights_only=True))
    saved["config"]["dataset"] = str(data)
    torch.save(saved, tmp_path / "ckpt.pt")
    export.main(tmp_path, tmp_path / "hf")
    assert read_meta(tmp_path / "hf")["itos"] == read_meta(data)["itos"]
    assert GPT.from_pretrained(tmp_path / "hf").config.activation == "gelu"


def test_a_nanogpt_checkpoint_without_its_data_is_exported_and_says_what_is_missing(small_run, tmp_path, capsys):
    saved = as_nanogpt_wrote(torch.load(small_run / "ckpt.pt", weights_only=True))
    saved["config"]["dataset"] = "nowhere"
    torch.save(saved, tmp_path / "ckpt.pt")
    export.main(tmp_path, tmp_path / "hf")
    assert "no meta.json, which would hold the tokenizer: dataset='nowhere'" in capsys.readouterr().out
    assert (tmp_path / "hf" / "model.safetensors").exists()
