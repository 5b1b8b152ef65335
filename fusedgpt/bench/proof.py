"""What a contender must pass before it takes turns: parity with float64."""

import contextlib
import warnings
from collections.abc import Iterator

import torch

from fusedgpt.attention import parity, permitted
from fusedgpt.attention.case import Attend, Case
from fusedgpt.errors import UserError, out_of_memory


class ParityError(Exception):
    """A kernel or model computes something else than it should, so it gets no time."""


def prove(attend: Attend, case: Case, exact_as: torch.dtype | None = None) -> dict:
    """{'errors': …, 'parity': a sentence} if `attend` passes parity.checks; otherwise it raises ParityError.

    Both values are from the last check, which has the shape of `case`. exact_as: the dtype whose tolerances count, if
    not the case's own.
    """
    for where, errors in parity.checks(attend, case):
        sentence = verdict(errors, exact_as or case.dtype, where)
    return {"errors": errors, "parity": sentence}


def verdict(errors: dict[str, float], dtype: torch.dtype, where: str) -> str:
    """A sentence for the report: 'passed: largest error …'. Raises ParityError if an error is beyond the tolerance."""
    part = max((name for name in errors if name != "rms"), key=errors.get)
    worst = f"largest error {errors[part]:.1e}, of {part}, {where}, allowed {parity.TOLERANCE[dtype]:.0e}"
    if "rms" in errors:
        worst += f"; root mean square {errors['rms']:.1e}, allowed {parity.RMS_TOLERANCE[dtype]:.1e}"
    if not parity.passes(errors, dtype):
        raise ParityError(worst)
    return f"passed: {worst}"


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn a kernel's refusal into a UserError with the reasons; let out-of-memory errors and a crashed GPU pass."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield
        except (RuntimeError, ValueError, AssertionError) as error:  # any other type is a bug of this project
            if out_of_memory(error) or isinstance(error, (torch.AcceleratorError, UserError)):
                raise
            raise UserError(permitted.reasons(caught, error)) from error
