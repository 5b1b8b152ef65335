"""Every measured number of the pages says what its row says; and what quotes.py finds, refuses and puts right.

What counts as a measured number, outside code: one with a unit (ms, s, min, h, %, times, MiB, GB/s, tokens/s, FLOP/s);
one with three decimals or more, and with two where losses or bits per byte are the subject; each in a column of a table
whose head has a unit; and "seven times as" in words. "every 30 s" is none. A number without a unit that follows one
with a unit ("12 ms, before it 15") is not found: write units out.
"""

import pytest

from tests import quotes
from tests.fusedgpt.bench.small import result
from tests.fusedgpt.bench.test_report import write
from tests.launch import ROOT


@pytest.fixture
def results(tmp_path):
    """A folder of results: a sweep, a run's evaluations and its run.json."""
    refused = {"status": "refused", "reason": "GPUs only"}
    flash = {"peak_memory": 3 * 2**30, "errors": {"y": 0.0125}, "ran": "sdpa"}
    short = {"manual": [1600.0] * 8, "flash": [1250.0] * 8, "math": [2000.0] * 8, "masked": [800.0, 1600.0] * 8}
    both = [result(short, {"T": 256}, flash=flash, cudnn=refused)]
    both.append(result({"manual": [9000.0] * 8, "flash": [3000.0] * 8}, {"T": 512}))
    (tmp_path / "cpu" / "one").mkdir(parents=True)
    write(tmp_path / "cpu" / "one", *both)
    lines = '{"iter": 0, "val_loss": 5.4}\n{"iter": 9, "val_loss": 1.2612}\n'
    (tmp_path / "cpu" / "evaluations.jsonl").write_text(lines)
    (tmp_path / "cpu" / "run.json").write_text('{"time": {"median_ms": 126.9}, "tokens": 18912.2}')
    return tmp_path


@pytest.mark.parametrize("path", quotes.PAGES, ids=lambda path: path.name)
def test_every_measured_number_of_a_page_says_what_its_row_says(path):
    # 388.1 ms stood where the row had 79.8, and 47 other figures had no row at all
    page = path.read_text()
    right, wrong = quotes.check(page, str(path.relative_to(ROOT)))
    assert not wrong, "\n".join(wrong)
    assert right == page


@pytest.mark.parametrize(
    ("quotation", "comment"),
    [
        ("1600 ms", "one name=manual T=256 median_ms"),
        ("**1600 ms**", "one name=manual T=256 median_ms"),
        ("1.60 s", "one name=manual T=256 median_ms"),
        ("3.0 GiB", "one name=flash T=256 peak_memory"),
        ("0.0125", "one name=flash T=256 errors.y"),
        ("`sdpa`", "one name=flash T=256 ran"),
        ("`a CPU`", "one environment.device"),
        ("+28 %", "one name=flash T=256 faster"),
        ("1.28 times", "one name=flash T=256 times"),
        ("1.25 times", "one name=math longer"),
        ("1.0 to 2.0 times", "one name=masked times"),  # its interval
        ("1.28 to 3.00 times", "one name=flash times"),  # of two rows
        ("3.0 times", "one name=flash T>=512 times"),
        ("1.25 s to 3.00 s", "one name=flash median_ms"),
        ("1.261", "evaluations.jsonl val_loss"),
        ("127 ms", "run.json time.median_ms"),
        ("18,912 tokens/s", "run.json tokens"),
    ],
)
def test_a_quotation_that_is_right_is_left_and_one_that_is_wrong_is_put_right(results, quotation, comment):
    page = f"\n\nIt took {quotation}<!-- cpu/{comment} --> here.\n"
    assert quotes.check(page, "p.md", results) == (page, [])
    wrong = page.replace(quotation, "".join("7" if letter.isdigit() else letter for letter in quotation))
    wrong = wrong.replace("`a CPU`", "`B`").replace("`sdpa`", "`math`")
    right, found = quotes.check(wrong, "p.md", results)
    assert right == page
    (said,) = found
    assert said.startswith("p.md:3 says ") and f"the row says {quotation.strip('*')} (" in said


