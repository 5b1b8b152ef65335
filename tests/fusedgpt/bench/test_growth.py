"""How cost grows: proofs before times, memory by hand, what theory counts, and the figures."""

import dataclasses
import types

import pytest
import torch

from fusedgpt.attention import permitted
from fusedgpt.attention.functions import ATTENTION
from fusedgpt.attention.table import SINGLE_KERNELS
from fusedgpt.bench import check, drawing, growth, options, power_laws, prepare_time
from fusedgpt.bench.proof import ParityError
from fusedgpt.errors import UserError
from fusedgpt.generation import generate
from fusedgpt.machine import memory, timing
from model import GPT
from tests.fusedgpt.bench.small import run, settings
from tests.fusedgpt.bench.test_power_laws import row

CPU = torch.device("cpu")
SIZES = dict(lengths="32,64,128", depths="1,2,4", widths="16,32,64", batches="1,2,4", texts="8,16,32", rounds=2)
SIZES |= dict(megabytes="1", tokenizer="byte")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(growth, "ENOUGH_MS", 1)
    growth._proven.cache_clear()  # of another test


def test_growth_to_its_report(tmp_path, data):
    two = dict(lengths="32,64", depths="1,2", widths="16,32", batches="1,2", texts="8,16", rounds=1)
    rows = run("growth", tmp_path, data, **SIZES | two, only="manual,cudnn,sdpa,generation")
    refused = [each for each in rows if each["status"] != "measured"]
    assert {(each["attention"], each["reason"]) for each in refused} == {("cudnn", "PyTorch has it on GPUs only")}
    assert len(rows) == 2 * (2 + 3 + 2) and len(refused) == 2
    assert all("parity" in each and each["median_ms"] > 0 for each in rows if each not in refused)
    found = {(*power_laws.curve_of(law), law["law"]): law for law in power_laws.laws(rows)}
    steps = {("length", "manual"), ("depth", "sdpa"), ("width", "sdpa"), ("batch", "sdpa")}
    others = {("generation", "tokens"), ("generation", "samples")}
    wanted = {(*of, law) for of in steps for law in ("time", "memory")} | {(*of, "time") for of in others}
    assert found.keys() == wanted
    folder = tmp_path / "results" / "growth"
    text = (folder / "report.md").read_text()
    assert "## length, over tokens" in text and "| tokens | manual, ms (MiB) |" in text
    assert "## generation, over samples" in text and "| cudnn |" not in text and "cudnn: refused" in text
    for name in ("length", "depth", "width", "batch", "generation"):
        assert (folder / f"{name}.png").exists()
    assert not (folder / "prepare.png").exists()


def test_text_is_prepared_on_all_cores_and_on_some(tmp_path, data, monkeypatch):
    asked = []

    def fake(megabytes, cores, tokenizer, folder):
        asked.append((megabytes, cores, tokenizer))
        return {"megabytes": megabytes, "parity": "passed", "samples_ms": [5.0], **timing.summary([5.0])}

    monkeypatch.setattr(prepare_time, "run", fake)
    monkeypatch.setattr(prepare_time, "counts_of_cores", lambda: [1, 2, 3])
    rows = run("growth", tmp_path, data, **SIZES | dict(megabytes="4,1", rounds=1), only="prepare")
    assert asked == [(1, None, "byte"), (4, None, "byte"), *((4, cores, "byte") for cores in (1, 2, 3))]
    assert [each["work"] for each in rows] == [pytest.approx(1e6 / 3), pytest.approx(4e6 / 3), 4e6, 2e6, 4e6 / 3]
    time = {law["over"]: law for law in power_laws.laws(rows)}
    assert time["text"]["counted"] == pytest.approx(1) and time["cores"]["counted"] == pytest.approx(-1)


