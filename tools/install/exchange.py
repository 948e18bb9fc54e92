"""Exchange of checkpoints between two environments with different packages, in both directions.

A small training stops, and continues from its checkpoint in both environments. The losses that follow depend on the
weights, the optimizer's states, the order of data and the states of dropout, so equal losses show that all were
restored.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STOP, END = 4, 8
WIDTH, LAYERS = 64, 2
KEYS = (
    f"hidden_size={WIDTH}", f"num_layers={LAYERS}", "num_attention_heads=4", "seq_length=32", "train_batch_size=4",
    "hidden_dropout=0.1", "attention_dropout=0.1", f"lr_decay_iters={END}", "warmup=0", "log_interval=1",
    "eval_interval=100", "eval_iters=1", "checkpoint_factor=100", "precision=fp32", "device=cpu",
    "zero_optimization={stage: 1}",
)  # fmt: skip


def compare_checkpoints(first: Path, second: Path, folder: Path) -> dict[str, float]:
    """Return the largest relative difference of losses after reading a checkpoint, for each direction.

    Args:
        first: Python interpreter of an environment; `second` of another.
        folder: folder for the corpus and the runs.
    """
    text = folder / "texts"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"Text {number} has {number**3} words, and no two are the same. " * 30)
    run_command(first, folder, "prepare", "texts", "--output", "corpus", "--tokenizer", "bytes")
    found = {}
    for direction, writer, reader in (("written", first, second), ("read", second, first)):
        run = folder / direction
        train(writer, folder, run, STOP)
        shutil.copytree(run, other := folder / f"{direction}_elsewhere")
        train(writer, folder, run, END)
        train(reader, folder, other, END)
        expected, losses = read_losses(run), read_losses(other)
        assert sorted(losses) == sorted(expected) == list(range(1, END + 1)), (losses, expected)
        found[direction] = max(abs(losses[step] / expected[step] - 1) for step in range(STOP + 1, END + 1))
    return found


def train(python: Path, folder: Path, run: Path, steps: int) -> None:
    """Train or resume a run up to a step."""
    print(f"{python}: training to step {steps}{', from a checkpoint' if run.exists() else ''}", flush=True)
    load = [f"load={run}"] if run.exists() else []
    data = [f"{name}_data_paths=[corpus/{name}_text_document]" for name in ("train", "valid")]
    run_command(python, folder, "train", "cdape_kerple_log", *KEYS, *data, f"save={run}", f"train_iters={steps}", *load)


def run_command(python: Path, folder: Path, *words: str) -> None:
    """Run a command of `deepy.py` with an environment's Python.

    Raises:
        SystemExit: if the command fails.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [python, ROOT / "deepy.py", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {python} deepy.py {words[0]} failed: {done.stderr.strip()[-500:]}")


def read_losses(run: Path) -> dict[int, float]:
    """Return the training losses of a run by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {each["step"]: each["loss"] for each in records if each["kind"] == "train"}
