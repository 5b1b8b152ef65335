"""The table of a study: a row for each variant, as CSV, Markdown and LaTeX."""

import csv
import dataclasses
import io
import math

from fusedgpt.studies.outcomes import Results
from fusedgpt.studies.verdict import LEAST_RESAMPLED
from fusedgpt.studies.words import decimals, head, labels, shown, shown_p, summaries, what, without_value, word

HEAD = ("variant", "n", "mean", "sd", "stand-ins", "difference", "95 % interval", "p", "verdict")
ESCAPED = {each: rf"\{each}" for each in "_%&#${}"}
# the others have a name in LaTeX; < and > are other characters in its default font
ESCAPED |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
ESCAPED |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
ESCAPED |= {"[": "{[}", "]": "{]}"}  # at the beginning of a row, [ would be an option of the line break before it


@dataclasses.dataclass(frozen=True)
class Row:
    """A variant. Numbers that it does not have are NaN; the baseline has no difference."""

    variant: str
    n: int  # runs with a value
    mean: float
    sd: float
    stand_ins: int  # of the n values
    difference: float  # to the baseline, mean over pairs of runs with the same seed
    low: float
    high: float
    p: float  # after Holm's correction
    verdict: str


def rows(results: Results) -> list[Row]:
    """The table, in the order of the design."""
    compared = {each.variant: each for each in results.comparisons()}
    found = []
    for each in summaries(results):
        difference, verdict = (math.nan,) * 4, "baseline"
        if c := compared.get(each.variant):
            difference, verdict = (c.mean, c.low, c.high, c.p_holm), word(c)
        found.append(Row(each.variant, each.n, each.mean, each.sd, each.stand_ins, *difference, verdict))
    return found


def cells(results: Results) -> list[list[str]]:
    """The texts of the table, a list for each row, under HEAD."""
    places = decimals(summaries(results))
    return [
        [
            row.variant,
            str(row.n),
            shown(row.mean, places),
            shown(row.sd, places),
            str(row.stand_ins),
            shown(row.difference, places, "+"),
            "" if math.isnan(row.low) else f"[{shown(row.low, places, '+')}, {shown(row.high, places, '+')}]",
            shown_p(row.p),
            row.verdict,
        ]
        for row in rows(results)
    ]


def note(results: Results) -> str:
    """What the columns are, in two or three sentences."""
    plan = results.design
    how = "Student's t"
    if plan.interval == "bootstrap":
        how = f"the bootstrap, or Student's t for fewer than {LEAST_RESAMPLED} pairs"
    said = (
        f"Values are {what(plan)}, lower is better: mean and standard deviation over n seeds. The difference is to"
        f" {plan.baseline} over pairs of runs with the same seed, its interval is by {how}, and p is corrected for all"
        " comparisons (Holm)."
    )
    if any(each.stand_ins for each in summaries(results)):
        said += (
            f" Stand-ins are the values of runs that {without_value(plan)}: they count as the worst of all, and a"
            " difference from them has no interval."
        )
    return said


def as_csv(results: Results) -> str:
    """The table with all digits, for programs; an empty cell is a number that there is not."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(field.name for field in dataclasses.fields(Row))
    for row in rows(results):
        writer.writerow("" if value != value else value for value in dataclasses.astuple(row))  # NaN is not itself
    return text.getvalue()


def as_markdown(results: Results) -> str:
    """The table for a README; its columns are aligned for a console too."""
    table = [[*HEAD], *([_code(row[0]), *row[1:]] for row in cells(results))]
    widths = [max(2, *map(len, column)) for column in zip(*table)]
    left = (0, len(HEAD) - 1)  # texts; numbers stand at the right
    lines = [
        [text.ljust(width) if n in left else text.rjust(width) for n, (text, width) in enumerate(zip(row, widths))]
        for row in table
    ]
    rule = ["-" * width if n in left else "-" * (width - 1) + ":" for n, width in enumerate(widths)]
    lines.insert(1, rule)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + f"\n{note(results)}\n"


def _code(name):
    """`name` as code in a cell, where Markdown would read _ and * as emphasis, and | as the end of the cell."""
    name = name.replace("|", r"\|")
    return f"`` {name} ``" if "`" in name else f"`{name}`"


def as_latex(results: Results) -> str:
    """A tabular, to be `\\input` inside a table. It needs the package booktabs."""
    short, first = labels(results.design), escaped(head(results.design) or HEAD[0])
    heads = [first, "$n$", "mean", "sd", "stand-ins", "difference", r"95\,\% interval", "$p$", "verdict"]
    lines = [rf"\begin{{tabular}}{{@{{}}l{'r' * (len(HEAD) - 2)}l@{{}}}}", r"\toprule", _line(heads), r"\midrule"]
    for name, *numbers, verdict in cells(results):
        lines.append(_line([escaped(short[name]), *map(_number, numbers), verdict]))
    lines += [r"\bottomrule", r"\end{tabular}"]
    comment = " ".join(note(results).split())  # one line
    needs = r"% needs \usepackage{booktabs}. On a narrow page: \resizebox{\linewidth}{!}{\input{table}}, of graphicx"
    return "\n".join([needs, f"% {comment}", *lines]) + "\n"


def _line(texts):
    return " & ".join(texts) + r" \\"


def _number(text):
    return "".join(f"${each}$" if each in "-+<" else ESCAPED.get(each, each) for each in text)  # a minus, no hyphen


def escaped(text: str) -> str:
    """`text` as LaTeX prints it."""
    return "".join(ESCAPED.get(each, each) for each in " ".join(text.split())).replace("--", "-{-}")  # no dash
