"""The kinds of benchmark, one file each, and the instrument that they share: contenders that take turns.

A kind is a module with
    Settings      its own settings, a dataclass that inherits from options.Common
    TRAINS        whether its contenders have train.py's settings too
    UNUSED        names of train.py's settings that it does not use
    TOGETHER      whether contenders run in this process; otherwise each has a process of its own
    TURN          seconds of a turn; 0 if contenders take none, because they have no times
    GPU, CPU      defaults of settings there: the articles' sizes on a GPU, sizes for minutes on a CPU
    comparisons   (s, device) -> what is compared: [comparison.Comparison, …]
    variables     (name) -> environment variables of a contender's process; a kind may lack it
    build         (workload, name, s, device) -> (its turn or None, what was found out: `errors` and `parity` of the
                  proof, `kernel` as a receipt has it, `peak_memory`, `tokens` of a turn's step, …). It raises
                  UserError (refused, for good), ParityError, or an out-of-memory or other error (rows.status_of)
    SHOWN         report.Shown: its unit, the contenders in the title, columns that only it has
"""
