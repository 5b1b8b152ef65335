"""The page of several runs: what it compares, whatever their files hold, and how it behaves in a browser."""

import pytest

from fusedgpt.errors import UserError
from fusedgpt.runs import compare_page
from fusedgpt.runs.metrics import Run
from tests.fusedgpt.runs.test_metrics import evaluation, run_of, step
from tests.fusedgpt.runs.test_report_page import (
    RECORDS,
    in_browser,
    in_chromium,
    page_of,
    sample,
    text_in,
)


def some_run(folder, loss=2.0, ms=2000.0, **record):
    """A run of 40 steps, whose validation loss ends at `loss`, with samples after 20 and 40."""
    lines = [step(n, loss + 4 - n / 10, lr=0.1, ms=ms, tokens_per_s=1e6 / ms, peak_memory=2.0**30) for n in range(40)]
    lines += [evaluation(0, loss + 4), evaluation(20, loss - 0.5), evaluation(40, loss)]
    lines += [sample(20, "early"), sample(40, f"late {folder.name}")]
    record = dict(tokens_per_step=1000, model={"vocab_size": 256}, settings={"seed": 1}) | record
    return run_of(folder, lines, **record)


def compared(tmp_path, *runs):
    path = tmp_path / "page.html"
    compare_page.write([*runs], path)
    return path


def tables(page):
    return {each["title"]: each["rows"] for each in page["tables"]}


def test_a_page_puts_runs_beside_each_other(tmp_path):
    settings = {"seed": 1, "attention": "manual", "out_dir": "a", "weight_decay": None}
    a = some_run(tmp_path / "a", 2.0, settings=settings, attention="manual", receipt={"forward": ["unfused"]})
    there = {"attention": "flash", "out_dir": "b"}
    b = some_run(tmp_path / "b", 1.9, 500.0, settings=settings | there, attention="flash", receipt={"forward": "flash"})
    page = page_of(compared(tmp_path, a, b))
    assert page["runs"] == ["a", "b"] and page["headline"] == "b ends lowest, at 1.9000 nats per token."
    assert page["ends"] == [
        ["2.0000", "1.5000 at 20", "500", "2,000", "1 min 20 s", "1.00 GiB"],
        ["1.9000", "1.4000 at 20", "2,000", "500", "20.0 s", "1.00 GiB"],
    ]
    assert len(page["head"]) == 1 + len(page["ends"][0])
    assert tables(page)["Settings that differ"] == [["attention", "manual", "flash"]]  # out_dir differs in any two runs
    receipts = tables(page)["Attention: the receipts"]
    assert ["ran", "manual", "flash"] in receipts and ["forward seen", "unfused", "flash"] in receipts
    assert page["samples"] == [["\n", [[40, "late a"], [40, "late b"]]]]
    loss = page["charts"][0]
    assert [(line["run"], line["name"]) for line in loss["lines"]] == [
        (0, "training"), (0, "validation"), (1, "training"), (1, "validation")
    ]  # fmt: skip
    assert loss["lines"][3]["x"] == {"iterations": [0, 20, 40], "time": [0, 10, 20], "tokens": [0, 20_000, 40_000]}
    assert loss["lines"][3]["y"] == [5.9, 1.4, 1.9] and page["axes"]["time"] == "seconds"
    slow = page_of(compared(tmp_path, a, some_run(tmp_path / "slow", ms=9000.0)))
    assert slow["charts"][0]["lines"][3]["x"]["time"] == [0, 3, 6] and slow["axes"]["time"] == "minutes"


def headline(tmp_path, *runs):
    return page_of(compared(tmp_path, *runs))["headline"]


def test_equal_ends_are_not_ranked(tmp_path):
    # of two kernels with the same losses, the page named one the best by a rounding error
    a, b = some_run(tmp_path / "a", 2.00001), some_run(tmp_path / "b", 2.0)
    assert headline(tmp_path, a, b) == "All runs end at 2.0000 nats per token."
    never = run_of(tmp_path / "never", [step(0)])  # has no end
    for third in (some_run(tmp_path / "c", 2.5), never):
        assert headline(tmp_path, a, b, third) == "a and b end lowest, at 2.0000 nats per token."
    assert headline(tmp_path, a, never) == "Fewer than two of these runs have been evaluated."
    short = run_of(tmp_path / "short", [step(0), evaluation(0, 4.0), evaluation(10, 1.5)])
    said = "short ends lowest, at 1.5000 nats per token. But they were last evaluated after 40 and 10 iterations."
    assert headline(tmp_path, a, short) == said


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (dict(dataset="book"), dict(dataset="code"), "evaluated on different data, book and code: such losses do not"),
        (dict(mask="document"), dict(mask="causal"), "with different masks, causal and document: such losses do not"),
        (dict(eval_iters=0), dict(eval_iters=100), "evaluated on all and 1,200 windows: small differences"),
        (dict(eval_iters=300, batch_size=4), dict(eval_iters=100), None),
    ],
)
def test_what_makes_losses_differ_is_said(tmp_path, one, other, said):
    runs = [some_run(tmp_path / n, settings=dict(batch_size=12) | s) for n, s in (("a", one), ("b", other))]
    found = headline(tmp_path, *runs)
    assert said in found if said else "But" not in found


