"""`./deepy.py export RUN DIR`: a checkpoint as a folder that transformers reads."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import torch

from megatron.checkpoint import manifest
from megatron.checkpoint.folder import WEIGHTS
from megatron.checkpoint.trained import Run, open_run
from megatron.data.folders import whole_folder
from megatron.data.run_tokenizer import run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.errors import RunError, UserError, reason
from megatron.export.bundle import bundle
from megatron.export.card import card, write_card
from megatron.export.description import generation_description, model_description
from megatron.export.tokenizer import write_tokenizer
from megatron.export.weights import Weights, write_shards
from megatron.suggest import choose_from

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def export(
    source: str | Path,
    target: str | Path,
    *,
    dtype: str = "float32",
    shard: str = "2GB",
    license: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], object] = print,
) -> Path:
    """Write a model for transformers, whole or not at all.

    Args:
        source: a run's folder (its newest checkpoint) or a checkpoint's.
        target: the folder to make.
        dtype: of the weights: float32 (exactly what was stored), bfloat16 or float16.
        shard: the largest size of a file of weights, such as 2GB; also what is held in memory.
        license: of the weights, for the model card.
        overwrite: replace an export that is there.

    Raises:
        UserError: there is no such run, or `target` is something else already.
        RunError: the checkpoint is damaged, or the disk refuses.
    """
    kind, largest = _dtype(dtype), _bytes(shard)
    run, target = open_run(source), Path(target)
    _check_target(target, overwrite)
    if (problem := manifest.damage(run.checkpoint, manifest.MODEL_FILES)) is not None:
        raise RunError(f"{run.checkpoint}: is damaged: {problem}")
    tokenizer = run_tokenizer(run.folder, run.config.data, run.tokenizer_name)
    weights = Weights(run.checkpoint / WEIGHTS, None if dtype == "float32" else kind)
    try:
        with whole_folder(target.resolve(), replace=True) as folder:
            _write(run, tokenizer, weights, folder, dtype=dtype, largest=largest, license=license, title=target.name)
    except OSError as error:
        raise RunError(f"{target}: not written ({reason(error)})") from error
    files = sum(path.stat().st_size for path in target.iterdir())
    say(f"{target}: {weights.parameters():,} parameters in {dtype}, {files / 1e6:,.1f} MB, step {run.progress.step:,}")
    say(f"load it with AutoModelForCausalLM.from_pretrained({str(target)!r}, trust_remote_code=True)")
    return target


def _write(
    run: Run,
    tokenizer: Tokenizer,
    weights: Weights,
    folder: Path,
    *,
    dtype: str,
    largest: int,
    license: str | None,
    title: str,
) -> None:
    for name, text in bundle(run.config.position.pos_emb, run.config.position.score_processor).items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_json(folder / "config.json", model_description(run.config, tokenizer, dtype))
    _write_json(folder / "generation_config.json", generation_description(run.config, tokenizer))
    write_tokenizer(tokenizer, folder, run.config.model.seq_length)
    write_shards(weights.sizes(), weights.__getitem__, folder, largest)
    page, picture = card(run, tokenizer, parameters=weights.parameters(), license=license, title=title, native=None)
    write_card(folder, page, picture)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype is {name!r}; {choose_from(name, DTYPES)}")
    return DTYPES[name]


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B|)", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise UserError(f"--shard is {text!r}; write a size such as 500MB or 2GB")
    return int(match[1]) * _UNITS[match[2]]


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder that is to be made")
    there = {path.name for path in target.iterdir()}
    if there and not overwrite:
        raise UserError(
            f"{target}: is not empty; name another folder, or replace an export that is there by --overwrite"
        )
    if there and "config.json" not in there:
        raise UserError(f"{target}: is not empty, and no export: --overwrite replaces nothing else")
