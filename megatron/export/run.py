"""`./deepy.py export RUN DIR`: a checkpoint as a folder that transformers reads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import manifest
from megatron.checkpoint.folder import WEIGHTS
from megatron.checkpoint.trained import Run, open_run
from megatron.data.folders import whole_folder, written
from megatron.data.run_tokenizer import run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.errors import RunError, UserError
from megatron.export.bundle import bundle, name_by_content
from megatron.export.card import card, write_card
from megatron.export.tokenizer import write_tokenizer
from megatron.export.weights import Weights, write_shards
from megatron.files import parse_json
from megatron.formats.families import exact_family
from megatron.formats.family import FILE, Family
from megatron.formats.farfield import CHECKSUMS, CODE, FARFIELD, TOKENIZER_KIND
from megatron.options.model import padded_vocab_size
from megatron.suggest import choose_from

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OWN = re.compile(
    r"[\w-]+\.py|[\w.-]+\.json|model[\w-]*\.safetensors|README\.md|results\.png|merges\.txt|tokenizer\.model"
)
"""Names of files that an export may hold."""
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def export(
    source: str | Path,
    target: str | Path,
    *,
    native: bool = False,
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
        native: as a model of transformers' own, where one computes the same; else the code travels with it.
        dtype: of the weights: float32 (exactly what was stored), bfloat16 or float16.
        shard: the largest size of a file of weights, such as 2GB; also what is held in memory.
        license: of the weights, for the model card.
        overwrite: replace an export that is there.

    Raises:
        UserError: there is no such run, `target` is something else already, or no native model computes the same.
        RunError: the checkpoint is damaged, or the disk refuses.
    """
    kind, largest = _dtype(dtype), _bytes(shard)
    run, target = open_run(source), Path(target)
    family = _native(run) if native else FARFIELD
    _check_target(target, overwrite)
    if (problem := manifest.damage(run.checkpoint, manifest.MODEL_FILES)) is not None:
        raise RunError(f"{run.checkpoint}: is damaged: {problem}")
    tokenizer = run_tokenizer(run.folder, run.config.data, run.tokenizer_name)
    weights = Weights(run.checkpoint / WEIGHTS, family, run.config, None if dtype == "float32" else kind)
    with written(target), whole_folder(target.resolve()) as folder:
        code = {} if native else {"auto_map": _write_code(run, folder)}
        _write_descriptions(run, tokenizer, family, dtype, folder, code)
        write_tokenizer(tokenizer, folder, run.config.model.seq_length)
        write_shards(weights, folder, largest)
        manifest.write(folder, manifest.seal(folder, folder.glob("*.safetensors")), CHECKSUMS)
        page, picture = card(run, tokenizer, family, parameters=weights.parameters, license=license, title=target.name)
        write_card(folder, page, picture)
    files = sum(path.stat().st_size for path in target.iterdir())
    say(f"{target}: {weights.parameters:,} parameters in {dtype}, {files / 1e6:,.1f} MB, step {run.progress.step:,}")
    flag = "" if native else ", trust_remote_code=True"
    say(f"load it with AutoModelForCausalLM.from_pretrained({str(target)!r}{flag})")
    if family.drifts is not None:
        say(f"note: {family.drifts}")
    return target


def _native(run: Run) -> Family:
    family, reasons = exact_family(run.config)
    if family is None:
        common = {why.partition(";")[0] for why in reasons.values()}
        told = common if len(common) == 1 else [f"{name}: {why}" for name, why in reasons.items()]
        raise UserError(
            f"--native: no model of transformers' own computes {run.name}: {', '.join(told)}; leave --native out"
        )
    return family


def _write_code(run: Run, folder: Path) -> dict[str, str]:
    """The code of a model; returns where its classes are (`auto_map`)."""
    position = run.config.position
    files, suffix = name_by_content(bundle(position.pos_emb, position.score_processor))
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {kind: name.replace(".", f"{suffix}.") for kind, name in CODE.items()}


def _write_descriptions(
    run: Run, tokenizer: Tokenizer, family: Family, dtype: str, folder: Path, code: dict[str, Any]
) -> None:
    """config.json and generation_config.json. Rows that only pad the vocabulary are never drawn."""
    rows = padded_vocab_size(run.config.model, tokenizer.vocab_size)
    always = {
        "eos_token_id": tokenizer.eod,
        "pad_token_id": tokenizer.eod,
        "use_cache": run.config.position.randomized_positions is None,
    }
    padding = list(range(tokenizer.vocab_size, rows))
    # transformers 4 calls it torch_dtype, and 5 reads both.
    _write_json(
        folder / FILE, family.written(run.config, rows, torch_dtype=dtype, bos_token_id=tokenizer.bos, **always, **code)
    )
    _write_json(folder / "generation_config.json", {**always, **({"suppress_tokens": padding} if padding else {})})


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
    there = sorted(path.name for path in target.iterdir())
    if there and not overwrite:
        raise UserError(f"{target}: is not empty; name another folder, or replace an export by --overwrite")
    if there and not _is_export(target):
        raise UserError(f"{target}: is not empty, and no export: --overwrite replaces nothing else")
    if foreign := [name for name in there if not _OWN.fullmatch(name) or (target / name).is_dir()]:
        raise UserError(f"{target}: holds {foreign[0]} beside an export, which --overwrite would delete; move it away")


def _is_export(folder: Path) -> bool:
    """Only our own exports say which of our tokenizers they have."""
    try:
        values = parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and TOKENIZER_KIND in values
