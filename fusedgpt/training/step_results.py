"""What training steps return, by name, kept on the device until a report reads it."""

import torch
from torch import Tensor

from fusedgpt.errors import UserError
from fusedgpt.parallel.distributed import Ranks

RESERVED = ("kind", "iter", "lr", "ms", "tokens_per_s", "mfu", "peak_memory")  # each line of a step has these already


class StepResults:
    """The results of the steps since the last report, which reads them all at once: reading waits for the device."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks
        # learning rates, names of results, names of flags, and the sums of both
        self.steps: list[tuple[float, tuple[str, ...], tuple[str, ...], Tensor]] = []

    def add(self, results: dict[str, Tensor | float], flags: dict[str, bool], lr: float) -> None:
        """Add what a step returned, this rank's flags, and `lr`; one all-reduce sums the former two over the ranks.

        Raises UserError if a result is not a single number, or has a name in RESERVED.
        """
        if taken := sorted({*results} & {*RESERVED}):
            raise UserError(f"train_step returned {taken[0]!r}, but metrics.jsonl has that name: take another")
        device = next((value.device for value in results.values() if isinstance(value, Tensor)), None)
        numbers = []
        for name, value in results.items():
            if hasattr(value, "full_tensor"):  # a DTensor, because ranks share the model
                value = value.full_tensor()
            value = torch.as_tensor(value, device=device).detach()
            if value.numel() != 1:
                raise UserError(f"train_step returned {name!r} of shape {tuple(value.shape)}, not a single number")
            numbers.append(value.reshape(()).float())
        numbers += [torch.full_like(numbers[0], flag) for flag in flags.values()]
        self.steps.append((lr, tuple(results), tuple(flags), self.ranks.all_reduce(torch.stack(numbers))))

    def read(self) -> tuple[list[dict[str, float]], set[str]]:
        """Take out the results of each step, as means over the ranks, with its lr; and the flags that any raised."""
        steps, raised = [], set()
        for lr, results, flags, sums in self.steps:
            numbers = sums.tolist()
            steps.append({"lr": lr} | {name: total / self.ranks.world for name, total in zip(results, numbers)})
            raised |= {flag for flag, count in zip(flags, numbers[len(results) :]) if count}
        self.steps.clear()
        return steps, raised
