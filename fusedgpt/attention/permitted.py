"""Which attention kernels this machine permits for a case, and why it does not permit the others.

A named kernel runs, or the program ends with the reason; nothing falls back in silence.
"""

import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch

from fusedgpt.attention import parity
from fusedgpt.attention.case import Attend, Case
from fusedgpt.attention.functions import ATTENTION, rounded_by_cudnn
from fusedgpt.attention.receipt import contradiction, observe
from fusedgpt.attention.table import KERNELS, is_own
from fusedgpt.errors import UserError, first_line
from fusedgpt.machine.device import autocast, dtype_name, tf32


def require(name: str, case: Case, compiled: bool = False) -> None:
    """Raise UserError, with the reason and what would run instead, unless the kernel `name` can run `case` here.

    Its results must also agree with float64, or it would silently train another model. A kernel of ours is compared on
    one head; a user's own must pass parity.checks.
    """
    if reason := refusal(name, case) or _wrong(name, case, compiled):
        others = [other for other in KERNELS if other != name and not refusal(other, case)]
        doing = "train" if case.backward else "run"
        raise UserError(
            f"attention='{name}' cannot {doing} on {case.device.type} in {dtype_name(case.dtype)}"
            f" with dropout {case.dropout:g}: {reason}. Here --attention can be {', '.join(others)} or auto."
        )


@tf32(allowed=False)  # TF32 would round float32 in every kernel
def _wrong(name, case, compiled):
    """Why the kernel `name` does not compute causal attention with `case`'s dropout, or None if it does."""
    try:
        for where, errors in _comparisons(name, case, compiled):
            if not parity.passes(errors, case.dtype):
                what = "attention within documents" if case.packed else "causal attention"
                if case.window:
                    what += f" in a window of {case.window}"
                return (
                    f"it is not {what}: {where} its errors against float64 are {errors}. A change of the function,"
                    " such as a window, belongs to the model (Dimensions), which saves it with the weights"
                )
        if case.dropout:
            return parity.dropped_wrongly(as_run(name, case), case)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # a user's own kernel may raise anything at a shape for which it was not written
        return f"it fails in the comparison with float64: {reasons((), error)}"
    return None


def _comparisons(name, case, compiled):
    """(where, errors) of the comparisons with float64: one head for a kernel of ours, all checks for a user's own.

    flex is compared compiled too: on an H200, training within documents with PyTorch 2.11 was wrong only compiled.
    """
    attend, whole = as_run(name, case), parity.shortened(case, B=2)
    if compiled and (is_own(name) or name == "flex"):  # the compiler traces these into the graph of the model
        torch.compiler.reset()
        yield "compiled", parity.compare(torch.compile(attend, dynamic=False), whole, heads=2)
    if not is_own(name):
        yield "on one head", parity.compare(attend, whole.of_heads(1, 1))
        return
    yield from parity.checks(attend, whole)
    if case.backward:  # as evaluation calls it
        yield "without gradients", parity.compare(ATTENTION[name], replace(whole, backward=False), heads=2)
    if case.shape[2] > parity.MOST_COMPARED:  # a window could be longer
        last = case.of_heads(1, 1)
        last = replace(last, shape=(1, last.shape[1], 64, case.shape[3]), keys=case.shape[2], backward=False)
        yield f"for the last 64 of {case.shape[2]} tokens", parity.compare(as_run(name, last), last)


def refusal(name: str, *cases: Case) -> str | None:
    """Why the kernel `name` cannot run one of `cases` here; None if it can.

    The kernel is run once on each, on one head of one sequence, under the profiler. If deterministic algorithms are
    required, it runs twice and the gradients must agree to the bit.
    """
    found = (_known(name, case) or _tried(name, case.of_heads(1, 1)) for case in cases)
    return next(filter(None, found), None)


def _known(name, case):
    """Why a kernel cannot run a case, as far as it is known without a trial."""
    if name == "flex" and case.dropout > 0:
        return "FlexAttention has no dropout"
    if name == "cudnn" and rounded_by_cudnn(case.dropout):
        return f"cuDNN may round dropout {case.dropout:g} to sixteenths"
    if name in KERNELS and KERNELS[name].gpu_only and case.device.type == "cpu":
        return "PyTorch has it on GPUs only"
    return None


def _tried(name, case):
    """Why a kernel cannot run a case, from a trial."""
    attend, inputs, results = as_run(name, case), case.inputs(), []

    def step():
        torch.manual_seed(0)
        results.append(case.run(attend, *inputs))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            receipt = observe(step)
            if torch.are_deterministic_algorithms_enabled():
                step()
        except torch.AcceleratorError:  # the GPU itself has crashed, so nothing else would run on it
            raise
        except Exception as error:  # a kernel, its compiler and its package each raise types of their own
            return reasons(caught, error)
    if len(results) == 2 and not all(torch.equal(a, b) for a, b in zip(*results)):
        return "it is not deterministic: two runs gave different gradients"
    return contradiction(name, receipt, case)


def as_run(name: str, case: Case) -> Attend:
    """The attention function `name` as the scripts call it: training under autocast, generation without."""

    def attend(*inputs, **masks):
        with autocast(case.device, case.dtype) if case.backward else contextlib.nullcontext():
            return ATTENTION[name](*inputs, **masks)

    return attend


def reasons(caught: Iterable[warnings.WarningMessage], error: Exception) -> str:
    """Why a kernel raised `error`, in one phrase. PyTorch explains its refusals in warnings, which were `caught`."""
    if not any(sign in str(error) for sign in ("No available kernel", "No viable backend")):
        caught = ()  # another kind of error: the warnings are about something else
    said = dict.fromkeys(str(w.message).split(" (Triggered internally")[0].rstrip(". ") for w in caught)
    found = [r for r in said if "not used because" not in r and "runtime disabled" not in r]
    return "; ".join(found) or first_line(error) or type(error).__name__  # never empty, which would mean permitted
