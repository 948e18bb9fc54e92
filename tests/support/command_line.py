"""Calls of the command line from outside, and a small prepared corpus for them."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEEPY = ROOT / "deepy.py"
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


def prepare_fox(folder: Path) -> Path:
    """Fill a folder with texts, their corpus `data/fox`, and the configuration `tiny.yml`, which trains on it."""
    (folder / "text").mkdir()
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(f"document {number}: " + "the quick brown fox " * 30)
    done = deepy("prepare", "text", "--output", "data/fox", "--split", "6,1,1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "train_data_paths=[data/fox/train_text_document]" in done.stdout
    (folder / "tiny.yml").write_text(TINY + "train_data_paths: [data/fox/train_text_document]\n")
    return folder
