"""Python processes started by the program never import from the user's folder."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.config.load import load_config
from megatron.data.corpus.sources import RawDocument
from megatron.data.corpus.tokenize_worker import Chunk, ChunkEncoder, encode_chunks
from megatron.data.tokenizers import load_tokenizer_from_files
from megatron.distributed.launcher_environment import ADDRESS, RankInfo
from megatron.launch import rank_group
from megatron.rehearsal import rehearse
from megatron.sweeps import worker_pool

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "pydantic", "rich", "tokenizers", "torch", "typer", "yaml", "zstandard")
TRAP = "import os\nopen(os.environ['SPRUNG'], 'a').write(__name__ + ' ')\nraise SystemExit(77)\n"


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder with a trap for every standard module and package; returns the file that a trap writes."""
    folder = tmp_path / "traps"
    (folder / "megatron").mkdir(parents=True)
    names = [name for name in sys.stdlib_module_names if name not in sys.builtin_module_names]
    for path in (*(folder / f"{name}.py" for name in (*names, *PACKAGES)), folder / "megatron" / "__init__.py"):
        path.write_text(TRAP)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SPRUNG", str(tmp_path / "sprung"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path / "sprung"


MODULE = (sys.executable, "-m", "colorsys")
"""Command that exits with 0, or with a trap's exit code."""


def test_the_traps_are_set(traps: Path) -> None:
    assert subprocess.run(MODULE).returncode == 77
    assert traps.exists()


def test_the_command_line_needs_no_python_that_adds_its_folder(traps: Path) -> None:
    command = [sys.executable, "-P", str(ROOT / "deepy.py"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("farfield "), done.stderr
    assert not traps.exists()


def test_processes_that_tokenize(traps: Path) -> None:
    """Traps are avoided by the first tokenizing process and by multiprocessing's resource tracker."""
    tokenizer = load_tokenizer_from_files("bytes")
    chunk = Chunk([RawDocument("here", "here", "text", b"text", 4)], [0], 4)
    (encoded,) = encode_chunks(ChunkEncoder(tokenizer, np.uint16, "text"), [chunk], 2)
    assert encoded.lengths == [5]
    assert not traps.exists()


def test_workers_of_a_sweep(traps: Path) -> None:
    worker = worker_pool._Worker.start(1)
    worker.connection.close()
    assert worker.process.wait(timeout=60) == 0
    assert not traps.exists()


def test_ranks_of_a_training(traps: Path) -> None:
    sizes = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=4", "train_iters=1"]
    config = load_config([], sizes).config
    ranks = [RankInfo(rank, 2, rank, 2) for rank in range(2)]
    assert rank_group.run_ranks(config, traps.with_name("log.txt"), ranks, ADDRESS, 23456, MODULE) == 0
    assert not traps.exists()


def test_ranks_of_a_rehearsal(traps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "build_environment", lambda *_, base, **__: dict(base))
    role = SimpleNamespace(rank=0, describe_coordinates=lambda sizes: "")
    run = SimpleNamespace(world_size=1, devices_per_node=1, sizes=None)
    folder = traps.with_name("rehearsal")
    folder.mkdir()
    rehearsal: Any = SimpleNamespace(run=run, gpu=None, roles=[role])
    execution = rehearse._Execution(rehearsal, folder, lambda line: None, MODULE)
    execution._ranks, execution._can_save = [0], lambda: False  # type: ignore[method-assign]
    assert execution._start("train", 0).wait(timeout=60) == 0
    assert not traps.exists()


def test_spawned_processes_leave_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.utils.imports import protect_child_imports

    for before in (None, "", "1"):
        monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
        if before is not None:
            monkeypatch.setenv("PYTHONSAFEPATH", before)
        with protect_child_imports():
            assert os.environ["PYTHONSAFEPATH"] == "1"
        assert os.environ.get("PYTHONSAFEPATH") == before


def test_every_start_of_a_python_is_protected() -> None:
    """Every place that starts Python is listed here, so that a new one gets a test."""
    protections = {
        r"sys\.executable(?s:.{0,80})\"-[mc]\"": ("SAFE_PATH_VARIABLE", '"-P"', '"-I"'),
        r"get_context\(|ProcessPoolExecutor\(": ("protect_child_imports()",),
    }
    files = [path for folder in ("farfield", "megatron", "tools") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    for start, allowed in protections.items():
        found = [path for path, text in texts.items() if re.search(start, text)]
        assert found
        assert [path for path in found if not any(word in texts[path] for word in allowed)] == []