def test_runs_of_different_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, ratio, vocabulary in ((a, 1.4427, 256), (b, 0.35, 50257)):
        told = dict.fromkeys(("train_bits_per_byte", "val_bits_per_byte"), 2 * ratio)
        lines = [step(0), evaluation(0, **told), evaluation(1, **told)]
        run_of(folder, lines, model={"vocab_size": vocabulary})
    a, b = Run(a), Run(b)
    page = page_of(compared(tmp_path, a, b))
    assert page["headline"] == "b ends lowest, at 0.7000 bits per byte."
    assert page["charts"][0]["title"] == page["head"][1] == "bits per byte"
    silent = some_run(tmp_path / "silent", model={"vocab_size": 50257})
    with pytest.raises(UserError, match="only bits per byte compare them"):
        compared(tmp_path, a, silent)


def test_an_axis_that_a_run_does_not_know_is_not_offered(tmp_path):
    a, b = some_run(tmp_path / "a"), some_run(tmp_path / "b", tokens_per_step=None)
    assert list(page_of(compared(tmp_path, a, b))["axes"]) == ["iterations", "time"]
    a, b = (run_of(tmp_path / name, [step(0)], tokens_per_step=9) for name in "cd")
    assert list(page_of(compared(tmp_path, a, b))["axes"]) == ["iterations", "tokens"]


def test_damaged_records_cost_only_what_they_said(tmp_path):
    b = some_run(tmp_path / "b", 1.5)
    for record in RECORDS:
        some_run(tmp_path / "a")
        (tmp_path / "a" / "run.json").write_text(record)
        page = page_of(compared(tmp_path, Run(tmp_path / "a"), b))
        assert page["headline"].startswith("b ends lowest"), record


@in_browser
def test_the_pointer_reads_all_runs_and_the_axis_can_be_changed(tmp_path):
    # 2 s and 0.5 s a step: after 20 seconds, one run has done 10 steps and the other 40
    runs = some_run(tmp_path / "slow", 2.0), some_run(tmp_path / "fast", 1.9, 500.0)
    script = """
        const svg = document.querySelectorAll("#charts svg")[1], seen = [];
        const at = part => {
            const box = svg.getBoundingClientRect(), x = box.left + 54 + part * (box.width - 66);
            svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, bubbles: true }));
            seen.push(document.querySelector(".at").textContent);
            seen.push([...document.querySelectorAll("figure .readout")[0].querySelectorAll("b")]
                .map(each => each.textContent).join(" "));
        };
        at(0.5);
        document.querySelector("[data-axis=time]").click();
        at(0.3);
        svg.dispatchEvent(new PointerEvent("pointerleave"));
        seen.push(document.querySelector("[aria-pressed=true]").textContent);
        document.body.append(make("p", { id: "seen" }, seen.join("|")));
        document.body.dataset.requests = performance.getEntriesByType("resource").length;
        document.body.dataset.wide = document.documentElement.scrollWidth > innerWidth;
    """
    document, console = in_chromium(compared(tmp_path, *runs), script)
    # half of 40 iterations; then 24 s of 80: the slow run's nearest evaluation is at 40 s, and the fast one has ended
    assert text_in(document, "seen") == "iteration 20|1.500 1.400|40 seconds|1.500 1.900|training time"
    assert 'data-requests="0"' in document and 'data-wide="false"' in document and console == []


@in_browser
def test_keys_move_along_the_curve_of_a_run_that_has_one(tmp_path):
    # they did nothing if the first run had no rows, and else moved in steps that the validation does not have
    new = run_of(tmp_path / "new", [])
    script = """
        const svg = document.querySelector("#charts svg"), seen = [];
        for (const key of ["ArrowLeft", "ArrowLeft", "ArrowRight"]) {
            svg.dispatchEvent(new KeyboardEvent("keydown", { key }));
            seen.push(document.querySelector(".at")?.textContent);
        }
        document.body.append(make("p", { id: "seen" }, seen.join("|")));
    """
    document, console = in_chromium(compared(tmp_path, new, some_run(tmp_path / "b")), script)
    assert text_in(document, "seen") == "iteration 40|iteration 20|iteration 40" and console == []
