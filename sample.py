"""Sample text from a trained run, from GPT-2, or from a local Hugging Face folder.

python sample.py --out_dir=out-shakespeare-char --num_samples=3
python sample.py --init_from=gpt2-xl --start="What is the answer?" --temperature=0
python sample.py --out_dir=out --start=FILE:prompt.txt
"""

import codecs
import dataclasses
import os
import pathlib
import sys
import time
from typing import Literal

import torch

from configurator import configure
from model import GPT, PRETRAINED
from parts import checkpoint, decode, kernels, machine, tokens
from parts.errors import UserError, one_sentence

ROOT = pathlib.Path(__file__).resolve().parent


@dataclasses.dataclass
class Settings:
    init_from: str = "resume"  # resume (a run's out_dir), gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a local HF folder
    out_dir: str = "out"  # a run's folder: best.pt is sampled, or ckpt.pt where there is none
    start: str = "\n"  # the prompt, or FILE:path
    num_samples: int = 10  # drawn together, as one batch
    max_new_tokens: int = 500  # tokens in each sample
    temperature: float = 0.8  # below 1 nearer to the likeliest, above 1 more even; 0: always the likeliest
    top_k: int = 200  # draw among the k likeliest; 0: among all
    top_p: float = 0.0  # draw among the fewest likeliest that together have this probability; 0: among all
    stop: str = ""  # end a sample where this text appears
    seed: int = 1337  # the same seed draws the same samples
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the weights and all products
    compile: bool = False  # torch.compile; pays for long samples
    attention: Literal["manual", "math", "efficient", "flash", "cudnn", "flex", "sdpa"] = "sdpa"  # as in train.py


def validate(s):
    """Raise UserError for a number that cannot be sampled with."""
    if s.num_samples < 1 or s.max_new_tokens < 1:
        raise UserError(f"num_samples={s.num_samples} and max_new_tokens={s.max_new_tokens} must be 1 or more")
    if not (s.temperature >= 0 and s.top_k >= 0 and 0 <= s.top_p <= 1 and 0 <= s.seed < 2**63):
        raise UserError(
            f"temperature={s.temperature} and top_k={s.top_k} must be 0 or more, top_p={s.top_p} from 0 to 1,"
            f" seed={s.seed} from 0 to 2**63 - 1"
        )


def load(s):
    """The model and its tokenizer."""
    if s.init_from != "resume":
        if s.init_from not in PRETRAINED and not os.path.isdir(s.init_from):
            raise UserError(f"init_from={s.init_from!r} must be resume, {', '.join(PRETRAINED)}, or a local folder")
        model, meta = GPT.from_pretrained(s.init_from), tokens.read_meta(s.init_from)  # an exported run has a meta
    else:
        path = checkpoint.of_run(s.out_dir)
        saved = checkpoint.load(path)
        model, meta = GPT.from_checkpoint(saved, dropout=0.0), saved.get("meta")
        if not meta:  # a checkpoint of nanoGPT's knows the name of its data only
            meta = tokens.read_meta(tokens.data_folder(ROOT, saved["config"].get("dataset", "openwebtext")))
        print(f"sampling from {path}, after {saved['iter_num']} iterations")
    tokens.check_fit(meta, model.config.vocab_size, f"the tokenizer ({meta['tokenizer']})")
    return model, tokens.Tokenizer(meta)


def read_prompt(s, tokenizer):
    """The prompt as text and as ids; at least one id, as a model needs something to go on from."""
    text = s.start
    if text.startswith("FILE:"):
        path = text.removeprefix("FILE:")
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the prompt in {path}: {error}") from error
    ids = tokenizer.encode(text)
    if not ids:
        raise UserError("the prompt is empty: give at least one character with --start")
    return text, ids


class Sample:
    """One sample's text as its ids come in, cut off at the text `stop`."""

    def __init__(self, prompt, tokenizer, stop):
        self.text, self.tokenizer, self.stop, self.ended = prompt, tokenizer, stop, False
        self.searched = len(prompt)  # the prompt may hold the stop text
        self.shown = 0
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")  # an id may be half a character

    def add(self, token):
        """Take in the next id, unless the sample has ended."""
        if self.ended:
            return
        self.text += self.utf8.decode(self.tokenizer.decode([token]))
        at = self.text.find(self.stop, self.searched) if self.stop else -1
        if at >= 0:
            self.text, self.ended = self.text[:at], True

    def fresh(self, complete):
        """What was not shown yet; unless `complete`, without what may turn out to begin the stop text."""
        withheld = 0 if complete or self.ended or not self.stop else len(self.stop) - 1
        start, self.shown = self.shown, max(self.shown, len(self.text) - withheld)
        return self.text[start : self.shown]


def main(s):
    """Print samples as the Settings `s` say. Raises UserError for bad input."""
    validate(s)
    sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character shows a ?
    device = machine.device(s.device)
    dtype = machine.dtype(s.dtype, device)
    model, tokenizer = load(s)
    c = model.config
    for queries in (c.block_size, 1):  # a prompt, and one token after many
        shape = (s.num_samples, c.n_head, queries, c.n_embd // c.n_head)
        kernels.require(s.attention, shape, device, dtype, backward=False, keys=c.block_size)
    model.use_attention(s.attention)
    model.to(device, dtype).eval()
    if s.compile:
        compiled, why_eager = machine.compiles(True, device)
        if s.attention == "flex" and device.type == "cpu":
            raise UserError("attention='flex' cannot run inside a compiled model on a CPU: set --compile=False")
        if compiled:
            model.compile(dynamic=True)  # the cache grows by one each step
        else:
            print(why_eager)

    text, ids = read_prompt(s, tokenizer)
    prompt = torch.tensor([ids] * s.num_samples, device=device)
    samples = [Sample(text, tokenizer, s.stop) for _ in range(s.num_samples)]
    generator = torch.Generator(device).manual_seed(s.seed)
    began = time.perf_counter()
    drawing = decode.stream(
        model, prompt, s.max_new_tokens, s.temperature, s.top_k, s.top_p, generator, tokenizer.vocab_size
    )
    for drawn, new in enumerate(drawing, start=1):  # noqa: B007
        for sample, token in zip(samples, new[:, 0].tolist()):
            sample.add(token)
        print(samples[0].fresh(complete=False), end="", flush=True)  # the others are shown when it is complete
        if all(sample.ended for sample in samples):
            break
    seconds = time.perf_counter() - began
    for sample in samples:
        print(sample.fresh(complete=True), end="\n---------------\n")
    print(
        f"{s.num_samples} x {drawn} tokens in {seconds:.1f} s: {s.num_samples * drawn / seconds:,.1f} tokens/s"
        f" (attention {s.attention}, {str(dtype).removeprefix('torch.')}, {device})",
        file=sys.stderr,
    )


if __name__ == "__main__":
    with one_sentence():
        main(configure(Settings, sys.argv[1:], __doc__))
