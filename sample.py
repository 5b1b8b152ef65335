"""Sample text from a trained run, from GPT-2, or from any model like it in Hugging Face's format.

    python sample.py out-shakespeare-char --num_samples=3
    python sample.py --init_from=gpt2-xl --start="What is the answer?" --temperature=0
    python sample.py out --start=FILE:prompt.txt

Every setting is a field of Settings; config files and --name=value flags set them (configurator.py).
"""

import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from typing import Literal, TextIO

from configurator import answer_help, configure
from fusedgpt import settings, terminal
from fusedgpt.machine import waiting


@dataclasses.dataclass
class Settings:
    # source of the weights: resume (the run in out_dir), or a GPT-2 in Hugging Face's format, by its folder or by its
    # id on the hub, such as gpt2, gpt2-medium, gpt2-large, gpt2-xl or owner/name
    init_from: str = "resume"
    # folder of a run: best.pt is sampled, or ckpt.pt if there is none; or a checkpoint, such as out/ckpt-20.pt; or the
    # folder of a model in Hugging Face's format
    out_dir: str = "out"
    start: str = "\n"  # prompt, or FILE:path
    num_samples: int = 10  # number of samples, drawn together as one batch
    max_new_tokens: int = 500  # tokens in each sample
    temperature: float = 0.8  # softmax temperature; lower prefers likelier ids; 0 always takes the likeliest
    top_k: int = 200  # draw from the k likeliest ids; 0: from all
    top_p: float = 0.0  # draw from the fewest likeliest ids that together reach this probability (nucleus); 0: all
    seed: int = 1337  # seed of the draws: the same seed and dtypes give the same samples
    device: str = "auto"  # device: auto (a GPU if there is one), cpu, cuda, cuda:1, mps
    # dtype of weights and matrix products; auto: the fastest for the prompt, and the fastest for the tokens after it
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    # dtype of the tokens after the prompt, on a CPU; None: as dtype says
    decode_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    # torch.compile of the decode step, which pays off for long samples; auto: on GPUs
    compile: bool | Literal["auto"] = False
    # attention kernel, as in train.py, or your own; auto times a prompt as long as the whole text, up to block_size
    attention: settings.Attention | str = "sdpa"
    # form of GELU; gelu_tanh: GPT-2's; gelu: exact, nanoGPT's; None: the form that the weights were trained with
    activation: Literal["gelu_tanh", "gelu"] | None = None


# config files of train.py are taken, because they name out_dir; settings that only train.py has are ignored
ONLY_TRAINING = {
    field.name: "it is a setting of train.py"
    for field in dataclasses.fields(settings.Settings)
    if field.name not in {own.name for own in dataclasses.fields(Settings)}
}

PLACES = ("out_dir",)  # what an argument without a name sets

if __name__ == "__main__":
    # before PyTorch, which takes seconds to import
    answer_help(Settings(), sys.argv[1:], __doc__, unused=ONLY_TRAINING, places=PLACES)
    waiting.announce(sys.stderr)

import torch

from fusedgpt.attention.table import check_name
from fusedgpt.data import dataset
from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError, one_sentence
from fusedgpt.generation import auto, engines, generate
from fusedgpt.interchange import pretrained, tokenizer_json
from fusedgpt.machine import memory
from fusedgpt.machine.device import dtype_name, resolve_device
from fusedgpt.runs import checkpoint, metrics, run_folder
from model import GPT


