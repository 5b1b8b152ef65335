"""Mistakes that people make: each ends in one sentence, without a traceback, and the sentence names the fix.

To add one, add a line to MISTAKES: a command as it is typed, and what the sentence must say to help. In braces are what
the fixture `places` makes, and {small}, the flags of a run of a second.
"""

import itertools
import pathlib
import shlex

import pytest

from tests.conftest import flags, small
from tests.launch import script

MISTAKES = [
    # other tools' habits
    ("train.py --lr 3e-4", "did you mean learning_rate?"),
    ("train.py --epochs=3", "did you mean max_iters?"),
    ("train.py --output_dir=out", "did you mean out_dir?"),
    ("train.py --dtype=fp16", "it takes 'auto' or 'float32' or 'bfloat16' or 'float16'"),
    ("train.py --no-compile", "--name=value, as in --device=cpu or --compile=True"),
    ("train.py --config=config/quickstart.py", "without a flag, as in train.py config/quickstart.py"),
    ("train.py {yaml}", "config files are NAME.py, with lines like batch_size = 8"),
    # how flags and files are written; tests/test_configurator.py has more
    ("train.py out_dir=out-x", "flags are written --name=value"),
    ("sample.py {run} --learning_rate=1e-3", "it is a setting of train.py"),
    ("sample.py {run} --start=a --device=cpu --attention=cudnn", "GPUs only. Here --attention can be manual"),
    ("sample.py {run} 'To be'", "such as --start='To be'"),
    ("train.py config", "config files are NAME.py"),
    ("train.py --init_from=Resume", "did you mean resume?"),
    # the wrong folder or file, or the wrong order
    ("train.py {small} --dataset=shakespere_char", "shakespeare_char"),
    ("train.py {small} --dataset={absent}", "name one of data/ ("),
    ("train.py {small} --dataset={data}/train.bin", "name its folder, {data}"),
    ("train.py {small} --dataset={file}", "python data/text/prepare.py --input={file}"),
    ("train.py {small} --dataset={empty}", "run a data/*/prepare.py with --out_dir={empty}"),
    ("train.py {run}", "--init_from=resume --out_dir=FOLDER to train a run on"),
    ("train.py --init_from={run}", "give --init_from=resume --out_dir={run}"),
    ("train.py --init_from=resume --out_dir={absent}", "train first, or name the folder of another run"),
    ("train.py {small} --out_dir={file}", "File exists"),
    ("train.py {small} --init_from=nobody/no-such-model", "name a folder"),
    ("sample.py --init_from={run}", "name it with --out_dir={run}"),
    ("sample.py {run} --start=FILE:{absent}", "No such file or directory: '{absent}'"),
    ("export.py {run} {full}", "name another folder"),
    ("plot.py {empty}", "name the folder of a run"),
    ("data/text/prepare.py --input={absent}", "name a local file or folder"),
    ("data/text/prepare.py --input=https://example.org/book.txt", "download it first"),
    ("data/text/prepare.py '--input={absent}/*.txt'", "leave out the quotation marks"),
    ("bench.py report {absent}", "name the folder of a benchmark, such as out-bench/ladder"),
    ("study.py report {absent}", "name the folder of a study"),
    # values that cannot be
    ("train.py {small} --device=gpu", "give --device="),
    ("train.py {small} --device=cuda:99", "--device=cpu"),
    ("train.py {small} --attention=flash3", "Here --attention can be manual"),
    ("train.py {small} --attention={kernel}", "path/to/file.py:function"),
    ("train.py {small} --block_size=100000", "Lower --block_size, or add text"),
    ("train.py {small} --vocab_size=10", "set --vocab_size=65, or leave it out"),
    ("train.py {small} --n_head=3", "make it a multiple"),
    ("train.py {small} --mask=document", "data/text/prepare.py, or set --mask=causal"),
    ("train.py {small} --min_lr=0 --lr_decay_iters=5", "give --lr_decay_iters=10"),
    ("train.py {small} --learning_rate=1e-5 --min_lr=6e-5", "give --min_lr=1e-06"),
    ("{torchrun} train.py {small} --gradient_accumulation_steps=5", "make it a multiple of 2"),
    ("SLURM_STEP_NUM_TASKS=2 train.py {small}", "as slurm/train.sh does"),
    ("RANK=0 train.py {small}", "Let torchrun set them, or unset RANK"),
    ("sample.py {run} --start=é", "change the prompt"),
    ("data/text/prepare.py --input={file} --tokenizer=bpe", "it can be byte, char, train:SIZE"),
    ("data/text/prepare.py --input={file} --val_fraction=20", "is not between 0 and 1"),
    # texts that cannot be read as they are
    ("data/text/prepare.py --tokenizer=byte --out_dir={bins} {mail}", "as in --text_column=body"),
    ("data/text/prepare.py --tokenizer=byte --out_dir={bins} {windows}", "it has zero bytes. Remove it, or say"),
    ("bench.py lader", "did you mean ladder?"),
    ("bench.py plan --gpu=RTX4090", "or 'MI300X': did you mean 'RTX 4090'?"),
    ("bench.py plan gpt2-larg", "did you mean config/model/gpt2-large.py?"),
    ("study.py config/quickstart.py --seeds=1..3", "did you mean seed?"),
    ("study.py config/quickstart.py --out_dir=out-x", "--study_dir"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory, data, small_run):
    """What the commands name, by its name."""
    here = tmp_path_factory.mktemp("mistakes")
    for name in ("model", "full", "empty", "new", "bins"):
        (here / name).mkdir()
    contents = {
        "file": "some text",
        "mail.csv": "subject,body\nhello,the text of a mail\n",
        "windows.txt": "t\0e\0x\0\0t\0\0\0",
        "yaml": "learning_rate: 1e-3\nbatch_size: 8\n",
        "kernel.py": "def mine(q, k, v, dropout_p): return v\n",
        "model/config.json": "{}",
        "full/config.json": "{}",
    }
    for name, content in contents.items():
        (here / name).write_text(content)
    found = {path.stem: str(path) for path in here.iterdir()}
    torchrun = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29501"
    small_flags = shlex.join(flags(small(here / "new", data)))
    others = {"absent": str(here / "absent"), "data": data, "run": small_run}
    return found | others | {"small": small_flags, "torchrun": torchrun}


@pytest.mark.parametrize(("command", "fix"), MISTAKES, ids=[command for command, _ in MISTAKES])
def test_a_mistake_is_one_sentence_that_names_the_fix(command, fix, places):
    words = shlex.split(command.format(**places))
    env = dict(word.split("=") for word in itertools.takewhile(lambda word: "=" in word, words))
    done = script(*words[len(env) :], check=False, **env)
    *before, last = done.stderr.splitlines()
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr  # 2: argparse, which prints the usage before
    assert "error: " in last and not any("error" in line for line in before)
    assert fix.format(**places) in last, last
    assert not pathlib.Path(places["new"], "run.json").exists()  # nothing was begun
