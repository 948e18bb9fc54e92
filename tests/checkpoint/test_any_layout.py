"""A run resumes in any layout from a checkpoint of any other layout, with the results of a single process.

Each layout follows one of another kind, so that every layout is tested as source and as target. FARFIELD_PAIRS=all
tests every pair, and layouts of four ranks. With `-s` the test prints the table of docs/results/resume.md.
"""

import itertools
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_runs import records, tiny_config, train_with_processes, write_corpora

from megatron.checkpoint import layout, manifest, tensor_files
from megatron.config.schema import Config
from megatron.training.train import train
from tools.tolerances import compute_tolerance, count_gpt_sums

MODEL = {
    "num_layers": 3, "num_attention_heads": 4, "activation": "swiglu", "train_iters": 4,
    "pos_emb": ["kerple_log", "kerple_log", "t5"], "attention_window": [None, 9, None],
    "score_processor": ["cdape", "cdape", "none"],
    "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"params": {"lr": 1e-2, "eps": 1e-2}},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {"num_gpus": 1},
    "data, ZeRO 0": {"train_micro_batch_size_per_gpu": 1},
    "data, ZeRO 1": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
    "data, ZeRO 3": {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}},
    "tensor, ZeRO 0": {"model_parallel_size": 2},
    "tensor, ZeRO 2": {"model_parallel_size": 2, "zero_optimization": {"stage": 2}},
    "context, ZeRO 0": {"context_parallel_size": 2},
    "pipeline, ZeRO 1": {"pipe_parallel_size": 2, "zero_optimization": {"stage": 1}},
}
ALL = os.environ.get("FARFIELD_PAIRS") == "all"
if ALL:
    LAYOUTS |= {
        "tensor 2 × pipeline 2, ZeRO 1": {
            "num_gpus": 4, "model_parallel_size": 2, "pipe_parallel_size": 2, "zero_optimization": {"stage": 1},
        },
        "context 2 × data 2, ZeRO 3": {
            "num_gpus": 4, "context_parallel_size": 2, "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": 3},
        },
        "tensor 4, ZeRO 0": {"num_gpus": 4, "model_parallel_size": 4},
    }  # fmt: skip
TERMS, SUMS = count_gpt_sums(32, layers=3)
NAMES = list(LAYOUTS)
PAIRS = [
    (one, other)
    for one, other in itertools.product(NAMES, repeat=2)
    if ALL or (NAMES.index(other) - NAMES.index(one)) % len(NAMES) == 3
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the runs of all pairs, and `unbroken`, trained by a single process."""
    where = tmp_path_factory.mktemp("layouts")
    corpus = write_corpora(where / "corpus")

    def config(run: str, name: str, **keys: Any) -> Config:
        return tiny_config(corpus, where / run, **{"num_gpus": 2, **MODEL, **LAYOUTS[name], **keys})

    start_time = [config(f"begun {name}", name, train_iters=2, lr_decay_iters=4) for name in NAMES]
    goes_on = [config(f"{one} to {other}", other, load=str(where / f"begun {one}")) for one, other in PAIRS]
    for phase, jobs in enumerate(([config("unbroken", NAMES[0]), *start_time], goes_on)):
        for world in sorted({job.launch.num_gpus or 1 for job in jobs}):
            some = [job for job in jobs if job.launch.num_gpus == world]
            if world == 1:
                for job in some:
                    train(job)
            else:
                errors = train_with_processes(where / f"job {phase} {world}", some, world_size=world, timeout=600)
                assert errors == [None] * len(some)
    return where


def measure_difference(run: Path, unbroken: Path) -> float:
    """Return the largest difference of a loss, gradient norm or weight from the unbroken run, relative to rounding.

    Each of four steps moves a weight by at most lr/eps = 1 times its gradient, whose total norm is clipped to 1.
    """
    limit = 4 * compute_tolerance(TERMS, 2 * SUMS)
    ours, theirs = (list(records(each).values())[-2:] for each in (run, unbroken))
    found = [
        abs(mine[kind] / expected[kind] - 1) / limit
        for mine, expected in zip(ours, theirs, strict=True)
        for kind in ("loss", "grad_norm")
    ]
    mine, expected = (load_file(layout.resolve_checkpoint_path(each) / "model.safetensors") for each in (run, unbroken))
    assert mine.keys() == expected.keys()
    return max([*found, *(float((mine[name] - expected[name]).abs().max()) / limit for name in mine)])


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_it_resumes_like_a_single_process(runs: Path, one: str, other: str) -> None:
    assert measure_difference(runs / f"{one} to {other}", runs / "unbroken") < 1


@pytest.mark.skipif(not ALL, reason="the table is of all pairs")
def test_table(runs: Path) -> None:
    print("\n| from \\ to |", " | ".join(NAMES), "|\n|---|" + "---|" * len(NAMES))
    for one in NAMES:
        print(
            f"| {one} |",
            " | ".join(f"{measure_difference(runs / f'{one} to {other}', runs / 'unbroken'):.4f}" for other in NAMES),
            "|",
        )


def test_the_moments_matter(runs: Path, tmp_path: Path) -> None:
    """With zero moments the run gives different results, so the test above can fail."""
    shutil.copytree(runs / "begun one rank", tmp_path / "run")
    checkpoint = layout.resolve_checkpoint_path(tmp_path / "run")
    states, listed = checkpoint / "states" / "rank_00000.safetensors", checkpoint / manifest.MANIFEST
    with safe_open(states, "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    zeroed = {name: tensor if name.startswith("random/") else 0 * tensor for name, tensor in tensors.items()}
    entry = tensor_files.write_tensors(states, zeroed, metadata)
    content = json.loads(listed.read_text())
    content["files"]["states/rank_00000.safetensors"] = asdict(entry)
    listed.write_text(json.dumps(content))
    train(tiny_config(runs / "corpus" / "corpus", tmp_path / "run", load=str(tmp_path / "run"), **MODEL))
    assert measure_difference(tmp_path / "run", runs / "unbroken") > 1
