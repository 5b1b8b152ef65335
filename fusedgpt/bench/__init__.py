"""The kinds of benchmark, one file each, and beside them what they share.

A kind is a module with
    Settings      its own settings, a dataclass that inherits from settings.Common
    TRAINS        whether its rows run train.py; then train.py's settings are its settings too
    UNUSED        names of train.py's settings that it does not use, and why
    defaults      (gpu) -> the defaults that suit this machine: the articles' sizes on a GPU, minutes on a CPU
    plan          (s, device) -> what identifies each row, in order
    measure       (spec, s, device, folder) -> what one row measured
    table         (rows) -> the lines of its report
    figures       (rows) -> (name, figure) pairs, drawn from measured rows alone
"""