@pytest.mark.parametrize(
    ("comment", "why"),
    [
        ("one name=cudnn median_ms", "no row is like that"),
        ("one name=flash median_ms", "2 rows are like that"),
        ("one name=manual T=256 times", "the row has no times"),
        ("one name=manual T=256 median", "the row has no median"),
        ("one name median_ms", "'name' is no condition"),
        ("nowhere name=manual median_ms", "results/ has no nowhere"),
        ("gone.json time", "results/ has no gone.json"),
        ("one", "it names no field, and is no note"),
        ('one name="manual median_ms', "No closing quotation"),
        ("one name=flash T=256 ran", "a text: write it in backticks"),
    ],
)
def test_what_cannot_be_quoted_is_said(results, comment, why):
    right, found = quotes.check(f"It took 12 ms<!-- cpu/{comment} -->.", "p.md", results)
    assert "12 ms" in right
    assert why in found[0], found


@pytest.mark.parametrize(
    ("before", "why"), [("1 to 2 ms", "only one row is like that"), ("long", "there is no number before it")]
)
def test_a_range_needs_two_rows_and_a_comment_its_number(results, before, why):
    assert why in quotes.check(f"{before}<!-- cpu/one name=manual T=256 median_ms -->", "p.md", results)[1][0]


MEASURED = [
    "It took 12 ms.",
    "It took 1.5 s, no more.",
    "2 min 16 s",
    "It is 19 % faster.",
    "2.2 to 12.9 times as fast",
    "seven times as fast",
    "It holds 1.4 GiB.",
    "18,900 tokens/s",
    "It ends at 1.305.",
    "Its loss is 2.19.",
    "| what | ms |\n|---|---|\n| flash | **1251** |",
    "| what | validation loss |\n|---|---|\n| flash | 2 |",
    "- 12 ms<!-- setting -->\n- 13 ms",
    "It took 12 ms. It is set to 3 s<!-- setting -->.",
]


@pytest.mark.parametrize("text", MEASURED)
def test_a_measured_number_without_a_row_is_found(text):
    (found,) = [each for each in quotes.check(text, "p.md")[1] if "2 min has" not in each]
    assert "has no row" in found


@pytest.mark.parametrize(
    "text",
    [
        "12 heads × 64 at 1024 tokens, 20 steps after 5, on 2 cores, in 600 iterations",
        "124M parameters, PyTorch 2.13.0, Python 3.11, H100",
        "its loss with PyTorch 2.13",
        "`--timeout=300 s` and `12 ms`",
        "A command:\n\n    python train.py  # 12 minutes\n\nand\n\n```text\n12 ms\n```\n",
        "[12](https://example.com/12ms?a=1.305), [arXiv:2404.06395](https://arxiv.org/abs/2404.06395)",
        "the page loads itself again every 30 seconds",
        "such as `12 ms<!-- cpu/gone name=manual median_ms -->`",
        "It waits 30 s and then 60 s<!-- setting -->.",
        "<!-- source: the article -->\nThey took 12 ms, and the loss is 1.305.\nIt is 19 % faster.\n",
        "<!-- computed: scale.py -->\n## A\n\n12 ms\n\n### B\n\n13 ms\n",
        "| what | ours | the article<!-- source: it --> |\n|---|---|---|\n| flash | | 12 ms, 19 % |",
    ],
)
def test_what_is_no_measurement_of_ours_is_left_alone(text):
    assert quotes.check(text, "p.md") == (text, [])


@pytest.mark.parametrize(
    "text",
    [
        "<!-- source: the article -->\nThey took 12 ms.\n\nWe took 13 ms.\n",
        "<!-- computed: scale.py -->\n## A\n\n12 ms\n\n## B\n\n13 ms\n",
        "| what | ours | the article<!-- source: it --> |\n|---|---|---|\n| flash | 13 ms | 12 ms |",
    ],
)
def test_a_note_covers_no_more_than_it_says(text):
    assert [found.split(": ")[1] for found in quotes.check(text, "p.md")[1]] == ["13 ms has no row"]


def test_write_puts_the_pages_right(tmp_path, monkeypatch, capsys):
    page = tmp_path / "p.md"
    page.write_text("9.999<!-- cpu_avx512_bf16/quickstart/evaluations.jsonl val_loss -->\n")
    monkeypatch.setattr(quotes, "PAGES", [page])
    monkeypatch.setattr(quotes, "ROOT", tmp_path)
    for argv, status in ((["quotes.py"], 1), (["quotes.py", "--write"], 0), (["quotes.py"], 0)):
        monkeypatch.setattr("sys.argv", argv)
        with pytest.raises(SystemExit) as ended:
            quotes.main()
        assert ended.value.code == status, capsys.readouterr().out
    assert page.read_text().startswith("1.260<!--")
