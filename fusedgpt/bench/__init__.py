"""The kinds of benchmark, one file each, and beside them what they share.

A kind is a module with
    Settings      its own settings, a dataclass that inherits from settings.Common; in plan and measure, `s` has
                  train.py's settings too if TRAINS
    TRAINS        whether its rows run train.py; then train.py's settings are its settings too
    UNUSED        names of train.py's settings that it does not use, and why
    defaults      (gpu) -> the defaults that suit this machine: the articles' sizes on a GPU, minutes on a CPU
    plan          (s, device) -> what identifies each row, in order
    measure       (spec, s, device, folder) -> what one row measured. It may raise UserError (refused), ParityError, or
                  an out-of-memory error: rows.attempt makes a status of each. rows.OutOfTime leaves the row for the
                  next call
    table         (rows) -> the lines of its report; a ratio only of rows that are disturbance.comparable
    claims        (rows) -> what they claim, as check.Claim: bench.py check compares it with another machine's
    figures       (rows, s) -> (name, title, what was measured, figure), drawn from rows alone; s: the header's settings

`peak_memory` in a row is what the kind measures: of a run of train.py all that its process held (on a GPU: PyTorch),
in prefill the same, in sweep and numerics only what one call held beyond its inputs.
"""
