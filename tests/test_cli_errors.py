"""Errors of the command line: one line on standard error, exit code 2, and nothing written."""

import re
import shutil
from pathlib import Path

import pytest
from command_line import ROOT, calls_without
from permissions import unprivileged, unreadable

MISTAKES = {
    ("train", "no_such_file"): "no_such_file: no such configuration file",
    ("train", "125M", "num_layrs=3"): "unknown key 'num_layrs'; did you mean num_layers",
    ("train", "125M", "hidden_size=7"): "hidden_size",
    ("train", "125M", "precision=bf16"): "no data to train on",
    (
        "train",
        "162M",
        "local_setup",
        "device=cuda",
        "num_gpus=99",
    ): "train_batch_size 32 is not train_micro_batch_size_per_gpu 1 ×",
    ("train", "tiny", "num_gpus=2", "train_data_paths=[data/none]", "save=runs/none"): "no dataset data/none",
    ("evaluate",): "error: missing RUN…; usage: ./deepy.py evaluate [OPTIONS] RUN…",
    ("prepare", "shakespeare"): "error: missing --output; usage: ./deepy.py prepare [OPTIONS] SOURCE… -o FOLDER",
    ("prepare", "shakespear", "-o", "out"): "shakespear: no such file or folder; did you mean shakespeare? a source is",
    ("prepare", "txt/0.txt", "-o", "out"): "txt/0.txt: no such file or folder; did you mean text/0.txt? a source is",
    ("evaluate", "run", "--lenghts", "1x"): "error: unknown option --lenghts; did you mean --lengths?",
    ("train", "tiny", "--train-iters=5"): "--train-iters; keys have no dashes before them: train_iters=VALUE",
    ("plan", "125M", "--optimizer.params.lr", "1"): "keys have no dashes before them: optimizer.params.lr=VALUE",
    ("report", "run", "--yes"): "error: unknown option --yes; ./deepy.py report --help lists the options",
    ("generate", "run", "--top-k", "many"): "error: --top-k is many; it must be an integer",
    ("generate", "run", "--top-k"): "error: --top-k has no value; give one",
    ("evaluate", "run", "--find-key-tokens=1"): "error: --find-key-tokens takes no value; omit the value",
    ("keys", "a", "b"): "error: unexpected argument b; usage: ./deepy.py keys [OPTIONS] [TEXT]",
    ("evalute", "run"): "error: unknown command 'evalute'; did you mean evaluate?",
    ("evaluate", "run", "--window", "nonsense"): "--window is nonsense; it must be an integer",
    ("evaluate", "run", "--num-windows", "0"): "--num-windows is 0; it must be at least 1",
    ("--window", "nonsense"): "--window; place it after its command: ./deepy.py evaluate … --window nonsense",
    ("evaluate", "nowhere"): "nowhere: no such folder",
    ("evaluate", "./data"): "error: data: contains no checkpoint; give a run's folder",
    ("analyze", "lengths/"): "error: lengths: contains no checkpoint; give a run's folder",
    ("generate", "seed", "a", "--seed", "1"): "error: seed: no such folder; did you mean several? give",
    ("evaluate", "rnu"): "rnu: no such folder; did you mean run? give a run's folder",
    ("generate", "run/checkpoint/step_0000005", "-p", "a"): "did you mean run/checkpoints/step_0000004? give",
    ("status", "Rum"): "Rum: no such folder; did you mean run?",
    ("import", "dep", "imported"): "dep: no such folder; did you mean deep?",
    (
        "evaluate",
        "several",
    ): "this folder has no checkpoint but contains runs that do; choose one of: several/a several/b/c",
    ("generate", "several/b", "-p", "a"): "but contains runs that do; choose one of: several/b/c",
    ("positions", "kerple_logg"): "did you mean kerple_log or kerple_log3?",
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
    (
        "evaluate",
        "run",
        "--lengths",
        "16",
        "--data",
        "nowhere",
    ): "nowhere: no such file or folder; --data expects a file (.txt",
    (
        "evaluate",
        "run",
        "--lengths",
        "16",
        "--data",
        "text/1.tx",
    ): "text/1.tx: no such file or folder; did you mean text/1.txt?",
    ("evaluate", "run", "--lengths", "16", "-o", "tiny.yml"): "--output is tiny.yml, which is a file; name a folder",
    (
        "train",
        "tiny",
        "hostfile=host",
    ): "error: command line: hostfile: no such file: host; to train on this machine",
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
    ("report", "damaged"): "damaged/results.json: not JSON (",
    ("report", "damaged/results.jsn"): "damaged/results.jsn: no such file; did you mean damaged/results.json?",
    ("evaluate", "run", "--num-fewshot", "0"): "--num-fewshot requires --tasks",
    ("evaluate", "run", "--tasks", "piqa", "--num-windows", "3"): "--num-windows applies to texts only, but --tasks is",
    ("analyze",): "no run given; give a run folder, or a configuration with --config",
    ("analyze", "run", "--only", "kernel"): "--only: unknown analysis 'kernel'; did you mean kernels? choose from",
    ("analyze", "run", "--layers", "a"): "error: item 1 of --layers is 'a'; it must be an integer",
    ("analyze", "run", "--lengths", "16,99999999"): "too few for the largest length; 99,999,999",
    ("analyze", "run", "--num-windows", "0"): "--num-windows is 0; it must be at least 1",
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
    ("generate", "run", "-p", "a", "--maximum-tokens", "0"): "error: --maximum-tokens is 0; it must be at least 1",
    ("generate", "run", "-p", "a", "--max-new-tokens=0"): "error: --max-new-tokens is 0; it must be at least 1",
    ("evaluate", "run", "--tasks", "piqa", "--windows", "3"): "error: --windows applies to texts only, but --tasks is",
    ("sweep", "sweep.yml", "--member", "-1"): "error: --member is -1; it must be at least 0",
    ("generate", "run", "-p", "a", "--top-p", "0"): "error: --top-p is 0.0; it must be greater than 0",
    ("generate", "run", "-p", "a", "--temperature", "-1"): "--temperature is -1; it must be at least 0",
    ("generate", "run", "-p", "a", "--precision", "fp8"): "error: --precision is fp8; choose from auto",
    ("generate", "run", "-p", "a", "--backend", "fast"): "--backend is fast; choose from auto, eager",
    ("generate", "run", "-p", "a", "--stop", ""): "--stop is empty",
    ("generate", "run", "--file", "nowhere"): "nowhere: no such file; --file expects a text",
    ("sweep", "no_such_file"): "no_such_file: no such configuration file",
    ("plan", "125M", "--gpu", "a200"): "--gpu a200: unknown GPU; did you mean a800 or b200 or h200? choose from a10,",
    ("plan", "125M", "--gpus", "0"): "--gpus is 0; it must be at least 1",
    (
        "rehearse",
        "125M",
        "--gpu",
        "h300",
    ): "--gpu h300: unknown GPU; did you mean h100 or h200 or h800? choose from a100",
    ("rehearse", "125M", "--ranks", "first"): "--ranks 'first': it must be roles, all, or ranks such as 0,5,60-63",
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
    ): "variant names become folder names; use at most 255 characters",
    ("train", "x" * 300): f"{'x' * 100}…{'x' * 100}: cannot be used (File name too long)",
    ("train", "tiny", f"save={'x' * 300}"): "cannot be written to (File name too long)",
    ("evaluate", "x" * 300): "cannot be used (File name too long)",
    ("status", "x" * 300): "x: cannot be used (File name too long)",
    ("prepare", "x" * 300, "-o", "out"): "x: cannot be used (File name too long)",
    ("generate", "run", "-f", "x" * 300): "x: cannot be used (File name too long)",
    ("show-batch", "begun", "3", "9999"): "step 9999 is after the last step; batches are known up to step 4",
    ("status", "nowhere"): "nowhere: no such folder",
    ("status", "tiny.yml"): "tiny.yml: is a file; it must be a run's folder, or a folder of runs",
    ("evaluate", "tiny.yml"): "tiny.yml: is a file; give a run's folder or one of its checkpoints/step_…",
    ("prepare", "text/1.txt", "-o", "out", "--column", "foo"): "error: --column: foo: no source has JSON lines",
    ("train", "tiny", r'save="a\nb"'): r"command line: save is 'a\nb'; folder names cannot contain line breaks",
    ("train", "tiny", "valid_data_paths=x"): "valid_data_paths is 'x'; it must be a list, written [x]",
    ("train", "tiny", "train_iters", "=", "5"): "train_iters = 5: write key=value without spaces: train_iters=5",
    ("train", "tiny", "train_iters=", "5"): "train_iters= 5: write key=value without spaces: train_iters=5",
    ("train", "train_iters", "=5", "tiny"): "train_iters =5: write key=value without spaces: train_iters=5",
    ("train", "tiny.yml", "=5"): "=5: there is no key before the equals sign; write KEY=VALUE, such as train_iters=3",
    ("train", "tiny", "train_iters=-1"): "command line: train_iters is -1; it must be at least 1",
    ("train", "tiny", "num_layers="): "command line: num_layers is empty; write num_layers=VALUE, or num_layers=null",
    ("train", "tiny", "train_iters=0"): "command line: train_iters, the number of optimizer steps, is 0; it must be at",
    ("train", "tiny", "device=cuda"): "command line: device is cuda, but this machine has no CUDA device",
    ("train", "tiny", "harness.metadata.tokenizer=x"): "is set as a whole: harness.metadata='{tokenizer: x}'",
    ("train", "tiny", "harness.tasks=pqia"): "command line: harness.tasks: unknown task 'pqia'; did you mean",
    ("evaluate", "run", "--tasks", "pqia"): "error: --tasks: unknown task 'pqia'; did you mean",
    ("plan", "125M", "--gpu", "v1000"): "--gpu v1000: unknown GPU; did you mean v100-16gb or v100-32gb?",
    ("evaluate", "run", "--lengths", "1.3x"): "--lengths: 1.3x is ",
    ("generate", "run", ""): "an argument is empty; give a value or omit it; write --prompt '' for an empty text",
    ("export", "run"): "missing folder to create: ./deepy.py export RUN -o FOLDER",
    ("export", "run", "a", "-o", "b"): "the folder is given twice: a and --output b; omit one",
    ("import", "run"): "missing folder to create: ./deepy.py import SOURCE -o RUN",
    ("train", "tiny", "--dry-run", "save=/proc/a/b"): "save is /proc/a/b, which cannot be written to",
    ("train", "tiny", "tensorboard_dir=/proc/t"): "error: command line: tensorboard_dir is /proc/t, which cannot be w",
    ("train", "tiny", "--dry-run", "data_cache=/proc/d"): "error: command line: data_cache is /proc/d, which cannot be",
    (
        "sweep",
        "sweep.yml",
        "sweep.output=swept",
        "sweep.corpus={sources: [text], folder: /proc/c}",
    ): "error: sweep.corpus.folder is /proc/c, which cannot be written to (",
    ("train", "tiny", "train_iters=2020-01-01"): "train_iters is '2020-01-01'; it must be an integer",
    ("status", "data"): "data: contains no run",
    ("train", "tiny", f"save={ROOT}/megatron/utils"): "megatron/utils, among Farfield's own code; name another folder",
    ("evaluate", "run", "-o", f"{ROOT}/farfield/x"): "farfield/x, among Farfield's own code; name another folder",
    ("import", "deep", "/proc/e"): "error: --output is /proc/e, which cannot be written to (",
    ("prepare", "text", "-o", "/proc/c"): "error: --output is /proc/c, which cannot be written to (",
    ("prepare", "text", "-o", "tiny.yml/c"): "error: --output is tiny.yml/c, but tiny.yml is a file; name a folder",
    ("report", "run", "-o", "/proc/x.md"): "error: --output is /proc/x.md, which cannot be written to (",
    ("report", "run", "-o", "tiny.yml/x.md"): "error: --output is tiny.yml/x.md, but tiny.yml is a file; name a file",
    ("report", "run", "--figure", "/proc/x.pdf"): "error: --figure is /proc/x.pdf, which cannot be written to (",
    ("analyze", "run", "-o", "/proc/x"): "error: --output is /proc/x, which cannot be written to (",
    ("evaluate", "run", "-o", "/proc/x"): "error: --output is /proc/x, which cannot be written to (",
    ("export", "run", "-o", "/proc/e"): "error: --output is /proc/e, which cannot be written to (",
    ("export", "run", "-o", "tiny.yml"): "error: --output is tiny.yml, which is a file; name a folder",
    ("export", "run", "-o", "text"): "error: text: is not empty; choose another folder",
    ("export", "data", "-o", "e"): "error: data: contains no checkpoint",
    ("export", "run", "-o", "e", "--shard", "big"): "error: --shard is 'big'; it must be a size with its unit, such as",
    ("prepare", "own/LICENSE", "-o", "out"): "error: own/LICENSE: it has no suffix; the suffix must be one of ",
    ("prepare", "text", "-o", "out", "--suffixes", "."): "error: --suffixes: '.' must be a dot and at least one more",
    ("analyze", "--config", "tiny.yml"): "error: the page of a configuration needs --output FOLDER",
    ("evaluate", "run", "--tasks", "piqa", "--data", "data/fox"): "error: --data applies to texts only, but --tasks is",
    ("export", "--refresh", "/proc/self"): "error: RUN is /proc/self, which cannot be written to (",
    ("evaluate", "exported"): "or import it: ./deepy.py import exported -o RUN",
    ("generate", "exported", "a"): "exported: is a model folder of transformers (config.json), not a run; give the run",
    ("evaluate", "foreign/step_0000003"): "foreign/step_0000003: is not a checkpoint of Farfield (no config.yml)",
    ("train", "tiny", "load=foreign/step_0000003"): "command line: load: foreign/step_0000003: is not a checkpoint of",
    ("nonsense",): "error: unknown command 'nonsense'; choose from train, plan, rehearse,",
}

