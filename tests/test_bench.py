"""bench.py's command line: which settings a kind has, and a sentence for every other."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

import bench
from fusedgpt.bench import kinds, sweep
from fusedgpt.errors import UserError
from fusedgpt.machine import files
from tests.fusedgpt.bench.small import run
from tests.launch import ROOT, fails, process, script

pytest.importorskip("tyro")  # reads the command line


def test_presets_are_the_articles_on_a_gpu_and_small_on_a_cpu():
    for blog in (kinds.defaults(kinds.ladder, gpu=True), read("ladder", "config/bench_blog.py")):
        assert (blog.n_layer, blog.n_head, blog.n_embd, blog.batch_size, blog.block_size) == (12, 12, 768, 12, 1024)
        assert (blog.vocab_size, blog.compile, blog.dropout, blog.gradient_accumulation_steps) == (50257, True, 0.0, 1)
    assert blog.dtype == "bfloat16"  # in the file, for any device
    assert kinds.defaults(kinds.prefill, gpu=True).models.startswith("mistral-7b,llama-3-8b,phi-2")
    assert {kinds.defaults(kind, gpu=False).n_layer for kind in (kinds.ladder, kinds.max_batch)} == {4}


def read(kind, *args):
    return kinds.read_settings(kind, [*args, "--device=cpu"])[0]


def test_amds_setting_by_config_file():
    s = read("sweep", "config/bench_amd_sweep.py")
    plan = [each.workload for each in sweep.comparisons(s, torch.device("cpu")) if each.workload["pass"] == "forward"]
    assert sorted(each["T"] for each in plan) == list(range(256, 4097, 64)) and {each["heads"] for each in plan} == {
        "32x128"
    }
    s = read("prefill", "config/bench_amd_prefill.py")
    assert (s.models, s.lengths, s.dtype) == ("mistral-7b,llama-3-8b,phi-2", "512,1024,2048", "bfloat16")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["numerics", "--models=nonsense"], "--models has no effect here: bench.py numerics does not use it"),
        (["ladder", "--attention=flash"], "--attention has no effect here: each row names its kernel"),
        (["ladder", "--eval_tasks=sonnets"], "--eval_tasks has no effect here: bench.py ladder does not use it"),
        (["--real_data=False"], "--real_data has no effect here: bench.py ladder does not use it"),
        (["sweep", "--heads=12"], "heads='12' must be like"),
        (
            ["numerics", "--only=flash,fly"],
            "only='fly' names no contender: it can be a pattern, such as 'flash*', or scaled before",
        ),
        (["flops"], "there is no benchmark 'flops': it can be ladder, sweep, prefill, numerics, max_batch, peers"),
        (["report"], "name the folder of a benchmark"),
        (["report", "config"], "config/rows.jsonl does not exist, or is empty"),
        (["nowhere.py"], "there is no config file nowhere.py"),
        # each row used to fail on its own, with an internal exception
        (["sweep", "--precision=0"], "precision=0.0 must be more than 0"),
        (["peers", "--batch_size=0"], "batch_size=0 must be 1 or more"),
        (["peers", "--n_head=5"], "n_embd=768 cannot be split over n_head=5: make it a multiple"),
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


def test_a_training_runs_config_file_is_accepted(tmp_path):
    # what a kind does not use is passed over in a file, which may be written for train.py; also nanoGPT's real_data
    file = tmp_path / "run.py"
    file.write_text(
        "attention = 'flash'\ninit_from = 'gpt2'\nlearning_rate = 1e-3\nmax_iters = 600000\n"
        "real_data = False\nheads = '1x8'"
    )
    s = read("ladder", str(file))
    assert (s.attention, s.init_from, s.learning_rate) == ("auto", "scratch", 1e-3)
    assert read("numerics", str(file)) == read("numerics")
    file.write_text("atention = 'flash'")
    with pytest.raises(UserError, match="no setting 'atention'"):
        read("ladder", str(file))


def test_what_would_be_measured_is_said_and_is_brief_if_no_kind_is_named(tmp_path):
    # nanoGPT's own command line used to start an hour of ladder without a word
    given = ["--batch_size=2", "--block_size=64", "--compile=False", f"--results={tmp_path}", "--device=cpu"]
    said = script("bench.py", *given, "--dry_run").stdout.splitlines()
    assert said[0].startswith("no kind is named, so this is: python bench.py ladder --only=manual,flash --seconds=30 ")
    assert said[1].startswith("ladder, on cpu: 1 comparison of 2 contenders, which take turns for 30 s at most in each")
    assert said[2:] == ["manual, flash"]
    said = script("bench.py", "numerics", "--dry_run", *given[3:]).stdout.splitlines()
    assert said[0] == f"numerics, on cpu: {len(said) - 1} comparisons of 96 contenders"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", kinds.KINDS)
def test_help_shows_a_kinds_own_settings_with_the_defaults_of_this_machine(kind):
    text = " ".join(script("bench.py", kind, "--help", "--device=cpu", COLUMNS="200").stdout.split())
    text = text[text.index(" options ") :]  # behind the line that names all flags, if they fit into one
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


def test_the_header_names_what_identifies_the_rows():
    s = read("ladder", "--batch_size=3")
    got = kinds.header("ladder", ["ladder", "--batch_size=3"], s, {"device": "x"})
    assert got["settings"]["batch_size"] == 3 and "batch_size" in got["set"] and "seed" not in got["set"]
    others = {"results", "only", "precision", "seconds", "max_seconds", "attention", "out_dir"}
    assert not got["settings"].keys() & others
    assert got["command"] == "python bench.py ladder --batch_size=3"


def test_reports_are_drawn_again_from_the_shell(tmp_path, data):
    folder = tmp_path / "ladder"
    shutil.copytree(ROOT / "results" / "cpu_avx2" / "ladder", folder)
    before = (folder / "report.md").read_text()
    for name in ("report.md", "ladder.png"):
        (folder / name).unlink()
    said = script("bench.py", "report", str(folder)).stdout
    assert said == f"wrote {', '.join(str(folder / name) for name in ('report.md', 'ladder.png', 'ladder.svg'))}\n"
    assert (folder / "report.md").read_text() == before and (folder / "ladder.png").stat().st_size > 1000


def test_a_benchmark_that_measured_nothing_fails(tmp_path, data, monkeypatch):
    # it used to end with status 0
    monkeypatch.setattr(kinds.numerics, "_has_backward", lambda *_: (_ for _ in ()).throw(UserError("on GPUs only")))
    with pytest.raises(UserError, match=r"nothing of numerics could be measured: .*report.md gives the reasons"):
        run("numerics", tmp_path, data, only="cudnn, masked&float32")
    assert "GPUs only" in (tmp_path / "results" / "numerics" / "report.md").read_text()


def test_a_budget_ends_with_a_report_and_the_same_command_goes_on(tmp_path, data, monkeypatch):
    only = "scaled before = math&float32,manual&float32"
    with pytest.raises(UserError, match="nothing of numerics could be measured"):
        run("numerics", tmp_path, data, only=only, max_seconds=1e-9)
    monkeypatch.setattr(kinds, "BEGAN", time.monotonic())
    assert len(run("numerics", tmp_path, data, only=only, max_seconds=600)) > 2
    assert not list((tmp_path / "results" / "numerics").glob("rows.previous*"))  # another budget is no other settings


def test_whatever_ends_it_there_is_a_report(tmp_path, data, monkeypatch):
    # Ctrl-C in the seventh lap lost the six before
    def interrupted(self):
        if len(self.result.laps) == 6:
            raise KeyboardInterrupt

    turns = kinds.Measurement._drop_failed
    monkeypatch.setattr(kinds.Measurement, "_drop_failed", lambda self, laps: turns(self, laps) or interrupted(self))
    with pytest.raises(KeyboardInterrupt):
        run("sweep", tmp_path, data, only="flash", seconds=1e6, precision=1e-9, dtype="float32")
    assert "times as fast" in (tmp_path / "results" / "sweep" / "report.md").read_text()


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGHUP", "SIGINT"])
@pytest.mark.slow
def test_a_signal_leaves_no_contender_and_a_report(sent, tmp_path):
    flags = ["--n_layer=1", "--n_head=2", "--n_embd=32", "--block_size=32", "--vocab_size=None", "--compile=False"]
    flags += ["--only=manual, eager,flash", "--precision=1e-9", "--seconds=600", f"--results={tmp_path}"]
    bench_py = subprocess.Popen([sys.executable, "bench.py", "ladder", *flags], cwd=ROOT, stdin=subprocess.PIPE)
    path, until = tmp_path / "ladder" / "rows.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_text().count('"lap"') > 8):
        assert time.monotonic() < until and bench_py.poll() is None
        time.sleep(0.2)
    bench_py.send_signal(getattr(signal, sent))
    assert bench_py.wait(60) == 128 + getattr(signal, sent)
    assert "times as fast" in (tmp_path / "ladder" / "report.md").read_text()
    with pytest.raises(BrokenPipeError):  # nobody has its input, once multiprocessing's own process has seen the end
        for _ in range(100):
            os.write(bench_py.stdin.fileno(), b".")
            time.sleep(0.1)


def test_two_calls_do_not_share_a_folder(tmp_path, data):
    # each wrote over the other's rows: one died of a traceback, and five of six rows were gone
    given = ["--device=cpu", "--only=cudnn, masked", f"--results={tmp_path}"]
    with files.lock(tmp_path / "numerics"):  # it does not hold against the process that has it
        said = fails("bench.py", "numerics", *given, run=process)
    assert "is in use by another" in said and not (tmp_path / "numerics" / "rows.jsonl").exists()


def test_data_that_cannot_be_prepared_is_one_sentence(tmp_path, monkeypatch):
    # in a checkout that is read-only it was a traceback of a CalledProcessError
    script = tmp_path / "data" / "python_stdlib" / "prepare.py"
    script.parent.mkdir(parents=True)
    script.write_text("raise SystemExit('error: Read-only file system')")
    for name in ("ROOT", "SCRIPTS"):
        monkeypatch.setattr(kinds, name, tmp_path)
    with pytest.raises(UserError, match=rf"{script} failed, see above: run it with --out_dir=FOLDER, and give"):
        bench.main("ladder", ["--dataset=python_stdlib", "--device=cpu", f"--results={tmp_path}"])