def test_a_wrong_kernel_gets_no_time(tmp_path, data, monkeypatch):
    def wrong(q, k, v, dropout_p=0.0):
        return ATTENTION["manual"](q, k, v) * 1.5

    monkeypatch.setattr(permitted, "ATTENTION", {**ATTENTION, "manual": wrong})
    monkeypatch.setattr(timing, "samples", lambda *_: pytest.fail("a kernel that fails parity was timed"))
    with pytest.raises(ParityError):
        measured(tmp_path, data, part="length", attention="manual", n=32)


def measured(tmp_path, data, spec=None, changes=None, **of):
    s = settings("growth", tmp_path, data, **SIZES | (changes or {}))
    return growth.measure(spec or of, s, CPU, tmp_path)


def test_generation_with_a_wrong_cache_gets_no_time(tmp_path, data, monkeypatch):
    extend = generate.LayerCache.extend

    def wrong(layer, k, v):
        keys, values = extend(layer, k, v)
        return keys, values.roll(1, dims=-2)  # the values of other tokens

    measured(tmp_path, data, part="generation", over="tokens", n=8)
    monkeypatch.setattr(generate.LayerCache, "extend", wrong)
    with pytest.raises(ParityError, match="in the logits after 8 tokens"):
        measured(tmp_path, data, part="generation", over="tokens", n=8)


def test_a_step_that_does_not_fit_is_a_row_and_no_crash(tmp_path, data, monkeypatch):
    # the system would end the process, with all rows
    monkeypatch.setattr(memory, "total_memory", lambda device: 2**22)
    changes = dict(SIZES, rounds=1, lengths="16,32,1024")
    rows = run("growth", tmp_path, data, **changes, only="manual")
    assert [each["status"] for each in rows] == [*["measured"] * 2, "out of memory"]
    assert "it needs 0.0 GiB or more, and this machine or its container has 0.0 GiB" in rows[-1]["reason"]
    ((_, _, subject, _),) = growth.figures(rows, vars(settings("growth", tmp_path, data, **changes)))
    assert "Out of memory: " in subject


def test_the_memory_of_a_step_is_near_a_hand_count(tmp_path, data):
    changes = dict(n_embd=32, n_head=2, n_layer=2, vocab_size=64)
    held = {
        name: measured(tmp_path, data, changes=changes, part="length", attention=name, n=256)["peak_memory"]
        for name in ("manual", "flash")
    }
    weights = 12 * 2 * 32**2 + (256 + 64) * 32  # LayerNorms aside
    assert held["flash"] > 4 * 4 * weights  # the weights, their gradients and AdamW's two means
    scores = 2 * 256 * 256 * 4  # one layer's, in float32
    assert 2 * scores < held["manual"] - held["flash"] < 7 * scores  # each layer's softmax is kept


def test_the_count_of_a_step_is_that_of_its_model(tmp_path, data):
    of = dict(part="width", attention="sdpa", n=64)
    row = measured(tmp_path, data, **of)
    s = settings("growth", tmp_path, data, **SIZES)
    config = growth._config(s, n_embd=64)
    assert (config.n_head, config.head_channels) == (4, 16)  # heads keep their size
    assert row["work"] == GPT(config).flops_per_token() * row["tokens"] and row["tokens"] == 4 * 16
    batch = measured(tmp_path, data, part="batch", attention="sdpa", n=2)
    assert batch["tokens"] == 2 * 16
    long = measured(tmp_path, data, part="length", attention="sdpa", n=48)
    assert long["tokens"] == 48


def test_generation_reads_all_weights_and_all_keys_for_each_token(tmp_path, data):
    row = measured(tmp_path, data, part="generation", over="tokens", n=3)
    model = GPT(growth._config(settings("growth", tmp_path, data, **SIZES), block_size=35))
    keys_and_values = 2 * 2 * 32 * 4  # layers, channels, float32
    assert row["work"] == 3 * 4 * model.get_num_params() + keys_and_values * (32 + 33 + 34) and row["tokens"] == 3
    several = measured(tmp_path, data, part="generation", over="samples", n=4)
    assert several["tokens"] == 4 * growth.NEW_TOKENS