def validate(s: Settings) -> None:
    """Raise UserError for a number that sampling cannot use (generate.sample checks the others)."""
    if s.num_samples < 1 or s.max_new_tokens < 1:
        raise UserError(f"num_samples={s.num_samples} and max_new_tokens={s.max_new_tokens} must be 1 or more")
    check_name(s.attention, "auto")


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line about the text. stream: None: stdout."""
    print(terminal.harmless(line, stream or sys.stdout), file=stream)


def load(s: Settings) -> tuple[GPT, Tokenizer]:
    """The model and its tokenizer. Raises UserError if either is missing, or if they do not fit each other."""
    changes = {"activation": s.activation} if s.activation else {}
    source = "resume" if s.init_from in ("auto", "scratch") else s.init_from  # as a config of train.py may say
    if source == "resume" and run_folder.is_transformers(s.out_dir):
        source = s.out_dir
    if source != "resume":
        if run_folder.checkpoints(source):
            raise UserError(f"{source} is a run: name it with --out_dir={source} and --init_from=resume")
        model = GPT.from_pretrained(source, changes)
        say(f"sampling from {source}")
        meta, theirs = tokenizer_json.read(source, say)
        tokenizer = tokenizer_json.OfModel(meta, theirs, pretrained.ends(source))
    else:
        path = pathlib.Path(s.out_dir)
        if path.suffix == ".pt" and not path.is_dir():
            saved = checkpoint.load(path, optimizer=False)
        else:
            saved, path = run_folder.load_best(path)
        model, meta = GPT.from_checkpoint(saved, dropout=0.0, **changes), dataset.meta_of_checkpoint(saved)
        tokenizer = Tokenizer(meta)
        losses = [f", {what} {loss}" for what, loss in metrics.losses_at(path.parent, saved["iter_num"]).items()]
        say(f"sampling from {path}, after {saved['iter_num']} iterations{''.join(losses)}")
        if checkpoint.is_nanogpts(saved) and not s.activation:
            say(checkpoint.NANOGPTS_ACTIVATION)
    remedy = "put the tokenizer.json or meta.json of the model into its folder, without ids that the model lacks"
    dataset.check_fit(meta, model.config.vocab_size, f"the tokenizer ({meta['tokenizer']})", remedy)
    return model, tokenizer


def read_prompt(text: str, tokenizer: Tokenizer) -> tuple[str, list[int]]:
    """The prompt as text and as ids. text: the prompt, or FILE:path. Raises UserError if it cannot be used."""
    if text.startswith("FILE:"):
        # data has no BOM either; the tokenizer refuses what is not UTF-8
        text = pathlib.Path(text.removeprefix("FILE:")).read_text(encoding="utf-8-sig", errors="surrogateescape")
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError("the prompt is empty: give at least one character with --start")
    return text, ids


def report(engine: engines.Engine, s: Settings, drawn: int, first: float, rest: float, device: torch.device) -> str:
    """What ends the output: tokens/s, time to the first token, attention kernel, dtypes and why."""
    total, seconds = s.num_samples * drawn, first + rest
    prefill, one = map(dtype_name, engine.dtypes)
    speed = f"{s.num_samples} x {drawn} tokens in {seconds:.1f} s: {total / seconds:,.1f} tokens/s"
    how = f"attention {engine.config.attention}, prefill {prefill}, decode {one}, {device}"
    return f"{speed}, the first after {first:.2f} s ({how})\n{engine.chosen}".rstrip()


def draw(
    engine: engines.Engine, s: Settings, prompt: tuple[str, list[int]], tokenizer: Tokenizer, generator: torch.Generator
) -> list[float]:
    """Draw samples after a prompt and print them. Returns the clock after each draw."""
    text, ids = prompt
    if len(ids) > (most := engine.config.block_size):
        say(f"of the prompt's {len(ids)} tokens only the last {most} are read: block_size={most}", sys.stderr)
    idx = torch.tensor([ids], device=generator.device).repeat(s.num_samples, 1)
    draws = s.temperature, s.top_k, s.top_p, generator, tokenizer.vocab_size
    drawn, ended, times = [], set(), []
    for new in generate.new_tokens(engine, idx, s.max_new_tokens, *draws, cache=engine.cache):
        drawn.append(new[:, 0].tolist())  # waits for the device
        times.append(time.perf_counter())
        ended |= {n for n, token in enumerate(drawn[-1]) if token in tokenizer.ends}
        if len(ended) == s.num_samples:
            break
    for sample in zip(*drawn):
        before_end = list(itertools.takewhile(lambda token: token not in tokenizer.ends, sample))
        say(text + tokenizer.decode(before_end).decode(errors="replace"))
        say("---------------")
    return times


def main(s: Settings) -> None:
    """Print samples as `s` says. Raises UserError for bad input."""
    validate(s)
    device = resolve_device(s.device)
    model, tokenizer = load(s)
    generator = torch.Generator(device).manual_seed(s.seed)
    prompt = read_prompt(s.start, tokenizer)
    engine = auto.prepare(s, model, len(prompt[1]), device, functools.partial(say, stream=sys.stderr))
    del model  # frees the weights if the engine has copies
    if device.type == "cpu":  # only now, so that the system gets the memory of freed weights back
        memory.keep_freed_memory(keep=True)
    began = time.perf_counter()
    times = draw(engine, s, prompt, tokenizer, generator)
    say(report(engine, s, len(times), times[0] - began, times[-1] - times[0], device), sys.stderr)


if __name__ == "__main__":
    with one_sentence(" Lower --num_samples or --max_new_tokens, or take a smaller model."):
        main(configure(Settings(), sys.argv[1:], __doc__, ONLY_TRAINING, places=PLACES))
