"""bench.py's command line: which settings a kind has, and a sentence for every other."""

import dataclasses
import json
import platform
import time

import pytest
import torch

import bench
from fusedgpt.bench import child, kinds, ladder, report, rows, sweep
from fusedgpt.errors import UserError
from fusedgpt.machine import files
from tests.fusedgpt.bench.small import rows_of, run, settings
from tests.launch import ROOT, fails, process, script

pytest.importorskip("tyro")  # reads the command line


def test_presets_are_the_articles_on_a_gpu_and_small_on_a_cpu():
    def preset(name, gpu):
        kind = kinds.KINDS[name]
        return kinds.settings_class(kind)(**kind.defaults(gpu))

    blog = preset("ladder", gpu=True)
    assert (blog.n_layer, blog.n_head, blog.n_embd, blog.batch_size, blog.block_size) == (12, 12, 768, 12, 1024)
    assert preset("prefill", gpu=True).models.startswith("mistral-7b,llama-3-8b,phi-2")
    assert preset("sweep", gpu=True).repeats == 256
    assert {preset(name, gpu=False).n_layer for name in ("ladder", "sweep", "max_batch")} == {4}


def read(kind, *args):
    return kinds.read_settings(kind, [*args, "--device=cpu"])[0]


def test_the_articles_setting_by_config_file():
    s = read("ladder", "config/bench_blog.py")
    assert (s.n_layer, s.n_embd, s.block_size, s.batch_size, s.vocab_size) == (12, 768, 1024, 12, 50257)
    assert (s.dtype, s.compile, s.dropout, s.gradient_accumulation_steps) == ("bfloat16", True, 0.0, 1)


def test_amds_setting_by_config_file():
    s = read("sweep", "config/bench_amd_sweep.py")
    plan = sweep.plan(s, torch.device("cpu"))
    plan = [spec for spec in plan if spec["attention"] == "manual" and spec.get("pass") == "forward"]
    assert sorted(spec["T"] for spec in plan) == list(range(256, 4097, 64))
    assert {spec["heads"] for spec in plan} == {"32x128"}
    s = read("prefill", "config/bench_amd_prefill.py")
    assert (s.models, s.lengths, s.warmup, s.repeats) == ("mistral-7b,llama-3-8b,phi-2", "512,1024,2048", 4, 256)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["numerics", "--models=nonsense"], "--models has no effect here: bench.py numerics does not use it"),
        (["ladder", "--attention=flash"], "--attention has no effect here: each row names its kernel"),
        (["sweep", "--block_size=64"], "--block_size has no effect here: each row of the sweep sets it"),
        (["max_batch", "--init_from=gpt2"], "--init_from has no effect here: every run of a benchmark starts from"),
        (["ladder", "--max_iters=9"], "--max_iters has no effect here: --steps says how many"),
        (["--real_data=False"], "--real_data has no effect here: a benchmark trains on the tokens of --dataset"),
        (["sweep", "--lengthz=1"], "there is no setting 'lengthz': did you mean lengths?"),
        (["sweep", "--heads=12"], "heads='12' must be like"),
        (["numerics", "--only=flash,fly"], "only='fly' names no row: it can be a pattern, such as 'flash*', or inputs"),
        (["flops"], "there is no benchmark 'flops': it can be ladder, sweep, prefill, numerics, max_batch, peers"),
        (["report"], "name the folder of a benchmark"),
        (["report", "--format=gif"], "it takes 'svg' or 'pdf'"),
        (["report", "config"], "config/rows.jsonl does not exist, or is empty"),
        (["nowhere.py"], "config file nowhere.py does not exist"),
        # each row used to fail on its own, with an internal exception
        (["numerics", "--repeats=0"], "repeats=0 must be 1 or more"),
        (["ladder", "--steps=5"], "steps=5 must be 6 or more"),
        (["peers", "--batch_size=0"], "batch_size=0 must be 1 or more"),
        (["peers", "--n_head=5"], "n_embd=768 cannot be split over n_head=5: make it a multiple"),
        (["max_batch", "--memory_gb=inf"], "memory_gb=inf must be more than 0, and finite"),
        (["numerics", "--max_seconds=nan"], "max_seconds=nan must be more than 0, and finite"),
    ],
    ids=" ".join,
)
def test_bad_input_ends_in_one_sentence_before_the_first_row(args, message, monkeypatch, tmp_path):
    # a flag that nothing reads used to be accepted without a word
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError) as raised:
        kind, rest = bench.parse(args)
        bench.write_reports(rest) if kind == "report" else bench.main(
            kind, [*rest, "--device=cpu", f"--results={tmp_path}"]
        )
    assert message in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_bad_flag_from_the_shell():
    assert "did you mean sweep?" in fails("bench.py", "swep")