def test_quick_calls_are_repeated_and_slow_ones_are_not(monkeypatch):
    monkeypatch.setattr(growth, "ENOUGH_MS", 500)
    for ms, count in ((1.0, 100), (10.0, 50), (400.0, 3)):
        monkeypatch.setattr(timing, "samples", lambda step, device, count, warmup, ms=ms: [ms] * count)
        monkeypatch.setattr(growth, "counting_faults", lambda step: (step, lambda: 0))
        s = types.SimpleNamespace(repeats=3, warmup=0)
        assert len(growth._timed(lambda: None, s, CPU)["samples_ms"]) == count


def test_the_plan_measures_each_curve_in_each_round(tmp_path, data):
    s = settings("growth", tmp_path, data, **SIZES)
    plan = growth.plan(s, CPU)
    assert len(plan) == len({tuple(spec.items()) for spec in plan})
    first, second = ([spec for spec in plan if spec["round"] == number] for number in (1, 2))
    assert plan == [*first, *second] and [{**spec, "round": 2} for spec in first] == second
    length = [(spec["n"], spec["attention"]) for spec in first if spec["part"] == "length"]
    assert length == [(T, name) for T in (32, 64, 128) for name in SINGLE_KERNELS]  # drift meets all kernels
    assert {spec["part"] for spec in options.admitted(plan, "generation,depth")} == {"generation", "depth"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            dict(widths="16,40"),
            r"40 of widths='16,40' is no multiple of n_embd / n_head = 16, the channels of a head: ",
        ),
        (dict(depths="a"), r"depths='a' must be like 256,512"),
        (dict(megabytes="0"), r"megabytes='0' must be like 256,512"),
        (dict(n_head=3), r"n_embd=32 cannot be split over n_head=3"),
    ],
)
def test_a_wrong_setting_is_refused_before_the_first_row(tmp_path, data, changes, said):
    with pytest.raises(UserError, match=said):
        growth.plan(settings("growth", tmp_path, data, **SIZES | changes), CPU)


def curve(part, name, power, memory=0, rounds=(1, 2), **more):
    """Rows of a curve at 1, 2 and 4, which take n^power ms."""
    return [
        row(n, float(n**power), number, part, name, memory=2**20 * n**memory, **more)
        for number in rounds
        for n in (1, 2, 4)
    ]


def test_the_titles_say_by_what_cost_is_multiplied():
    rows = [*curve("length", "manual", 2, 2), *curve("length", "flash", 1.5, 1)]
    both = "Twice the tokens take 4.0 (manual), 2.8 (flash) times the time and 4.0, 2.0 times the memory"
    assert growth.finding("length", power_laws.laws(rows)) == both
    for each in rows[:6]:
        each |= {"disturbed": True, "reason": "another program"}
    said = growth.finding("length", power_laws.laws(rows))
    assert said == "Twice the tokens take 2.8 (flash) times the time and 4.0 (manual), 2.0 (flash) times the memory"
    rows = [*curve("generation", "tokens", 1), *curve("generation", "samples", 0.5)]
    said = "Twice the new tokens take 2.0 times the time; twice the samples take 1.4 times the time"
    assert growth.finding("length", power_laws.laws(rows)) == said
    assert growth.finding("prepare", []) == "No undisturbed curve of prepare"
    busy = curve("depth", "sdpa", 1, 1, disturbed=True, reason="another program")
    assert growth.finding("depth", power_laws.laws(busy)) == "Twice the layers take 2.0 times the memory"


def test_the_figures_show_the_points_and_their_law(tmp_path, data):
    ran = {"ran": {"dtype": "float32", "compile": False}}
    rows = [*curve("length", "manual", 2, 2, **ran), *curve("length", "flash", 1, 1, **ran)]
    rows += [*curve("prepare", "text", 1), *curve("prepare", "cores", -1, megabytes=8)]
    s = vars(settings("growth", tmp_path, data, **SIZES))
    figures = {name: (subject, figure) for name, _, subject, figure in _kept(growth.figures(rows, s))}
    assert figures.keys() == {"length", "prepare"}
    time, held = figures["length"][1]
    assert [text for text in time] == ["manual: T^2.00", "flash: T^1.00"] == [*held]
    text, cores = figures["prepare"][1]
    assert [*text] == ["n^0.00"] and [*cores] == ["p^1.00"]  # MB a second
    assert text["n^0.00"] == pytest.approx([1000] * 3) and cores["p^1.00"] == pytest.approx([8000, 16000, 32000])
    assert "float32, eager" in figures["length"][0] and "1 × T tokens a step" in figures["length"][0]


