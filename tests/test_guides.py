"""The commands of the guides run, in order, on small stand-ins for a reader's files and for datasets of the hub."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import forked
import pytest
import tokenizers as hf
import zstandard
from documented import list_commands
from neox_layout import Layout
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tokenizer_files import write_tokenizers

from megatron.config.yaml_files import dump_yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "config"))
from neox_files import NEOX_125M, NEOX_LOCAL_SETUP  # noqa: E402

TINY = {
    "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 24, "max_position_embeddings": 24,
    "train_micro_batch_size_per_gpu": 2, "train_iters": 2, "lr_decay_iters": 2, "checkpoint_factor": 2,
    "eval_interval": 2, "eval_iters": 1,
}  # fmt: skip
SMALL = ("train_iters=2", "lr_decay_iters=2", "eval_interval=2", "eval_iters=1", "device=cpu", "num_gpus=1")
"""Keys added to trainings, so that they take seconds on a CPU."""
TEXTS = [f"Document {number} of a few words, again and again. " * 30 for number in range(60)]


def write_jsonl(path: Path, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in TEXTS), encoding="utf-8")


def run_commands(
    page: str, folder: Path, *, without: tuple[str, ...] = (), replaced: dict[str, str] | None = None
) -> str:
    """Run a page's commands of ./deepy.py in a folder, and return what they print.

    Args:
        without: names of commands to leave out, and options of those to leave out.
        replaced: patterns of words, and the words to use instead.
    """
    printed, count = "", 0
    for program, *words in list_commands((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if program != "./deepy.py" or set(words) & set(without):
            continue
        for pattern, word in (replaced or {}).items():
            words = [re.sub(pattern, word, each) for each in words]
        added = SMALL if words[0] == "train" and "--dry-run" not in words else ()
        done = forked.run(ROOT / "deepy.py", *words, *added, cwd=folder)
        assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        printed += done.stdout + done.stderr
        count += 1
    assert count > 2
    return printed


def run_block(page: str, contents: str, folder: Path, program: str = "") -> list[str]:
    """Run a page's only block with these contents in a shell, and return the lines that it prints.

    Args:
        program: name of a program that is replaced by one that prints its arguments.
    """
    blocks = re.findall(r"^```\w*\n(.*?)^```$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    (block,) = (each for each in blocks if contents in each)
    stand_in = f'{program}() {{ echo "$*"; }}\n' if program else ""
    done = subprocess.run(["bash", "-ec", stand_in + block], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def write_tokenizer(path: Path) -> None:
    """Write a tokenizer with fewer tokens than the embedding of a stand-in checkpoint has rows."""
    words = ["</s>", "?", *dict.fromkeys(" ".join(TEXTS[:1]).split())]
    tokenizer = hf.Tokenizer(hf.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def prepare(folder: Path, *words: str) -> None:
    done = forked.run(ROOT / "deepy.py", "prepare", *words, cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_coming_from_gpt_neox(tmp_path: Path) -> None:
    """A stock YAML and its local setup train, and a checkpoint in GPT-NeoX's layout is imported and trained further."""
    write_tokenizer(tmp_path / "tokenizer.json")
    write_jsonl(tmp_path / "papers.jsonl")
    (tmp_path / "book.txt").write_text(" ".join(TEXTS))
    files = ("--tokenizer", "HFTokenizer", "--vocab-file", "tokenizer.json")
    prepare(tmp_path, "papers.jsonl", "--output", "data/enwik8", "--split", "none", *files)
    local = {key: value for key, value in NEOX_LOCAL_SETUP.items() if key not in ("vocab_file", "merge_file")}
    local |= {"data_path": "data/enwik8/text_document", "use_wandb": False, "split": "90,5,5"}
    (tmp_path / "my_neox.yml").write_text(dump_yaml({**NEOX_125M, **TINY}))
    (tmp_path / "my_local.yml").write_text(dump_yaml(local))
    keys: dict[str, Any] = {**TINY, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    Layout({**keys, "pos_emb": "rotary"}).fill().write(tmp_path / "neox_run")
    (tmp_path / "my_model.yml").write_text(dump_yaml({**keys, "pos_emb": "rotary"}))
    printed = run_commands("from_neox.md", tmp_path)
    assert "partition_activations, synchronize_each_layer have no effect" in printed
    assert "bias_gelu_fusion false keeps activation gelu" in printed
    assert (tmp_path / "runs" / "tuned" / "checkpoints" / "step_0000002").is_dir()


@pytest.mark.slow
def test_on_your_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are printed, and a job is written and submitted to a stand-in for sbatch."""
    write_jsonl(tmp_path / "texts.jsonl")
    prepare(tmp_path, "texts.jsonl", "--output", "data/python")
    (tmp_path / "mine.yml").write_text((ROOT / "configs" / "cluster" / "slurm_a100.yml").read_text())
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 17\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:{os.environ['PATH']}")
    printed = run_commands("on_your_cluster.md", tmp_path, without=("rehearse",))  # see tests/cuda/test_rehearse.py
    assert "keys of the first layout" in printed
    assert "submitted SLURM job 17" in printed
    assert (tmp_path / "runs" / "first" / "job.sbatch").is_file()


def test_the_plan_on_the_page_is_what_is_printed(tmp_path: Path) -> None:
    """The numbers that the page quotes from the first plan are those of its first layout."""
    page = (ROOT / "docs" / "on_your_cluster.md").read_text(encoding="utf-8")
    words = next(words for words in list_commands(page) if words[1] == "plan")
    done = forked.run(ROOT / "deepy.py", *words[1:], cwd=tmp_path)
    quoted = re.search(r"the first layout takes (\d+) days on (\d+) GPUs, about\s([\d,]+) GPU-hours", page)
    (row,) = re.findall(r"row `(.*?)`", page)
    assert quoted is not None
    days, gpus, hours = (int(number.replace(",", "")) for number in quoted.groups())
    first = done.stdout.partition("\ntp  cp ")[2].splitlines()[1].split()
    assert (first[-1], words[words.index("--gpus") + 1]) == (str(days), str(gpus))
    assert abs(hours - days * 24 * gpus) <= gpus * 12, "the printed days are rounded"
    assert f"  {row} " in done.stdout


def test_only_three_packages_need_torch(tmp_path: Path) -> None:
    """The commands for a container with its own torch install everything else, and nothing that would replace it."""
    shutil.copy(ROOT / "requirements.txt", tmp_path)
    first, others = (
        words.split() for words in run_block("on_your_cluster.md", "pip install --no-deps", tmp_path, "pip")
    )
    assert first == ["install", "--no-deps", ".", "-r", "first.txt"]
    assert others[:3] == ["install", "-r", "others.txt"]
    without, rest = (
        {Requirement(line.split("#")[0]).name for line in (tmp_path / name).read_text().splitlines() if line[:1] != "#"}
        for name in ("first.txt", "others.txt")
    )
    normal = list_all_requirements(rest | set(others[3:]))
    assert without == {"deepspeed", "megatron-core"}
    assert not normal & {"torch", "triton", *without}
    assert list_all_requirements(without, levels=1) - without - {"torch"} <= normal


def test_the_search_for_infiniband_finds_every_line_of_its_table(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "on_your_cluster.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| the log says .*\n\|-.*\n((?:\|.*\n)+)", page, flags=re.MULTILINE)
    lines = [line for row in table.splitlines() for line in re.findall("`(.*?)`", row.split("|")[1])]
    assert len(lines) > 5
    log = tmp_path / "runs" / "first" / "log.txt"
    log.parent.mkdir(parents=True)
    log.write_text("".join(f"node1:17:17 [0] NCCL INFO {line}\nanother line\n" for line in lines))
    found = run_block("on_your_cluster.md", "runs/first/log.txt", tmp_path)
    assert found == [f"node1:17:17 [0] NCCL INFO {line}" for line in lines]


def list_all_requirements(names: set[str], levels: int = 10) -> set[str]:
    """Return the names and, down to some levels, the packages that they require in this environment."""
    for _ in range(levels):
        needed = [Requirement(line) for name in names for line in requires(name) or ()]
        names = names | {canonicalize_name(each.name) for each in needed if not each.marker or each.marker.evaluate()}
    return names


@pytest.mark.slow
def test_the_papers_data(tmp_path: Path) -> None:
    """Each corpus is prepared from a few texts in its format, with tokenizers of the named kinds."""
    write_tokenizers(tmp_path)
    write_jsonl(tmp_path / "hub" / "train.jsonl")
    for number, text in enumerate(TEXTS):
        (tmp_path / "pg19" / "train").mkdir(parents=True, exist_ok=True)
        (tmp_path / "pg19" / "train" / f"{number}.txt").write_text(text)
    write_jsonl(tmp_path / "texts.jsonl")
    texts = (tmp_path / "texts.jsonl").read_bytes()
    downloads = [line.split() for line in run_block("corpora.md", "curl", tmp_path, "curl")]
    assert [words[2][-12:] for words in downloads] == [f"{number:04d}.json.gz" for number in range(100)]
    (tmp_path / downloads[0][1]).write_bytes(gzip.compress(texts))
    (tmp_path / "pile.jsonl.zst").write_bytes(zstandard.compress(texts))
    small = {"^hf:.*": "hf:hub", "^10000000000$": "5000", "^8$": "1"}
    run_commands("corpora.md", tmp_path, replaced=small)
    corpora = {path.parent.name for path in tmp_path.glob("data/*/corpus.json")}
    assert corpora == {"fineweb_edu", "dclm", "slimpajama", "pg19", "arxiv", "pile"}


def test_the_installed_command_takes_what_the_page_shows(tmp_path: Path) -> None:
    """The installed program's commands run outside the project; test_installation.py installs a wheel."""
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    commands = re.findall(r"^(?:farfield|python -m farfield) (.*)$", page, flags=re.MULTILINE)
    assert len(commands) == 3
    for words in commands:
        done = forked.run(ROOT / "farfield" / "__main__.py", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout) > 50
    (extra,) = re.findall(r"^pip install '\.\[(\w+)\]'$", page, flags=re.MULTILINE)
    assert f"optional-dependencies.{extra} " in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_processor_of_the_page_obeys_the_laws(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(from megatron\.position.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    (words,) = re.findall(r"^FARFIELD_METHODS=my_methods \.venv/bin/python -m (pytest .*)$", page, flags=re.MULTILINE)
    (name,) = re.findall(r"^The processor `(\w+)` is one such file", page, flags=re.MULTILINE)
    (tmp_path / "processors").mkdir()
    (tmp_path / "processors" / f"{name}.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", *words.split(), "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "FARFIELD_METHODS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 40