def test_a_training_runs_config_file_is_accepted(tmp_path):
    # what a kind does not use is passed over in a file, which may be written for train.py; also nanoGPT's real_data
    file = tmp_path / "run.py"
    file.write_text(
        "attention = 'flash'\ninit_from = 'gpt2'\nlearning_rate = 1e-3\nmax_iters = 600000\n"
        "real_data = False\nheads = '1x8'"
    )
    s = read("ladder", str(file))
    assert (s.attention, s.init_from, s.learning_rate, s.steps) == ("auto", "scratch", 1e-3, 25)
    assert read("numerics", str(file)) == read("numerics")
    file.write_text("atention = 'flash'")
    with pytest.raises(UserError, match="no setting 'atention'"):
        read("ladder", str(file))


def test_check_has_a_help():
    # it asked for a folder instead
    for args in (["--help"], ["folder", "-h"]):
        assert "--max_seconds" in script("bench.py", "check", *args).stdout


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_help_shows_a_kinds_own_settings_with_the_defaults_of_this_machine(kind):
    text = " ".join(script("bench.py", kind, "--help", "--device=cpu", COLUMNS="200").stdout.split())
    s, unused = read(kind), kinds.unused_settings(kind)
    for field in dataclasses.fields(s):
        if field.name in unused:
            assert f"--{field.name} " not in text
            continue
        start = text.index(f"--{field.name} ")
        end = text.index(")", text.index("(default:", start))
        shown = text[start:end]
        assert len(shown.partition("(default:")[0].split()) >= 3, field.name  # it has a meaning
        if field.name != "device":  # given above
            assert str(getattr(s, field.name)) in shown.partition("(default:")[2], field.name
    assert f"--{'models' if kind != 'prefill' else 'n_layer'} " not in text


def test_the_header_names_what_identifies_the_rows(tmp_path, data):
    run("numerics", tmp_path, data, only="scaled before = math")
    lines = (tmp_path / "results" / "numerics" / "rows.jsonl").read_text()
    assert lines.startswith('{"kind": "header", "benchmark": "numerics"')
    s = read("ladder", "--batch_size=3")
    got = kinds.header("ladder", ["--batch_size=3"], s, {"device": "x"})
    assert got["settings"]["batch_size"] == 3 and "batch_size" in got["set"] and "seed" not in got["set"]
    assert not got["settings"].keys() & {"results", "only", "profile", "max_seconds", "attention", "out_dir"}


def test_a_report_names_every_machine_that_its_rows_come_from(tmp_path, data, monkeypatch):
    # the header has the last one only
    # another call that measured nothing names no machine and no date
    for system, pair in (("Linux-6.1", "math"), ("Linux-6.8", "flash"), ("Linux-7.0", "flash")):
        monkeypatch.setattr(platform, "platform", lambda system=system: system)
        run("numerics", tmp_path, data, only=f"scaled before = {pair}")
    text = (tmp_path / "results" / "numerics" / "report.md").read_text()
    assert "| platform | Linux-6.1, Linux-6.8 |" in text and f"| python | {platform.python_version()} |" in text


def test_reports_are_drawn_again_from_the_shell(tmp_path, data):
    run("numerics", tmp_path, data, only="manual&large")
    folder = tmp_path / "results" / "numerics"
    before = (folder / "report.md").read_text()
    for name in ("report.md", "errors.png", "errors.svg"):
        (folder / name).unlink()
    said = script("bench.py", "report", str(folder), "--title=Errors of <my> kernels").stdout
    assert said == f"wrote {', '.join(str(folder / name) for name in ('report.md', 'errors.png', 'errors.svg'))}\n"
    assert "Errors of &lt;my&gt; kernels" in (folder / "errors.svg").read_text()  # in a comment before its outlines
    assert (folder / "report.md").read_text() == before and (folder / "errors.png").stat().st_size > 1000
    script("bench.py", "report", str(folder), "--format=pdf")
    assert (folder / "errors.pdf").read_bytes().startswith(b"%PDF")


def test_a_benchmark_without_a_measured_row_fails(tmp_path, data):
    # it used to end with status 0
    with pytest.raises(UserError, match=r"no row of ladder could be measured: .*report.md gives the reason for each"):
        run("ladder", tmp_path, data, only="efficient,cudnn*")
    assert "GPUs only" in (tmp_path / "results" / "ladder" / "report.md").read_text()


def test_a_budget_ends_with_a_report_and_the_same_command_goes_on(tmp_path, data, monkeypatch, capsys):
    budget = dict(only="* = math&float32,loss", max_seconds=60)
    with monkeypatch.context() as patch:
        patch.setattr(rows, "time_is_up", lambda max_seconds: len(rows_of("numerics", tmp_path)) >= 2)
        assert len(run("numerics", tmp_path, data, **budget)) == 2
    assert "rows are missing. The same command continues" in capsys.readouterr().out
    assert (tmp_path / "results" / "numerics" / "report.md").exists()
    monkeypatch.setattr(rows, "BEGAN", time.monotonic())
    assert len(run("numerics", tmp_path, data, **budget | {"max_seconds": 600})) > 2
    assert not list((tmp_path / "results" / "numerics").glob("rows.previous*"))  # another budget is no other settings


def test_a_budget_that_is_over_at_once_is_an_error(tmp_path, data, capsys):
    # "give the same command again" would have ended the same way
    with pytest.raises(UserError, match=r"max_seconds=1e-09 was over before any row of numerics: give more seconds$"):
        run("numerics", tmp_path, data, max_seconds=1e-9)
    assert "The same command" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["ladder", "sweep", "max_batch", "peers"])