def test_every_axis_has_numbers(tmp_path, data):
    # tokens a second that hardly change had an axis without a number
    ran = {"ran": {"dtype": "float32", "compile": False}}
    rows = [*curve("generation", "tokens", 1.02, **ran), *curve("prepare", "text", 0.9)]
    for *_, figure in growth.figures(rows, vars(settings("growth", tmp_path, data, **SIZES))):
        figure.canvas.draw()
        for axes in figure.axes:
            low, high = axes.get_ylim()
            assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 2


def _kept(figures):
    """`figures`, each with what its legends name: [{label: y of the points} for each panel]."""
    for name, title, subject, figure in figures:
        panels = [
            {line.get_label(): list(line.get_ydata()) for line in axes.lines if not line.get_label().startswith("_")}
            for axes in figure.axes
        ]
        yield name, title, subject, panels


def test_figures_of_disturbed_rows_can_be_drawn(tmp_path, data, drawn):
    ran = {"ran": {"dtype": "float32", "compile": False}, "disturbed": True, "reason": "another program"}
    rows = [*curve("length", "manual", 2, 2, **ran), *curve("prepare", "text", 1, disturbed=True, reason="another")]
    s = vars(settings("growth", tmp_path, data, **SIZES))
    paths = drawing.save(growth.figures(rows, s), tmp_path, "a machine")
    assert {path.name for path in paths if path.suffix == ".png"} == {"length.png", "prepare.png"}
    growth.table(rows)


def test_disturbed_points_are_hollow_and_beside_no_law(tmp_path, data):
    # a panel of disturbed times was empty, with an axis from 0 to 1
    ran, busy = {"ran": {"dtype": "float32", "compile": False}}, {"disturbed": True, "reason": "another program"}
    rows = curve("length", "manual", 2, 2, **ran) + curve("length", "flash", 1.5, 1, **ran, **busy)
    s = vars(settings("growth", tmp_path, data, **SIZES))
    ((_, _, subject, figure),) = growth.figures(rows, s)
    assert "Hollow: disturbed" in subject
    time, memory = figure.axes
    for panel, labels in ((time, ["manual: T^2.00", "flash: no law"]), (memory, ["manual: T^2.00", "flash: T^1.00"])):
        assert [text.get_text() for text in panel.get_legend().get_texts()] == labels
    hollow = [line for line in time.lines if line.get_markerfacecolor() == "none" and len(line.get_xdata())]
    assert [len(line.get_xdata()) for line in hollow] == [3]
    ((_, _, subject, _),) = growth.figures(rows[:6], s)
    assert "Hollow" not in subject


def test_claims_are_ratios_that_another_machine_can_check():
    rows = [*curve("length", "flash", 1.5, 1), *curve("generation", "tokens", 1)]
    rows += [{"part": "length", "attention": "cudnn", "n": 1, "round": 1, "status": "refused", "reason": "GPUs only"}]
    found = {claim.name: claim for claim in growth.claims(rows)}
    time = found["length, flash: time for twice the tokens"]
    assert str(time) == "2.83x (2.83-2.83)" and len(time.rows) == 6 and time.timed
    assert not found["length, flash: memory for twice the tokens"].timed
    assert str(found["length, cudnn, 1, 1"]) == check.REFUSED
    (alone,) = growth.claims(curve("generation", "tokens", 1, rounds=(1,)))
    assert dataclasses.replace(alone, rows=[]) == check.Claim(
        "generation, tokens: time for twice the new tokens", [], 2.0
    )
