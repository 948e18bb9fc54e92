"""Command line from outside: output, streams, exit codes, and imports."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import DEEPY, ROOT, calls_without, deepy
from forked import Forked

from megatron.config.method_names import list_processor_values
from megatron.config.reference import find_keys
from megatron.position.catalog import list_encodings
from megatron.utils.progress import IMPORTING

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
    *("checkpoints", "status", "show-batch", "keys"),
)


@pytest.fixture(scope="module")
def corpus(fox: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of `fox`, in which tests train."""
    return shutil.copytree(fox, tmp_path_factory.mktemp("cli") / "fox")


def test_help_does_not_import_torch(tmp_path):
    calls = [("--help",), (), *((command, "--help") for command in COMMANDS)]
    found = calls_without(("torch", "numpy", "deepspeed", "matplotlib"), calls, tmp_path)
    for arguments, (code, _, error) in found.items():
        assert code == (0 if arguments else 2)
        assert error == ""


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


def test_each_command_names_a_page_that_documents_it(corpus):
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
    assert not re.search(r"^    .* $", table, re.MULTILINE)  # wrapped facts are not padded
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
    assert "\ncorpus code: importing PyTorch" in done.stdout  # progress, also without a terminal
    assert json.loads((tmp_path / "code" / "corpus.json").read_text())["splits"]["all"]["documents"] == 2
    wrong = inside("prepare", "src", "--suffixes", ".py,rs", "-o", "more", cwd=tmp_path)
    assert wrong.stdout == ""
    message = "error: --suffixes: 'rs' must be a dot and at least one more character, for example .txt\n"
    assert (wrong.returncode, wrong.stderr) == (2, message)


def test_broken_pipe_is_silent(tmp_path):
    command = f"{sys.executable} {DEEPY} keys --markdown | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines()[0] == "# Configuration"
    assert done.stdout.splitlines()[1] in ("0", "141")  # 0 if head was slower than the whole page


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
    evaluated = inside(*command, "--lengths", "16,32", "--num-windows", "2", cwd=corpus)
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
    made = inside("generate", "runs/one", "-p", "The quick", "--max-new-tokens", "5", "--temperature", "0", cwd=corpus)
    assert made.returncode == 0, made.stderr
    assert made.stdout.endswith("\n")
    (line,) = made.stderr.splitlines()
    assert re.fullmatch(
        r"9 prompt tokens, first new token after [0-9.]+ s; [1-5] new tokens(, [0-9,]+ tokens/s)?", line
    )
    again = inside("generate", "runs/one", "-p", "The quick", "--max-new-tokens", "5", "--top-k", "1", cwd=corpus)
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