def test_the_budget_is_not_that_of_a_training_run(tmp_path, data, kind):
    # max_seconds is a setting of train.py too: each run of it would have ended there
    s = settings(kind, tmp_path, data, max_seconds=60)
    passed = child.settings(s, kinds.KINDS[kind].Settings)
    assert not passed.keys() & {"max_seconds", "train_seconds"} and passed["max_iters"] == s.steps


@pytest.mark.slow  # a process that imports PyTorch; test_structure.py looks at the imports of each module
def test_bench_starts_without_what_it_does_not_use():
    heavy = "('transformers', 'wandb', 'datasets', 'matplotlib')"
    done = process("-c", f"import sys, bench; print([m for m in {heavy} if m in sys.modules])")
    assert done.stdout.strip() == "[]"


@pytest.mark.gpu
@pytest.mark.timeout(600)  # each rung of the ladder compiles
@pytest.mark.parametrize(
    ("kind", "only"),
    [
        ("ladder", "manual*,flash*,efficient,cudnn*,flex*,auto*"),
        ("sweep", "manual,flash,efficient,cudnn,flex"),
        ("prefill", "eager,flash"),
        ("numerics", "manual,flash,efficient,cudnn,flex"),
    ],
)
def test_every_kind_on_a_gpu(tmp_path, data, kind, only):
    changes = dict(device="cuda", dtype="bfloat16", models="mistral-small,gpt2", n_embd=64)
    got = run(kind, tmp_path, data, **changes, only=only)
    assert not [row for row in got if row["status"] == "failed"]
    sure = ("manual", "math", "efficient", "flash", "eager")
    for row in got:
        name = row.get("rung") or row.get("path") or row.get("attention")
        if name in sure:
            no_float32 = name == "flash" and row.get("dtype") == "float32"  # FlashAttention is for 16 bits
            assert row["status"] == ("refused" if no_float32 else "measured"), row


def test_two_calls_do_not_share_a_folder(tmp_path, data):
    # each wrote over the other's rows: one died of a traceback, and five of six rows were gone
    given = ["--device=cpu", "--only=cudnn, masked", f"--results={tmp_path}"]
    with files.lock(tmp_path / "numerics"):  # it does not hold against the process that has it
        said = fails("bench.py", "numerics", *given, run=process)
    assert "is in use by another" in said and not (tmp_path / "numerics" / "rows.jsonl").exists()


def test_a_folder_that_is_moved_is_not_made_anew(tmp_path, data, monkeypatch):
    # the rows of a second call at the old place were replaced
    results, measure = tmp_path / "results", ladder.measure

    def moved(*args, **kwargs):
        results.rename(tmp_path / "moved")
        return measure(*args, **kwargs)

    monkeypatch.setattr(ladder, "measure", moved)
    with pytest.raises(UserError, match=r"ladder was moved to .*moved/ladder .* the same command and that --results"):
        run("ladder", tmp_path, data, only="efficient")
    assert not results.exists() and (tmp_path / "moved" / "ladder" / "rows.jsonl").exists()


@pytest.mark.parametrize("kind", ["ladder", "sweep"])
def test_what_older_headers_do_not_name_is_as_it_was_then(kind):
    # rows of before there were rounds, and of before benchmarks kept freed memory, would be checked as other ones
    header, lines = report.read(ROOT / "results" / "cpu_amx" / kind)
    s, _, assumed = kinds.published_settings(header, report.rows_in(lines))
    name, was = {"ladder": ("rounds", 1), "sweep": ("freed_memory", "returned")}[kind]
    assert getattr(s, name) == assumed[name] == was
    if kind == "ladder":
        assert {"rung": "flash"} in ladder.plan(s, torch.device("cpu"))


def test_rows_that_lack_what_a_table_shows_are_one_sentence(tmp_path):
    header, *lines = (ROOT / "results" / "cpu_amx" / "ladder" / "rows.jsonl").read_text().splitlines()
    row = next(json.loads(line) for line in lines if '"measured"' in line)
    del row["final_loss"]
    (tmp_path / "rows.jsonl").write_text(f"{header}\n{json.dumps(row)}\n")
    with pytest.raises(UserError, match=r"no report can be drawn from .*KeyError: 'final_loss'\. Take a whole copy"):
        bench.write_reports([str(tmp_path)])


def test_data_that_cannot_be_prepared_is_one_sentence(tmp_path, monkeypatch):
    # in a checkout that is read-only it was a traceback of a CalledProcessError
    script = tmp_path / "data" / "python_stdlib" / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit('error: Read-only file system')")
    for name in ("ROOT", "SCRIPTS"):
        monkeypatch.setattr(kinds, name, tmp_path)
    with pytest.raises(UserError, match=rf"{script} failed, see above: run it with --out_dir=FOLDER, and give"):
        bench.main("ladder", ["--dataset=python_stdlib", "--device=cpu", f"--results={tmp_path}"])
