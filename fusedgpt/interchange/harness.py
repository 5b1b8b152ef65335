"""The model in training as one that lm-evaluation-harness asks: --eval_tasks."""

import contextlib
import io
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from lm_eval import evaluator, utils  # noqa: TID253 - this file is imported for --eval_tasks alone
from lm_eval.api.model import TemplateLM  # noqa: TID253
from lm_eval.tasks import TaskManager  # noqa: TID253
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from fusedgpt.data.tokenizer import Tokenizer, fails_as
from fusedgpt.errors import UserError
from fusedgpt.home import ROOT
from fusedgpt.parallel.distributed import Ranks

SEED = 1234  # of few-shot examples, lm_eval's own default


class Scorer(TemplateLM):
    """The `tasks`, names of lm_eval's or of eval/ with commas between, and the model that answers them.

    The questions are divided among the ranks. Raises UserError for an unknown task, if ranks share the model, and if
    the tokenizer of `meta` cannot encode every text.
    """

    def __init__(self, tasks: str, model: Any, cast: AbstractContextManager, meta: dict, ranks: Ranks, batch_size: int):
        super().__init__()
        if ranks.shards > 1:  # they would ask the model unequal numbers of times
            raise UserError(f"--eval_tasks={tasks} needs --parallel=ddp; make eval scores a run that fsdp has trained")
        self.model, self.cast, self.ranks, self.stopped_by = model, cast, ranks, ()
        self.batch_size = max(1, batch_size // 8)  # unlike an evaluation, it holds logits of all tokens in float32
        self._rank, self._world_size, self._device = ranks.rank, ranks.world, model.lm_head.weight.device
        self.tokenizer = Tokenizer(meta)
        if self.tokenizer.kind == "char":
            how = "prepare them with --tokenizer=train:2048 or byte"
            raise UserError(f"--eval_tasks={tasks} may have characters that the data have not: {how}")
        end = self.tokenizer.end_of_text
        self.first = self.tokenizer.encode("\n")[0] if end is None else end
        with fails_as(f"--eval_tasks={tasks} cannot be loaded"):
            names = tasks.replace(" ", "").split(",")
            self.tasks = TaskManager(include_path=str(ROOT / "eval")).load(names)
        for name, task in self.tasks["tasks"].items():
            if task.OUTPUT_TYPE == "generate_until":
                how = "take tasks that score given texts, or export.py and lm_eval"
                raise UserError(f"--eval_tasks has {name}, for which the model would write texts: {how}")
            if len(task.eval_docs) < ranks.world:  # too few to share: each rank answers all
                self._rank, self._world_size = 0, 1

    def scores(self, stopped_by: Sequence[int]) -> dict[str, float] | None:
        """Each task's figures, such as hellaswag_acc_norm, on every rank; None if a signal came."""
        self.stopped_by = stopped_by
        for task in self.tasks["tasks"].values():
            task.set_fewshot_seed(SEED)  # the same examples each time
        self.model.eval()
        # each length would be compiled, and lm_eval's bars would break ours
        with torch.compiler.set_stance("force_eager"), contextlib.redirect_stderr(io.StringIO()):
            found = evaluator.evaluate(self, self.tasks, bootstrap_iters=0, log_samples=False)
        self.model.train()
        if any(self.ranks.gather(bool(stopped_by))):
            return None
        scores = {}
        for task, figures in self.ranks.broadcast(found["results"] if found else None).items():  # the main rank's
            for name, value in figures.items():  # 'acc,none', 'acc_stderr,none'
                if isinstance(value, float) and "_stderr" not in name:
                    scores[f"{task}_{name.removesuffix(',none')}"] = value
        return scores

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_):
        """(log-likelihood of the continuation, whether it is the greedy one) for each (_, context, continuation)."""
        S, found, pieces = self.model.config.block_size, [(0.0, True)] * len(requests), []
        for n, (_, context, continuation) in enumerate(requests):
            for at in range(0, len(continuation), S):  # what is longer than the context is scored piece by piece
                pieces.append((n, [*context, *continuation[:at]], continuation[at : at + S]))
        pieces.sort(key=lambda piece: -sum(map(len, piece[1:])))  # little padding
        for start in range(0, len(pieces), self.batch_size):
            if self.stopped_by:
                break
            batch, xs, ys = pieces[start : start + self.batch_size], [], []
            for _, context, continuation in batch:
                ids = torch.tensor([*context, *continuation][-S - 1 :], device=self.device)
                xs.append(ids[:-1])
                ys.append(ids[1:].clone())
                ys[-1][: max(0, len(ids) - 1 - len(continuation))] = -1  # given, and not asked for
            x, y = pad_sequence(xs, batch_first=True), pad_sequence(ys, batch_first=True, padding_value=-1)
            with self.cast:
                logits, _ = self.model(x, y)
            losses = cross_entropy(logits.float().flatten(0, 1), y.flatten(), ignore_index=-1, reduction="none")
            greedy = ((logits.argmax(-1) == y) | (y < 0)).all(1)
            for (n, *_), nats, is_greedy in zip(batch, losses.view_as(y).sum(1).tolist(), greedy.tolist()):
                found[n] = found[n][0] - nats, found[n][1] and is_greedy
        return found

    def loglikelihood_rolling(self, requests, **_):
        """The log-likelihood of each text, in windows of block_size that do not overlap."""
        windows, sums = [], [0.0] * len(requests)
        for n, request in enumerate(requests):
            ids = self.tok_encode(*request.args)
            each = utils.get_rolling_token_windows(ids, self.first, self.model.config.block_size, context_len=1)
            windows += [(n, *utils.make_disjoint_window(window)) for window in each]
        for (n, *_), (score, _) in zip(windows, self._loglikelihood_tokens(windows)):
            sums[n] += score
        return sums

    def generate_until(self, requests, **_):
        raise NotImplementedError  # __init__ refuses such tasks

    def tok_encode(self, string, **_):
        return self.tokenizer.encode(string)

    @property
    def eot_token_id(self):
        return self.first

    def all_gather(self, tensor):
        return torch.stack(self.ranks.gather(tensor.cpu()))  # each rank's is on its own GPU

    def gather_object(self, obj, dst=0):
        return self.ranks.gather(obj)