OWN = ("results.md", "metrics.jsonl", "analysis.html", "data/kernels.csv", "runs/rotary/seed_1234.yml")
"""Files of a user in the folder `own` whose names resemble ours."""


@pytest.fixture(scope="module")
def corpus(fox: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of `fox`, which the fixture `mistakes` changes."""
    return shutil.copytree(fox, tmp_path_factory.mktemp("mistakes") / "fox")


@pytest.fixture(scope="module")
def mistakes(corpus) -> dict[tuple[str, ...], list]:
    from megatron.checkpoint.trainer_state import TrainerState
    from megatron.config.load import load_config

    data = f"test_data_paths=[{corpus}/data/fox/test_text_document]"
    checkpoint = corpus / "run" / "checkpoints" / "step_0000004"
    config = load_config([corpus / "tiny.yml"], [data]).config
    for run in (checkpoint, corpus / "run", corpus / "begun"):
        run.mkdir(parents=True, exist_ok=True)
        config.save(run / "config.yml")
    TrainerState(step=4, vocabulary={"size": 257, "name": "bytes"}).write(checkpoint)
    (checkpoint / "model.safetensors").touch()  # nobody reads it
    (corpus / "own" / "data").mkdir(parents=True)
    (corpus / "own" / "runs" / "rotary").mkdir(parents=True)
    (corpus / "own" / "LICENSE").touch()
    for name in OWN:
        (corpus / "own" / name).write_text("what somebody wrote")
    (corpus / "sweep.yml").write_text(
        (corpus / "tiny.yml").read_text().replace("pos_emb: rotary\n", "")
        + data.replace("=", ": ")
        + "\nsweep:\n  output: own\n  variants:\n    rotary: {pos_emb: rotary}\n"
    )
    for run in ("a", "b/c"):
        (corpus / "several" / run / "checkpoints" / "step_0000004").mkdir(parents=True)
    for folder in ("deep", "damaged", "lengths"):
        (corpus / folder).mkdir()
    for file in ("exported/config.json", "foreign/step_0000003/weights.pt"):
        (corpus / file).parent.mkdir(parents=True)
        (corpus / file).write_text("{}")
    (corpus / "damaged" / "results.json").write_text('[{"method": "a", ')
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
    assert not (corpus / "swept").exists()
    assert all((corpus / "own" / name).read_text() == "what somebody wrote" for name in OWN)
    assert not (corpus / "own" / "log.txt").exists()
    assert out == ""
    assert code == 2


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


@pytest.mark.parametrize(
    ("file", "arguments"),
    [
        ("corpus.json", "train tiny"),
        ("train_text_document.idx", "train tiny --dry-run"),
        ("corpus.json", "prepare text -o data/fox"),
        ("train_text_document.idx", "prepare text -o data/fox"),
    ],
)
def test_a_corpus_file_that_may_not_be_read_is_not_called_damaged(corpus, mistakes, inside, file, arguments):
    """A message must not advise to rebuild it."""
    with unprivileged(), unreadable(corpus / "data" / "fox" / file):
        done = inside(*arguments.split(), cwd=corpus)
    assert done.returncode == 2
    assert re.search(rf"^error: data/fox/{file}: cannot be .*Permission denied\)?$", done.stderr, re.M), done.stderr


@pytest.mark.parametrize(
    ("folder", "arguments", "says"),
    [
        ("run", "evaluate run --lengths 16", r"the default of --output is run, which {denied}; name another folder"),
        (
            "run",
            "analyze run --lengths 16",
            r"the default of --output is .*/run/analysis, which {denied}; name another",
        ),
        ("run", "checkpoints run --keep 1", r"RUN is run, which {denied}; no checkpoint was deleted"),
        (
            "run/checkpoints",
            "checkpoints run --keep 1",
            r"RUN is run, whose folder of checkpoints is run/checkpoints, which {denied}; no checkpoint was deleted",
        ),
        (
            "run/checkpoints",
            "train tiny save=run load=run",
            r"command line: save is run, whose folder of checkpoints is run/checkpoints, which {denied}; name another",
        ),
    ],
)
def test_a_run_that_cannot_be_written_to_is_an_error_before_the_work(corpus, mistakes, inside, folder, arguments, says):
    (corpus / folder).chmod(0o555)
    try:
        with unprivileged():
            done = inside(*arguments.split(), cwd=corpus)
    finally:
        (corpus / folder).chmod(0o755)
    assert done.returncode == 2
    says = says.replace("{denied}", r"cannot be written to \(Permission denied\)")
    assert re.match(f"error: {says}", done.stderr), done.stderr


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
