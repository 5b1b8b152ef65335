"""Uploads of exports, to a Hub that is not there. What an export leaves on disk: tests/test_export.py."""

import pathlib

import pytest

import export
from fusedgpt.errors import UserError
from fusedgpt.interchange import exported
from tests.launch import fails

huggingface_hub = pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")


class Hub:
    """Methods of HfApi, and what they were asked for. `refuses` is what it raises."""

    def __init__(self, refuses=None):
        self.asked, self.refuses = [], refuses

    def create_repo(self, name, **how):
        self.asked.append((name, how))
        return huggingface_hub.RepoUrl(f"https://huggingface.co/{name}")

    def upload_folder(self, **how):
        if self.refuses:
            raise self.refuses
        names = {path.name for path in pathlib.Path(how["folder_path"]).iterdir()}
        self.asked.append((how["repo_id"], names, how["delete_patterns"]))


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    for name in ("create_repo", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, getattr(hub, name))
    return hub


def test_an_export_is_uploaded_with_its_card(small_run, tmp_path, hub, capsys):
    export.main(small_run, tmp_path / "hf", push="me/plays", license="cc-by-4.0")
    made, (name, names, deleted) = hub.asked
    assert made == ("me/plays", {"private": True, "exist_ok": True}) and name == "me/plays"
    assert names == {path.name for path in (tmp_path / "hf").iterdir()} >= {"README.md", "model.safetensors"}
    assert deleted == list(exported.WRITTEN)  # nobody wants parts of an earlier, larger model to stay
    card = huggingface_hub.ModelCard.load(tmp_path / "hf" / "README.md")
    assert (card.data.license, card.data.library_name, card.data.tags) == (
        "cc-by-4.0",
        "transformers",
        ["gpt2", "fusedgpt"],
    )
    assert "| data set | " in card.text and "| validation bits per byte | " in card.text
    assert "uploaded to https://huggingface.co/me/plays" in capsys.readouterr().out


def test_what_the_hub_refuses_is_one_sentence_and_the_export_stays(small_run, tmp_path, hub):
    hub.refuses = huggingface_hub.errors.OfflineModeIsEnabled("no network\nand more")
    with pytest.raises(UserError, match=r"cannot upload to me/plays: no network\. .*upload it with hf upload me/plays"):
        export.main(small_run, tmp_path / "hf", push="me/plays")
    assert (tmp_path / "hf" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["plays", "me/my/plays", "me/a b"])
def test_a_bad_name_is_refused_before_anything_is_written(name, small_run, tmp_path, hub):
    with pytest.raises(UserError, match="no name on the Hub: write owner/name"):
        export.main(small_run, tmp_path / "hf", push=name)
    assert not (tmp_path / "hf").exists() and not hub.asked


def test_nobody_is_logged_in(small_run, tmp_path):
    said = fails("export.py", small_run, tmp_path / "hf", "--push=me/plays", HF_TOKEN="", HF_HOME=str(tmp_path))
    assert "--push=me/plays needs a token for the Hub: log in with hf auth login, or set HF_TOKEN" in said
    assert not (tmp_path / "hf").exists()
