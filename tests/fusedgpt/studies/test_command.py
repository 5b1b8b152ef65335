import dataclasses
import re

import pytest

from fusedgpt.errors import UserError
from fusedgpt.settings import Settings
from fusedgpt.studies import command, search
from tests.launch import ROOT

pytest.importorskip("tyro")


def read(*args):
    return command.read(list(args), "a study")


def test_lists_vary_and_everything_else_is_shared():
    asked = read("--learning_rate=1e-3,3e-3", "--optimizer=adamw,muon", "--seed=1..3", "--n_layer=2", "--jobs=2")
    assert asked.seeds == [1, 2, 3]
    pairs = [(rate, optimizer) for rate in (1e-3, 3e-3) for optimizer in ("adamw", "muon")]
    expected = {f"learning_rate={r},optimizer={o}": {"learning_rate": r, "optimizer": o} for r, o in pairs}
    assert asked.variants == expected and list(asked.variants) == list(expected)
    assert asked.shared == dataclasses.replace(Settings(), n_layer=2) and asked.study.jobs == 2
    assert list(read("--n_layer=2..4").variants) == ["n_layer=2", "n_layer=3", "n_layer=4"]
    assert (read("--seed=5,7").seeds, read("--seed=5").seeds, read().seeds) == ([5, 7], [5], [1337])
    assert read("--sample_prompts=a, b", "--eval_tasks=c,d").variants == {"config": {}}
    asked = read("--learning_rate,min_lr=1e-3:1e-4,2e-3:2e-4", "--n_head=1,2").variants  # two vary together
    assert len(asked) == 4 and asked["learning_rate=0.002+min_lr=0.0002,n_head=1"]["min_lr"] == 2e-4


def test_a_config_file_names_variants(tmp_path):
    file = tmp_path / "study.py"
    # math: which configs may use without an import, as nanoGPT's may
    file.write_text('math\nn_head = 2\nn_embd = 96\nvariants = {"small": dict(n_layer=2), "deep": dict(n_embd=64)}\n')
    asked = read(str(file), "--seed=1,2")
    # a variant that does not name n_embd used to train with train.py's default, not with the file's
    assert asked.variants == {"small": {"n_layer": 2, "n_embd": 96}, "deep": {"n_layer": 12, "n_embd": 64}}
    assert asked.shared.n_head == 2
    assert list(read(str(file), "--dropout=0,0.1").variants)[:2] == ["small,dropout=0.0", "small,dropout=0.1"]
    refused = {"a=dict(n_layer='two')": "n_layer='two' is not allowed", "a=dict(seed=1)": "seed cannot vary"}
    for variants, said in (refused | {"a={}, A={}": "variant 'A' would have the folder of another"}).items():
        file.write_text(f"variants = dict({variants})")
        with pytest.raises(UserError, match=said):
            read(str(file))
    file.write_text("variants = dict(a=dict(max_iters=1e3, lr_decay_iters=9), b=dict(max_iters=3))")
    asked = read(str(file), "--beta2=0.95")
    assert [each["max_iters"] for each in asked.variants.values()] == [1000, 3]  # as at the top of a file
    assert asked.given == ["beta2"]
    with pytest.raises(UserError, match="--max_iters would change nothing: each variant has"):
        read(str(file), "--max_iters=8")


def test_variants_evaluate_on_the_same_windows():
    # a variant of batch 12 used to be compared on half of the windows that one of batch 24 had, and called worse
    changes = [str(ROOT / "config" / name) for name in ("quickstart.py", "study/findings.py")]
    for args, windows in [(["--batch_size=12,24", "--eval_iters=10"], 120), (changes, 320)]:
        assert {each["batch_size"] * each["eval_iters"] for each in read(*args).variants.values()} == {windows}
    whole = read("--batch_size=7,24", "--block_size=64,128", "--eval_iters=0").variants
    assert {each["eval_iters"] for each in whole.values()} == {0}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("--learning_rate=1e-3,fast", "learning_rate='fast' is not allowed"),
        ("--learning_rate=1e-3,0.001", "learning_rate=0.001 twice"),
        ("--n_layer=5..2", "must go up"),
        ("--init_from=resume", "a study starts each run itself"),
        ("--n_head=5,7", "n_embd=768 cannot be split"),
        ("--n_layer=2,3 --storage=postgresql://x/y", "--storage shares the trials of a search"),
        ("--looks=2,9 --seed=1..5", "looks='2,9' must be numbers of seeds from 2 to 5"),
        ("--matters=0", "matters=0.0 must be more than 0"),
        # these used to train with other settings than a variant's name said, or to drop one of two flags
        ("--minutes=1 --lr_decay_iters=10,20", "sets lr_decay_iters of each run"),
        ("--seed,learning_rate=1:1e-3,2:1e-3", "seed cannot vary"),
        ("--learning_rate=4e-3,8e-3 --learning_rate=1e-3", "learning_rate is given twice"),
        # another yardstick for each variant
        ("--dataset=one,two", "dataset cannot vary"),
        ("--batch_size=24,32 --eval_iters=10", "batch_size=32 does not divide the 120 windows of an evaluation"),
        ("--block_size=64,128", "block_size cannot vary with metric=val_loss and eval_iters=200"),
        ("--search=block_size=64|128", "block_size cannot vary"),
        # --metric=ms knew nothing of the machine: a learning rate was "worse by 14.6 ms, p = 0.007"
        ("--n_layer=2,3 --metric=ms", "metric='ms' is not allowed: it takes 'val_loss' or 'bits_per_byte'"),
        ("--search=learning_rate=1e-2..1e-3", "must be numbers that go up"),
        ("--search=learning_rate=1e-3", "must be different choices, a|b, or a range"),
        ("--search=attention=a/b.py:f|a-b.py:f", "must be different choices"),  # their runs would share a folder
        ("--search=n_layer=1..2,n_layer=2..3", "write each setting once"),
        ("--search=n_head=5..7", "n_embd=768 cannot be split"),
        ("--search=n_layer=2..4 --against=HEAD", "--search chooses the variants"),
    ],
)
def test_bad_input_is_refused(args, said):
    with pytest.raises(UserError, match=re.escape(said)):
        search.prepared(read(*args.split()))
