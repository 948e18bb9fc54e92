"""Tiny corpus and configuration, with which a whole run takes a fraction of a second."""

import io
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers as hf
import torch
from forked import Forked
from rich.console import Console
from safetensors.torch import load_file, save_file

from megatron.checkpoint import layout
from megatron.config.schema import Config
from megatron.distributed.launcher_environment import find_free_port

VOCABULARY = 61


def counting(tokens: int, seed: int) -> Iterator[np.ndarray]:
    """Yield learnable documents, at least `tokens` tokens in total: noisy counting in 0 … 59."""
    rng = np.random.default_rng(seed)
    written = 0
    while written < tokens:
        length = int(rng.integers(20, 90))
        document = (np.arange(length) * int(rng.integers(1, 4)) + int(rng.integers(0, 60))) % 60
        yield np.where(rng.random(length) < 0.1, rng.integers(0, 60, length), document)
        written += length + 1


def write_corpus(prefix: Path, *, tokens: int = 4000, seed: int = 0) -> Path:
    """Write such documents, each ended by token 60, as a single indexed dataset without a corpus.json."""
    from megatron.data.core_datasets import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint8)
    for document in counting(tokens, seed):
        builder.add_document(np.append(document, 60).astype(np.uint8), [len(document) + 1])
    builder.finalize(f"{prefix}.idx")
    return prefix


def write_corpora(folder: Path) -> Path:
    """Prepare a corpus of such documents: train, valid and test, with a tokenizer whose words are numbers."""
    from corpora import prepare

    folder.mkdir(parents=True, exist_ok=True)
    words = {str(number): number for number in range(VOCABULARY - 1)} | {"</s>": VOCABULARY - 1}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(words))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "numbers.json"))
    lines = [json.dumps({"text": " ".join(map(str, document))}) for document in counting(5200, seed=0)]
    (folder / "counting.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus = prepare(
        [str(folder / "counting.jsonl")],
        folder / "corpus",
        tokenizer="HFTokenizer",
        vocab_file=folder / "numbers.json",
        split=(0.76, 0.12, 0.12),
        workers=1,
    )
    return corpus.folder


def train_and_print(config: Config, **options: Any) -> tuple[str, Any]:
    """Train without the announcements of a slow machine, and return what is printed and the result.

    Args:
        options: options of the console, by default 400 characters wide.
    """
    from megatron.training import console, training_run
    from megatron.training.train import train

    stream = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "MAX_SILENCE", 1e6)
        patch.setattr(console, "QUIET_SECONDS", 1e6)
        result = train(config, Console(file=stream, **{"width": 400, **options}))
    return stream.getvalue(), result


def tiny_config(corpus: Path, run: Path | None = None, **keys: Any) -> Config:
    """Build a configuration with two layers, width 32, T = 16, a batch of four and four steps; any flat key may be
    given.
    """
    flat: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "seq_length": 16,
        "pos_emb": "kerple_log",
        "make_vocab_size_divisible_by": 64,
        "train_data_paths": [str(corpus / "train_text_document")],
        "valid_data_paths": [str(corpus / "valid_text_document")],
        "train_iters": 4,
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 4,
        "optimizer": {"params": {"lr": 1e-2}},
        "log_interval": 1,
        "eval_interval": 0,
        "eval_iters": 2,
        "device": "cpu",
        "num_gpus": 1,
        "nodes": 1,
        "distributed_backend": "gloo",
        "use_tensorboard": False,
        "save": None if run is None else str(run),
        **keys,
    }
    return Config.from_flat(flat)


def write_pausing_method(folder: Path) -> str:
    """Write a user's method and return its name: kerple_log in which several ranks pause at every layer.

    A run then takes long enough to be interrupted on any machine, with little computation.

    Args:
        folder: folder that `FARFIELD_METHODS` must name.
    """
    (folder / "encodings").mkdir(parents=True)
    (folder / "encodings" / "pausing.py").write_text(PAUSING, encoding="utf-8")
    return "pausing"


PAUSING = """\
import time

from torch import distributed

from megatron.position.encodings.kerple_log import KerpleLog


class Pausing(KerpleLog):
    def table(self, distances):
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            time.sleep(0.05)
        return super().table(distances)
"""


def records(run: Path, kind: str = "train") -> dict[int, dict[str, Any]]:
    """Return the records of one kind in a run's metrics.jsonl by step; raise an error for a repeated step."""
    found: dict[int, dict[str, Any]] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == kind:
            assert record["step"] not in found, f"step {record['step']} occurs twice"
            found[record["step"]] = record
    return found


def losses(run: Path) -> list[float]:
    """Return the training losses of a run in order of steps."""
    return [record["loss"] for _, record in sorted(records(run).items())]


def same_weights(one: Path, other: Path) -> bool:
    """Return True if the newest checkpoints of two runs have bitwise equal weights."""
    first, second = (load_file(layout.resolve_checkpoint_path(run) / layout.WEIGHTS) for run in (one, other))
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def replace_text(path: Path, old: str, new: str) -> None:
    """Replace a text in a file that contains it."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def train_with_processes(
    job: Path, configs: list[Config], *, world_size: int = 2, timeout: float = 600, terminate: int | None = None
) -> list[str | None]:
    """Train configurations one after another with several processes; return the error of each run, or None.

    Args:
        terminate: rank that gets SIGTERM as soon as the last run has reported a training step.
    """
    job.mkdir(parents=True)
    for i, config in enumerate(configs):
        config.save(job / f"{i:02d}.yml")
    script, environment = Path(__file__).with_name("train_rank.py"), {"MASTER_PORT": str(find_free_port())}
    children = [
        Forked(script, str(job), str(rank), str(world_size), output=job / f"output_{rank}.txt", env=environment)
        for rank in range(world_size)
    ]
    try:
        if terminate is not None:
            metrics = Path(configs[-1].checkpoint.save or "") / "metrics.jsonl"
            deadline = time.monotonic() + timeout
            while time.monotonic() < deadline and all(child.poll() is None for child in children):
                if metrics.is_file() and '"kind": "train"' in metrics.read_text(encoding="utf-8"):
                    children[terminate].send_signal(signal.SIGTERM)
                    break
                time.sleep(0.02)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and None in [child.poll() for child in children]:
            if any(child.poll() not in (None, 0) for child in children):
                break  # the others would wait for it
            time.sleep(0.02)
        codes = [child.poll() for child in children]
    finally:
        for child in children:
            child.kill()
    assert codes == [0] * world_size, "\n".join(child.printed() for child in children)
    errors = [job / f"{i:02d}.0.error" for i in range(len(configs))]
    return [path.read_text(encoding="utf-8") if path.exists() else None for path in errors]


def make_run(name: str, corpus: Path, **keys: Any) -> str:
    """Create a run folder with random weights, without training."""
    from models import build_model

    from megatron.checkpoint.trainer_state import TrainerState
    from megatron.data.load_tokenizer import read_vocabulary

    config = tiny_config(corpus, Path(name), **{"test_data_paths": [str(corpus / "test_text_document")], **keys})
    model = build_model(config.model, config.position, VOCABULARY, seed=config.training.seed)
    checkpoint = Path(name) / "checkpoints" / "step_0000004"
    checkpoint.mkdir(parents=True)
    config.save(checkpoint / "config.yml")
    TrainerState(step=4, vocabulary={"size": VOCABULARY, "name": read_vocabulary(config.data).name}).write(checkpoint)
    weights = {key: value.detach().clone() for key, value in model.state_dict().items() if torch.is_tensor(value)}
    save_file(weights, checkpoint / "model.safetensors")
    return name
