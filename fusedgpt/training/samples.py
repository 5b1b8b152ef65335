"""Samples that a run draws while it trains: the same prompts each time, so that a reader sees it learn."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

from fusedgpt.data.tokenizer import Tokenizer
from fusedgpt.errors import UserError, shown
from fusedgpt.generation import generate
from fusedgpt.parallel.distributed import Ranks, is_shared

NEW_TOKENS, TEMPERATURE, TOP_K = 200, 0.8, 200  # the last two are sample.py's defaults


class Prompts:
    """The prompts of the setting sample_prompts: a text, or FILE:path with a prompt in each line.

    Raises OSError if the file cannot be read, and UserError if the tokenizer of `meta` cannot encode a prompt.
    """

    def __init__(self, prompts: str, meta: dict):
        self.tokenizer = Tokenizer(meta)
        texts = [prompts]
        if prompts.startswith("FILE:"):
            path = pathlib.Path(prompts.removeprefix("FILE:"))
            # no byte order mark, as in data; the tokenizer refuses what is not UTF-8
            texts = path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines()
        try:
            self.prompts = [(text, self.tokenizer.encode(text)) for text in texts if text]
        except UserError as error:  # name the flag: a user who gave no prompt has the default, a newline
            raise UserError(f"--sample_prompts={shown(prompts)} cannot be used: {error}") from error
        if not self.prompts:
            raise UserError(f"sample_prompts={prompts!r} has no prompt: give at least one character")

    @torch.no_grad()
    def sample(
        self, model: Any, cast: Any, device: torch.device, seed: int, stopped_by: Sequence[int] = ()
    ) -> list[tuple[str, str]]:
        """A sample after each prompt, as (prompt, text), until a signal is in `stopped_by`.

        Weights and the random streams of training are unaffected. Raises UserError if the logits are not finite.
        """
        trained_with = model.config.attention
        model.eval()
        model.use_attention("sdpa")  # not every kernel that trains takes one query on many keys
        try:
            # compiling each length would take minutes
            with torch.compiler.set_stance("force_eager"), cast:
                prompts = itertools.takewhile(lambda _: not stopped_by, self.prompts)
                return [(text, self._continued(model, ids, device, seed)) for text, ids in prompts]
        finally:
            model.use_attention(trained_with)
            model.train()

    def _continued(self, model, ids, device, seed):
        generator = torch.Generator(device).manual_seed(seed)
        draws = TEMPERATURE, TOP_K, None, generator, self.tokenizer.vocab_size
        new = []
        for token in generate.new_tokens(model, torch.tensor([ids], device=device), NEW_TOKENS, *draws):
            new.append(token.item())
            # other ranks' logits may differ by a bit, and while one draws on, it needs this rank
            if new[-1] == self.tokenizer.end_of_text and not is_shared(model):
                break
        before_end = list(itertools.takewhile(lambda token: token != self.tokenizer.end_of_text, new))
        return self.tokenizer.decode(before_end).decode(errors="replace")


def prompts(s: Any, meta: dict, ranks: Ranks) -> Prompts | None:
    """The prompts of the settings `s`; None if the run draws no samples, or only another rank does."""
    draws = s.sample_interval and not s.eval_only
    found = Prompts(s.sample_prompts, meta) if draws and ranks.main else None
    return ranks.broadcast(found) if ranks.shards > 1 else found  # ranks that share the model draw together
