"""Command line from outside: output, streams, exit codes, and imports."""

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Forked
from permissions import unprivileged, unreadable

from megatron.config.method_names import list_processor_values
from megatron.config.reference import find_keys
from megatron.position.catalog import list_encodings
from megatron.utils.progress import IMPORTING

ROOT = Path(__file__).resolve().parents[1]
DEEPY = ROOT / "deepy.py"
COMMANDS = (
    *(
        "train",
        "plan",
        "rehearse",
        "prepare",
        "import",
        "evaluate",
        "analyze",
        "generate",
        "positions",
        "tasks",
        "sweep",
        "report",
        "export",
    ),
    *("checkpoints", "status", "what-was-in", "keys"),
)
TINY = """\
num_layers: 1
hidden_size: 16
num_attention_heads: 2
seq_length: 16
pos_emb: rotary
train_iters: 4
train_batch_size: 4
log_interval: 2
eval_interval: 0
device: cpu
"""


def deepy(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEEPY), *arguments],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def inside(capfd, monkeypatch):
    """Function that runs the command line in this process, where everything is imported already."""
    import deepy as program

    def call(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            patch.chdir(cwd)
            patch.setattr(sys, "argv", ["./deepy.py", *arguments])
            for name, value in {"COLUMNS": "120", **environment}.items():
                patch.setenv(name, value)
            capfd.readouterr()
            with contextlib.ExitStack() as stack:
                # rich stores sys.stdout, which is another object in every test
                stack.callback(lambda: (sys.stdout.flush(), sys.stderr.flush()))
                code = program.main()
            out, err = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    return call


def calls_without(packages: tuple[str, ...], calls: list[tuple[str, ...]], cwd: Path) -> dict[tuple[str, ...], list]:
    """Run several calls without some packages; return exit code, standard output and error of each."""
    code = (
        f"import contextlib, io, json, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"sys.modules.update(dict.fromkeys({packages!r}))\n"
        "import deepy\n"
        "results = []\n"
        f"for call in {calls!r}:\n"
        "    sys.argv = ['./deepy.py', *call]\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        code = deepy.main()\n"
        "    results.append([code, out.getvalue(), err.getvalue()])\n"
        "open('results.json', 'w').write(json.dumps(results))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return dict(zip(calls, json.loads((cwd / "results.json").read_text()), strict=True))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Folder with a small prepared corpus and a configuration that trains on it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"document {number}: " + "the quick brown fox " * 30)
    done = deepy("prepare", "text", "--output", "data/fox", "--split", "6,1,1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "train_data_paths=[data/fox/train_text_document]" in done.stdout
    (folder / "tiny.yml").write_text(TINY + "train_data_paths: [data/fox/train_text_document]\n")
    return folder


def test_help_does_not_import_torch(tmp_path):
    calls = [("--help",), (), *((command, "--help") for command in COMMANDS)]
    found = calls_without(("torch", "numpy", "deepspeed", "matplotlib"), calls, tmp_path)
    for arguments, (code, _, error) in found.items():
        assert code == (0 if arguments else 2)
        assert error == ""


MISTAKES = {
    ("train", "no_such_file"): "no_such_file: no such configuration file",
    ("train", "125M", "num_layrs=3"): "unknown key 'num_layrs'; did you mean num_layers",
    ("train", "125M", "hidden_size=7"): "hidden_size",
    ("train", "125M", "precision=bf16"): "no data to train on",
    ("train", "162M", "local_setup", "device=cuda", "num_gpus=99"): "is not train_micro_batch_size_per_gpu 32 ×",
    ("train", "tiny", "num_gpus=2", "train_data_paths=[data/none]", "save=runs/none"): "no dataset data/none",
    ("evaluate",): "Missing argument",
    ("evaluate", "run", "--window", "nonsense"): "--window is nonsense; it must be an integer",
    ("evaluate", "run", "--windows", "0"): "--windows is 0; it must be at least 1",
    ("--window", "nonsense"): "it after its command: ./deepy.py evaluate … --window nonsense (see ./deepy.py --help)",
    ("evaluate", "nowhere"): "nowhere: no such folder",
    ("evaluate", "data"): "data: contains no checkpoint; expected a run's folder",
    ("evaluate", "rnu"): "rnu: no such folder; did you mean run? expected a run's folder",
    ("generate", "run/checkpoint/step_0000005", "-p", "a"): "did you mean run/checkpoints/step_0000004? expected",
    ("status", "Rum"): "Rum: no such folder; did you mean run?",
    ("import", "dep", "imported"): "dep: no such folder; did you mean deep?",
    (
        "evaluate",
        "several",
    ): "this folder has no checkpoint but contains runs that do; choose one of: several/a several/b/c",
    ("generate", "several/b", "-p", "a"): "but contains runs that do; choose one of: several/b/c",
    ("positions", "kerple_logg"): "did you mean kerple_log or kerple_log3 or kerple_power?",
    ("positions", "alibbi"): "no method's name contains 'alibbi'; did you mean alibi?",
    ("tasks", "flip_flip"): "no task contains 'flip_flip'; did you mean flip_flop?",
    ("evaluate", "run", "run/."): "the same checkpoint is given twice: run, run/.",
    ("evaluate", "run", "--lengths", "1x,b"): "--lengths is 1x,b; 'b' is not a length",
    ("evaluate", "run", "--lengths", "16,99999999"): "too few for the largest length; 99,999,999",
    (
        "evaluate",
        "run",
        "--lengths",
        "16",
        "--protocol",
        "first",
    ): "error: --protocol is first; choose from last",
    ("evaluate", "run", "--lengths", "16", "--data", "nowhere"): "nowhere: not found; --data expects a file (.txt",
    ("evaluate", "run", "--lengths", "16", "-o", "tiny.yml"): "--output is tiny.yml, which is a file; name a folder",
    ("train", "tiny", "save=tiny.yml"): "save is tiny.yml, which is a file; name a folder",
    ("train", "tiny", "save=tiny.yml/x", "--dry-run"): "save is tiny.yml/x, but tiny.yml is a file; name a folder",
    (
        "evaluate",
        "run",
        "--lengths",
        "16",
        "--precision",
        "fp8",
    ): "error: --precision is fp8; choose from auto",
    (
        "evaluate",
        "run",
        "--lengths",
        "16",
        "--device",
        "tpu",
    ): "--device is tpu; did you mean cpu? choose from auto, cpu",
    ("evaluate", "run", "--lengths", "16", "--backend", "fast"): "--backend is fast; choose from auto, eager",
    ("evaluate", "run", "--num-fewshot", "0"): "--num-fewshot requires --tasks",
    ("evaluate", "run", "--tasks", "piqa", "--windows", "3"): "--windows applies to texts only, but --tasks is",
    ("analyze",): "no run given; expected a run folder, or a configuration with --config",
    ("analyze", "run", "--only", "kernel"): "--only: unknown analysis 'kernel'; did you mean kernels? choose from",
    ("analyze", "run", "--layers", "a"): "error: item 1 of --layers is a; it must be an integer",
    ("analyze", "run", "--lengths", "16,99999999"): "too few for the largest length; 99,999,999",
    ("analyze", "run", "--windows", "0"): "--windows is 0; it must be at least 1",
    ("analyze", "--config", "tiny.yml pos_emb=alibis", "-o", "out"): "alibi",
    (
        "analyze",
        "--config",
        "tiny.yml precision=foo",
        "-o",
        "out",
    ): "error: --config 'tiny.yml precision=foo': precision is foo; choose from fp32, bf16, fp16",
    ("evaluate", "run", "--tasks", ","): "--tasks is []; it must be a list of at least 1",
    ("generate", "nowhere", "-p", "a"): "nowhere: no such folder",
    ("generate", "run", "-p", "a", "--top-p", "0"): "error: --top-p is 0.0; it must be greater than 0",
    ("generate", "run", "-p", "a", "--temperature", "-1"): "--temperature is -1; it must be at least 0",
    ("generate", "run", "-p", "a", "--precision", "fp8"): "error: --precision is fp8; choose from auto",
    ("generate", "run", "-p", "a", "--backend", "fast"): "--backend is fast; choose from auto, eager",
    ("generate", "run", "-p", "a", "--stop", ""): "--stop is empty",
    ("generate", "run", "--file", "nowhere"): "nowhere: not found; --file expects a text",
    ("sweep", "no_such_file"): "no_such_file: no such configuration file",
    ("plan", "125M", "--gpu", "a200"): "--gpu a200: unknown GPU; did you mean h200? choose from a10, a100-40gb",
    ("plan", "125M", "--gpus", "0"): "--gpus is 0; it must be at least 1",
    (
        "rehearse",
        "125M",
        "--gpu",
        "h300",
    ): "--gpu h300: unknown GPU; did you mean h800? choose from a100-40gb",
    ("rehearse", "125M", "--ranks", "first"): "--ranks 'first': expected roles, all, or ranks such as 0,5,60-63",
    ("rehearse", "125M", "a100_8k", "--gpus", "6"): "= 4 does not divide the 6 processes (num_gpus); use 4 or 8",
    ("rehearse", "125M", "a100_8k", "--gpus", "12"): "--gpus 12: not a multiple of 8 GPUs per node; change it",
    ("train", "tiny", "save=own"): "save: own contains metrics.jsonl, which was not written by a run",
    ("evaluate", "run", "--lengths", "16", "-o", "own"): "--output: own/results.md exists and is not an earlier result",
    ("analyze", "run", "--lengths", "16", "-o", "own"): "--output: own/analysis.html exists and is not an earlier",
    ("analyze", "run", "--lengths", "16", "--only", "kernels", "-o", "own/data"): "own/data/kernels.csv exists and",
    ("report", "run", "-o", "own/analysis.html"): "--output: own/analysis.html exists and is not an earlier",
    ("sweep", "sweep.yml"): "sweep.output: own/results.md exists and is not an earlier result of this command",
    ("sweep", "sweep.yml", "sweep.output=own/runs"): "own/runs/rotary/seed_1234.yml exists and is not an earlier",
    ("import", "deep", "imported"): "deep/config.json: cannot be read as JSON (it is nested too deeply)",
    ("import", "lost", "imported"): "lost/latest: names 'global_step9', but this folder does not exist",
    ("import", "lost/long", "imported"): "lost/long/latest: names 'xxxxxxxx",
    (
        "sweep",
        "sweep.yml",
        f"sweep.variants={{{'x' * 300}: {{}}}}",
    ): "is also a folder name: use at most 255 characters",
    ("train", "x" * 300): f"{'x' * 100}…{'x' * 100}: cannot be used (File name too long)",
    ("train", "tiny", f"save={'x' * 300}"): "cannot be written to (File name too long)",
    ("evaluate", "x" * 300): "cannot be used (File name too long)",
    ("status", "x" * 300): "x: cannot be used (File name too long)",
    ("prepare", "x" * 300, "-o", "out"): "x: cannot be used (File name too long)",
    ("generate", "run", "-f", "x" * 300): "x: cannot be used (File name too long)",
    ("status", "nowhere"): "nowhere: no such folder",
    ("status", "tiny.yml"): "tiny.yml: is a file; expected a run's folder, or a folder of runs",
    ("evaluate", "tiny.yml"): "tiny.yml: is a file; expected a run's folder or one of its checkpoints/step_…",
    ("prepare", "text/1.txt", "-o", "out", "--column", "foo"): "error: --column: foo: no source has JSON lines",
    ("train", "tiny", r'save="a\nb"'): r"command line: save is 'a\nb'; folder names cannot contain line breaks",
    ("train", "tiny", "valid_data_paths=x"): "valid_data_paths is x; it must be a list, written [x]",
    ("train", "tiny", "train_iters", "=", "5"): "train_iters = 5: write key=value without spaces: train_iters=5",
    ("train", "tiny", "train_iters=", "5"): "train_iters= 5: write key=value without spaces: train_iters=5",
    ("train", "train_iters", "=5", "tiny"): "train_iters =5: write key=value without spaces: train_iters=5",
    ("train", "tiny", "train_iters=-1"): "command line: train_iters is -1; it must be at least 1",
    ("train", "tiny", "--dry-run", "save=/proc/a/b"): "save is /proc/a/b, which cannot be written to",
    ("train", "tiny", "train_iters=2020-01-01"): "train_iters is 2020-01-01; it must be an integer",
    ("status", "data"): "data: contains no run",
    ("nonsense",): "No such command 'nonsense'",
}


OWN = ("results.md", "metrics.jsonl", "analysis.html", "data/kernels.csv", "runs/rotary/seed_1234.yml")
"""Files of a user in the folder `own` whose names resemble ours."""


@pytest.fixture(scope="module")
def mistakes(corpus) -> dict[tuple[str, ...], list]:
    from megatron.checkpoint.trainer_state import TrainerState
    from megatron.config.load import load_config

    data = f"test_data_paths=[{corpus}/data/fox/test_text_document]"
    checkpoint = corpus / "run" / "checkpoints" / "step_0000004"
    load_config([corpus / "tiny.yml"], [data]).config.save(checkpoint / "config.yml")
    TrainerState(step=4, vocabulary={"size": 257, "name": "bytes"}).write(checkpoint)
    (checkpoint / "model.safetensors").touch()  # nobody reads it
    (corpus / "own" / "data").mkdir(parents=True)
    (corpus / "own" / "runs" / "rotary").mkdir(parents=True)
    for name in OWN:
        (corpus / "own" / name).write_text("what somebody wrote")
    (corpus / "sweep.yml").write_text(
        (corpus / "tiny.yml").read_text().replace("pos_emb: rotary\n", "")
        + data.replace("=", ": ")
        + "\nsweep:\n  output: own\n  variants:\n    rotary: {pos_emb: rotary}\n"
    )
    for run in ("a", "b/c"):
        (corpus / "several" / run / "checkpoints" / "step_0000004").mkdir(parents=True)
    (corpus / "deep").mkdir()
    (corpus / "deep" / "config.json").write_text('{"a":' * 200_000)
    (corpus / "lost" / "long").mkdir(parents=True)
    (corpus / "lost" / "latest").write_text("global_step9\n")
    (corpus / "lost" / "long" / "latest").write_text("x" * 100_000)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    return calls_without(("torch",), list(MISTAKES), corpus)


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_errors_are_one_line_with_exit_code_2_without_torch(corpus, mistakes, arguments):
    code, out, error = mistakes[arguments]
    errors = [line for line in error.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1, error
    assert errors[0].startswith("error: ")
    assert MISTAKES[arguments] in errors[0]
    assert not (corpus / "runs" / "none").exists()
    assert all((corpus / "own" / name).read_text() == "what somebody wrote" for name in OWN)
    assert not (corpus / "own" / "log.txt").exists()
    assert out == ""
    assert code == 2


def test_plan_does_not_import_torch(corpus):
    plan = ("plan", "125M", "kerple_log", "a100_512", "--gpus", "8", "--layouts", "3")
    found = calls_without(("torch",), [plan, (*plan, "--json")], corpus)
    (shown_code, shown, _), (code, text, notes) = found[plan], found[*plan, "--json"]
    assert (shown_code, code) == (0, 0)
    assert "assuming a vocabulary of 50257 tokens" in notes
    made = json.loads(text)
    layer, ends = 12 * 768**2 + 13 * 768, 2 * 50304 * 768 + 2 * 768  # GPT-2's vocabulary, separate output layer
    assert made["parameters"] == 12 * layer + ends + 24  # and KERPLE's two parameters per head
    assert len(made["layouts"]) == 3
    best = made["layouts"][0]
    assert best["memory"]["total"] < 0.9 * made["gpu_gib"] * 2**30
    assert f"zero_optimization.stage={best['keys']['zero_optimization.stage']}" in shown
    assert "162M parameters in bf16" in shown


def test_each_command_names_a_page_that_documents_it(corpus, mistakes):
    """Each command names a page that exists and documents the command."""
    calls = [(name, "--help") for name in COMMANDS]
    for (name, _), (_, text, _) in calls_without(("torch",), calls, corpus).items():
        (page,) = re.findall(r"More: (docs/\w+\.md)", text)
        assert re.search(rf"\./deepy\.py {name}\b", (ROOT / page).read_text()), name


def test_versions_are_read_without_importing_packages(tmp_path):
    import torch

    packages = ("torch", "deepspeed", "megatron.core", "transformers", "numpy")
    ((code, text, error),) = calls_without(packages, [("--version",)], tmp_path).values()
    assert (code, error) == (0, "")
    reported = dict(line.split(" ", 1) for line in text.splitlines())
    assert reported["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert {"farfield", "python", "deepspeed", "megatron-core", "device"} <= reported.keys()
    assert re.fullmatch(r"cpu \(\d+ cores\)|cuda \(\d+ × .+\)", reported["device"])


def test_gpt_neox_syntax_is_accepted(tmp_path, corpus, inside):
    data = tmp_path / "data" / "python"
    data.mkdir(parents=True)
    for path in (corpus / "data/fox").iterdir():
        (data / path.name).symlink_to(path)
    done = inside("train.py", "-d", "configs", "162M.yml", "local_setup.yml", "--dry-run", "seed=7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^seed: 7$", done.stdout, re.MULTILINE)
    assert "train_data_paths: [data/python/train_text_document]" in done.stdout


def test_dry_run_output_loads_to_the_same_config(tmp_path, corpus, inside):
    first = inside("train", "tiny.yml", "pos-emb=kerple_log", "save=runs/x", "--dry-run", cwd=corpus)
    assert "note: pos_emb rotary (tiny.yml:5) replaced by kerple_log (command line)" in first.stderr
    (tmp_path / "config.yml").write_text(first.stdout)
    second = inside("train", str(tmp_path / "config.yml"), "--dry-run", cwd=corpus)
    assert second.stdout == first.stdout
    rows, *notes = (line for line in second.stderr.splitlines() if not line.startswith("note: checking the data"))
    assert rows.startswith("note: attention_mask causal: ")
    assert notes[0] == "note: parameters:"
    assert notes[2].split() == ["note:", "decayed", "AdamW", "0.1", "9,216"]
    assert not any("replaced" in note for note in notes)


def test_dry_run_reports_invalid_configurations(tmp_path, inside):
    done = inside("train", "162M", "--dry-run", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")  # `--dry-run > run.yml` writes nothing misleading
    assert done.stderr.startswith("error: no data to train on")
    keys = ("train_data_paths=[text]", "pos_emb=none", "precision=bf16", "device=cpu", "save=null")
    done, trained = (inside("train", "162M", *keys, *flags, cwd=tmp_path) for flags in (["--dry-run"], []))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(
        "error: command line: train_data_paths: no dataset text: text.bin and text.idx are missing"
    )
    assert done.stderr.splitlines()[-1] == trained.stderr.splitlines()[-1]


def test_several_problems_are_several_lines(tmp_path, inside):
    done = inside("train", "162M", "num_layrs=3", "norm=nrom", "seed=x", cwd=tmp_path)
    assert done.returncode == 2
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "] * 3


def test_tasks(tmp_path, inside):
    assert re.findall(r"^\w+", inside("tasks", "word_problem", cwd=tmp_path).stdout, re.MULTILINE) == [
        "a5_word_problem",
        "s5_word_problem",
    ]
    (found,) = json.loads(inside("tasks", "mqar", "--json", cwd=tmp_path).stdout)
    assert found["options"]["pairs"] == {"default": 8, "meaning": "number of key-value pairs, and of queries"}
    shown = inside("tasks", "ngram", cwd=tmp_path).stdout
    assert "query: suffix position of the given letters" in shown
    assert "Repeat After Me" in shown


def test_positions(tmp_path, inside):
    done = inside("positions", "--json", cwd=tmp_path)
    records = json.loads(done.stdout)
    assert [r["name"] for r in records if r["kind"] == "encoding"] == list_encodings()
    assert [r["name"] for r in records if r["kind"] == "processor"] == list_processor_values()[1:]
    assert {"formula", "parameters", "options", "source"} <= set(records[0])
    table = inside("positions", cwd=tmp_path).stdout
    assert all(record["name"] in table for record in records)
    assert "rnope_swa RNoPE-SWA (Yang et al. 2025, Rope to Nope and Back Again, arXiv 2501.18795): three" in table
    assert re.findall(r"^\w+", inside("positions", "rope", cwd=tmp_path).stdout, re.MULTILINE) == [
        "encodings",
        "rotary",
        "rotary_local",
    ]
    found = json.loads(inside("positions", "DAPE", "--json", cwd=tmp_path).stdout)
    assert [record["name"] for record in found] == ["cdape", "dape"]
    assert "[num_buckets, H]" in table  # square brackets are text, not markup


SURROUNDINGS = (
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    {"PYTHONIOENCODING": "latin-1", "COLUMNS": "0"},
    {"PYTHONOPTIMIZE": "2", "COLUMNS": "-1"},
)


@pytest.mark.parametrize("surroundings", SURROUNDINGS, ids=str)
def test_commands_print_on_any_terminal(surroundings, tmp_path):
    """Commands print on any terminal: encodings without our characters, zero width, no docstrings.

    One process runs all of them, because these settings are fixed at its start.
    """
    run = tmp_path / "ré–sumé"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 3, "loss": 2.5}\n')
    record = {"method": "α–β", "train_length": 64, "length": 128, "protocol": "last", "perplexity": 5.5, "tokens": 4096}
    (tmp_path / "results.json").write_text(json.dumps([record | {"seed": 1}]))
    expected = {
        ("status", "."): b"2.5000",
        ("report", "."): b"5.50",
        ("keys", "rotary"): b"rotary",
        ("train", "--help"): b"Files are merged from left to right",
        ("keys", "--markdown"): b"# Configuration",
        ("plan", "125M", "--gpus", "1", "--layouts", "1"): b"GiB",
    }
    if "LC_ALL" in surroundings:  # these import torch
        expected |= {("positions",): b"kerple_log", ("positions", "--json"): b'"name": "alibi"'}
    calls = list(expected)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "import deepy\n"
        f"for call in {calls!r}:\n"
        "    sys.argv = ['./deepy.py', *call]\n"
        "    print('<', flush=True)\n"
        "    code = deepy.main()\n"
        "    print('>', code, flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, **surroundings}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(rb"<\n(.*?)\n?> (\d)\n", done.stdout, re.DOTALL)
    assert [int(code) for _, code in shown] == [0] * len(calls), done.stderr
    for call, (text, _) in zip(calls, shown, strict=True):
        assert expected[call] in text, call


def test_keys(tmp_path, inside):
    done = inside("keys", "rotary-pct", cwd=tmp_path)
    assert "pos_emb_options.fraction" in done.stdout
    for wanted, reported in (
        ("no such key", ""),
        ("seq_lenght", "; did you mean seq_length"),
        ("num-layrs", "; did you mean num_layers"),
    ):
        missing = inside("keys", wanted, cwd=tmp_path)
        assert missing.returncode == 2
        assert missing.stderr.startswith(f"error: no key contains {wanted!r}{reported}")


def test_keys_are_readable_in_80_columns(tmp_path, inside):
    """Keys are readable in 80 columns: each has its own line, and its description has nearly the full width."""
    lines = inside("keys", "zero", COLUMNS="80", cwd=tmp_path).stdout.splitlines()
    found = find_keys("zero")
    assert [line for line in lines if line and not line.startswith(" ")] == [row[0] for row in found]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for name, default, values, meaning in found:
        facts = {"default": default, "values": values, "meaning": meaning}
        expected = " ".join([name, *(f"{label} {fact}" for label, fact in facts.items() if fact)])
        assert " ".join(expected.split()) in text


def test_prepare_selects_files_by_suffix(tmp_path, inside):
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.rs", "c.txt"):
        (tmp_path / "src" / name).write_text(f"the text of {name}")
    done = inside("prepare", "src", "--suffixes", ".py, .rs", "-o", "code", "--split", "none", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\ncorpus code: tokenizing (" in done.stdout  # progress, also without a terminal
    assert json.loads((tmp_path / "code" / "corpus.json").read_text())["splits"]["all"]["documents"] == 2
    wrong = inside("prepare", "src", "--suffixes", ".py,rs", "-o", "more", cwd=tmp_path)
    assert wrong.stdout == ""
    assert (wrong.returncode, wrong.stderr) == (2, "error: --suffixes: 'rs' must start with a dot, for example .txt\n")


OPTIONS = {
    "pos_emb: fire\npos_emb_options:\n  c_start: 0.5\n  width: 0\n": "own.yml:4: pos_emb: option width of fire is 0",
    "pos_emb: sinusoidal\npos_emb_per_layer: true\n": "own.yml:2: pos_emb_per_layer: true, but sinusoidal adds to",
    "\nrandomized_positions: 40\npos_emb: learned\n": "own.yml:2: randomized_positions: 40, but learned positions end",
}


@pytest.mark.parametrize("text", OPTIONS)
def test_errors_of_methods_name_file_and_line(corpus, tmp_path, inside, text):
    (tmp_path / "own.yml").write_text(text)
    done = inside("train", "tiny", str(tmp_path / "own.yml"), "--dry-run", cwd=corpus)
    assert done.returncode == 2
    assert f"error: {tmp_path}/{OPTIONS[text]}" in done.stderr
    trained = inside("train", "tiny", str(tmp_path / "own.yml"), f"save={tmp_path / 'run'}", cwd=corpus)
    assert (trained.returncode, (tmp_path / "run").exists()) == (2, False)
    assert f"error: {tmp_path}/{OPTIONS[text]}" in trained.stderr


def test_broken_pipe_is_silent(tmp_path):
    command = f"{sys.executable} {DEEPY} keys --markdown | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "# Configuration"
    assert done.stdout.splitlines()[1] in ("0", "141")  # 0 if head was slower than the whole page


def test_unexpected_error_is_one_line_and_the_traceback_is_in_a_file(tmp_path, monkeypatch, inside):
    def broken(pattern: str) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr("megatron.config.reference.find_keys", broken)
    done = inside("keys", cwd=tmp_path)
    assert done.returncode == 1
    found = re.fullmatch(r"error: ZeroDivisionError: by zero; the traceback is in (\S+)\n", done.stderr)
    assert found, done.stderr
    log = Path(found.group(1))
    assert "Traceback" in log.read_text()
    log.unlink()


@pytest.mark.parametrize(
    "arguments",
    ["train shut/c.yml", "evaluate shut/run", "evaluate run", "status shut/run", "prepare shut/x.txt -o out",
     "import shut/model new", "report shut/results.json", "generate shut/run -p a", "checkpoints run", "export run new",
     "sweep shut/s.yml", "prepare text -o out --tokenizer HFTokenizer --vocab-file shut/x", "prepare text -o shut/out",
     "train tiny train_data_paths=[shut/x]", "train tiny save=shut/run", "import shut new"],
)  # fmt: skip
def test_unreadable_files_are_reported_as_forbidden_not_missing(corpus, mistakes, inside, arguments):
    (corpus / "shut").mkdir(exist_ok=True)
    with unprivileged(), unreadable(corpus / "shut"), unreadable(corpus / "run" / "checkpoints"):
        done = inside(*arguments.split(), cwd=corpus)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if not line.startswith("note: "))
    assert re.match(r"error: .*(shut|run/checkpoints).*(Permission denied|not readable)", line)
    assert "traceback" not in line


@pytest.fixture(scope="module")
def trained(corpus) -> subprocess.CompletedProcess[str]:
    """Run trained by one process, from a working directory outside the project."""
    return deepy("train", "tiny", "save=runs/one", cwd=corpus)


def test_train_and_evaluate_print_only_our_output(corpus, trained, inside):
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""
    waits = (IMPORTING, "building the model")  # reported if slow
    first, rows, epochs, *lines, last = (line for line in trained.stdout.splitlines() if not line.startswith(waits))
    assert lines
    assert rows.startswith("attention_mask causal: ")
    assert epochs.startswith("training text: ")
    assert all(line.startswith("step ") for line in lines), trained.stdout
    assert " parameters on " in first
    assert last == "saved runs/one/checkpoints/step_0000004; next: ./deepy.py evaluate runs/one --data TEXT"
    run = corpus / "runs" / "one"
    assert (run / "checkpoints" / "step_0000004" / "manifest.json").exists()
    log = (run / "log.txt").read_text()
    assert all(line in log for line in (first, *lines, last))
    assert not re.search("warning|error", log, re.IGNORECASE), log  # would look like a broken installation
    # The command suggested in the output, with a text.
    command = last.split("./deepy.py ")[1].replace("TEXT", "text/1.txt").split()
    evaluated = inside(*command, "--lengths", "16,32", "--windows", "2", cwd=corpus)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "rotary" in evaluated.stdout
    assert "runs/one: step_0000004, checksums match" in evaluated.stdout
    assert json.loads((run / "results.json").read_text())[0]["length"] == 16


def test_a_run_keeps_the_configuration_file_in_its_folder(corpus, inside):
    own = corpus / "exp1" / "config.yml"
    own.parent.mkdir()
    own.write_text(
        f"# as in the appendix\n{(corpus / 'tiny.yml').read_text()}train_iters: 2  # enough\n".replace(
            "train_iters: 4\n", ""
        )
    )
    before = own.read_text()
    done = inside("train", "exp1/config.yml", "save=exp1", cwd=corpus)
    assert done.returncode == 0, done.stderr
    assert own.read_text() == before
    assert "exp1/config.yml was not written by a run and is left unchanged; resolved configuration: exp1/config.r" in (
        done.stdout
    )
    shown = json.loads(inside("status", "exp1", "--json", cwd=corpus).stdout)
    assert [(each["state"], each["train_iters"]) for each in shown] == [("finished", 2)]
    again = inside("train", "exp1/config.yml", "load=exp1", "save=exp1", "train_iters=4", cwd=corpus)
    assert again.returncode == 0, again.stderr
    assert (own.read_text(), "train_iters: 4" in (own.parent / "config.resolved.yml").read_text()) == (before, True)


def test_generate_writes_text_to_standard_output_and_the_rest_to_standard_error(corpus, trained, inside):
    made = inside("generate", "runs/one", "-p", "The quick", "--maximum-tokens", "5", "--temperature", "0", cwd=corpus)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("\n")
    (line,) = made.stderr.splitlines()
    assert re.fullmatch(
        r"9 prompt tokens, first new token after [0-9.]+ s; [1-5] new tokens(, [0-9,]+ tokens/s)?", line
    )
    again = inside("generate", "runs/one", "-p", "The quick", "--maximum-tokens", "5", "--top-k", "1", cwd=corpus)
    assert again.stdout == made.stdout


def interrupted(corpus: Path, ranks: int) -> dict[int, float]:
    """Losses of the steps until Ctrl-C on a terminal, which saves and exits with 130.

    The command and its ranks are forks, which saves the imports.
    """
    main, side = pty.openpty()
    save, errors = f"runs/interrupted{ranks}", corpus / f"errors{ranks}.txt"
    words = ("train", "tiny", "train_iters=100000", f"num_gpus={ranks}", f"save={save}")
    terminal = Path(os.ttyname(side))
    process = Forked(DEEPY, *words, cwd=corpus, output=terminal, errors=errors, env={"TERM": "xterm"})
    seen = b""
    deadline = time.time() + 90
    try:
        while b"step " not in seen and time.time() < deadline and process.poll() is None:
            if select.select([main], [], [], 0.1)[0]:
                seen += os.read(main, 4096)
        os.close(side)
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the whole group
        while time.time() < deadline + 60:
            try:
                chunk = os.read(main, 4096)
            except OSError:  # the other end is closed
                break
            if not chunk:
                break
            seen += chunk
        code = process.wait(60)
    finally:
        process.kill()
        os.close(main)
    error = errors.read_text()
    assert code == 130, error
    assert "Traceback" not in error + seen.decode(errors="replace")
    assert "stopping after this step; repeat to stop immediately" in seen.decode(errors="replace")
    assert list((corpus / save / "checkpoints").glob("step_*/manifest.json"))
    metrics = (corpus / save / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, metrics)}


def test_interrupts_on_a_terminal_and_losses_of_two_processes(corpus):
    one, two = interrupted(corpus, 1), interrupted(corpus, 2)
    common = sorted(one.keys() & two.keys())[:2]  # rounding errors grow with the steps
    assert common
    assert [two[step] for step in common] == pytest.approx([one[step] for step in common], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("evaluate", "run", "-o", ""), "-o"),
        (("evaluate", "run", "--output="), "--output"),
        (("evaluate", "run", "--data", ""), "--data"),
        (("evaluate", ""), "an argument"),
        (("report", "run", "--output", ""), "--output"),
        (("prepare", "text.txt", "-o", ""), "-o"),
        (("export", "run", ""), "an argument"),
        (("train", "162M", "--conf-dir", ""), "--conf-dir"),
        (("generate", "run", "--stop", ""), "--stop"),
        (("status", ""), "an argument"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(tmp_path, inside, words, name):
    done = inside(*words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {name} is empty; give a value or omit it\n")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_prompt_is_accepted(tmp_path, inside):
    done = inside("generate", "run", "--prompt", "", cwd=tmp_path)
    assert "run: no such" in done.stderr


def test_a_folder_with_a_non_utf_8_name_is_shown(tmp_path, inside):
    name = os.fsdecode(b"caf\xe9")
    record = {"method": "rotary", "train_length": 64, "length": 128, "protocol": "last", "perplexity": 5.5}
    (tmp_path / name).mkdir()
    (tmp_path / name / "results.json").write_text(json.dumps([record | {"seed": 1, "tokens": 4096}]))
    (tmp_path / name / "metrics.jsonl").write_text('{"kind": "train", "step": 7, "loss": 2.5}\n')
    (tmp_path / name / ".lock").touch()
    assert "2.5" in inside("status", name, cwd=tmp_path).stdout
    for suffix in (".html", ".md", ".tex"):
        done = inside("report", name, "-o", f"{name}{suffix}", cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert "5.5" in (tmp_path / f"{name}{suffix}").read_text(encoding="utf-8")
