"""The kinds of benchmark, one file each, and the files that they share.

A kind is a module with
    Settings      its own settings, a dataclass that inherits from options.Common
    TRAINS        whether its rows run train.py; if so, `s` in plan and measure has train.py's settings too
    UNUSED        {name: why} of train.py's settings that it does not use
    GROUP         fields of a row; rows with equal values of them form a group (disturbance.py)
    defaults      (gpu) -> the defaults for this machine: the articles' sizes on a GPU, sizes for minutes on a CPU
    plan          (s, device) -> what identifies each row, in order
    measure       (spec, s, device, folder) -> what one row measured. It may raise UserError (refused, for good),
                  ParityError, or an out-of-memory or other error, after which the next call tries again:
                  rows.attempt turns each into a status. rows.OutOfTime leaves the row for the next call
    table         (rows) -> the lines of its report; it takes ratios only of rows that are disturbance.comparable
    claims        (rows) -> a list of check.Claim, which bench.py check compares with another machine's
    figures       (rows, s) -> (name, title, what was measured, figure), drawn from rows alone; s: the header's settings
                  (the title is a finding that the spread of the rows supports)

The meaning of `peak_memory` in a row depends on the kind. For a run of train.py, in prefill and in peers, it is all
memory that the process held (on a GPU, that PyTorch held); prefill and the contenders of peers have it on a GPU only,
because a process on a CPU keeps what was freed before a row. For attention alone in sweep and in numerics, it is
only what one call held beyond its inputs.
"""
