"""`./deepy.py export RUN DIR`: a checkpoint as a folder that transformers reads."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import WEIGHTS
from megatron.checkpoint.trained_run import TrainedRun, open_run
from megatron.conversion.families.farfield import AUTO_MAP, CHECKSUMS_FILE, FARFIELD, TOKENIZER_TYPE_KEY
from megatron.conversion.hf_tokenizer import write_hf_tokenizer
from megatron.conversion.hf_weights import HFWeights, write_shards
from megatron.conversion.model_card import render_model_card, write_model_card
from megatron.conversion.model_family import HF_CONFIG_FILE, ModelFamily
from megatron.conversion.modeling_code import add_content_digest, bundle_modeling_code
from megatron.conversion.registry import find_exact_family
from megatron.data.run_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.options.model import padded_vocab_size
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError
from megatron.utils.suggestions import format_choices

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EXPORT_FILE_NAMES = re.compile(
    r"[\w-]+\.py|[\w.-]+\.json|model[\w-]*\.safetensors|README\.md|results\.png|merges\.txt|tokenizer\.model"
)
"""Names of files that an export may hold."""
_SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def export_model(
    source: str | Path,
    target: str | Path,
    *,
    native: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "2GB",
    license: str | None = None,
    overwrite: bool = False,
    log: Callable[[str], object] = print,
) -> Path:
    """Write a model for transformers, whole or not at all.

    Args:
        source: a run's folder (its newest checkpoint) or a checkpoint's.
        target: the folder to make.
        native: as a model of transformers' own, where one computes the same; else the code travels with it.
        dtype: of the weights: float32 (exactly what was stored), bfloat16 or float16.
        max_shard_size: the largest size of a file of weights, such as 2GB; also what is held in memory.
        license: of the weights, for the model card.
        overwrite: replace an export that is there.

    Raises:
        UserError: there is no such run, `target` is something else already, or no native model computes the same.
        RunError: the checkpoint is damaged, or the disk refuses.
    """
    torch_dtype, max_shard_bytes = _parse_dtype(dtype), _parse_size(max_shard_size)
    run, target = open_run(source), Path(target)
    family = _find_native_family(run) if native else FARFIELD
    _check_target(target, overwrite)
    if (problem := manifest.find_damage(run.checkpoint, manifest.MODEL_FILES)) is not None:
        raise RunError(f"{run.checkpoint}: is damaged: {problem}")
    tokenizer = load_run_tokenizer(run.folder, run.config.data, run.tokenizer_name)
    weights = HFWeights(run.checkpoint / WEIGHTS, family, run.config, None if dtype == "float32" else torch_dtype)
    with describe_write_errors(target), atomic_directory(target.resolve()) as folder:
        auto_map_keys = {} if native else {"auto_map": _write_code(run, folder)}
        _write_configs(run, tokenizer, family, dtype, folder, auto_map_keys)
        write_hf_tokenizer(tokenizer, folder, run.config.model.seq_length)
        write_shards(weights, folder, max_shard_bytes)
        manifest.write_manifest(
            folder, manifest.compute_checksums(folder, folder.glob("*.safetensors")), CHECKSUMS_FILE
        )
        page, plot = render_model_card(
            run, tokenizer, family, num_parameters=weights.num_parameters, license=license, title=target.name
        )
        write_model_card(folder, page, plot)
    total_bytes = sum(path.stat().st_size for path in target.iterdir())
    log(
        f"{target}: {weights.num_parameters:,} parameters in {dtype}, {total_bytes / 1e6:,.1f} MB, step "
        f"{run.progress.step:,}"
    )
    flag = "" if native else ", trust_remote_code=True"
    log(f"load it with AutoModelForCausalLM.from_pretrained({str(target)!r}{flag})")
    if family.known_difference is not None:
        log(f"note: {family.known_difference}")
    return target


def _find_native_family(run: TrainedRun) -> ModelFamily:
    family, reasons = find_exact_family(run.config)
    if family is None:
        common_reasons = {reason.partition(";")[0] for reason in reasons.values()}
        messages = (
            common_reasons if len(common_reasons) == 1 else [f"{name}: {reason}" for name, reason in reasons.items()]
        )
        raise UserError(
            f"--native: no model of transformers' own computes {run.name}: {', '.join(messages)}; leave --native out"
        )
    return family


def _write_code(run: TrainedRun, folder: Path) -> dict[str, str]:
    """The code of a model; returns where its classes are (`auto_map`)."""
    position = run.config.position
    files, suffix = add_content_digest(bundle_modeling_code(position.pos_emb, position.score_processor))
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {auto_class: name.replace(".", f"{suffix}.") for auto_class, name in AUTO_MAP.items()}


def _write_configs(
    run: TrainedRun, tokenizer: Tokenizer, family: ModelFamily, dtype: str, folder: Path, auto_map_keys: dict[str, Any]
) -> None:
    """config.json and generation_config.json. Rows that only pad the vocabulary are never drawn."""
    num_embeddings = padded_vocab_size(run.config.model, tokenizer.vocab_size)
    common_keys = {
        "eos_token_id": tokenizer.eod,
        "pad_token_id": tokenizer.eod,
        "use_cache": run.config.position.randomized_positions is None,
    }
    padding_ids = list(range(tokenizer.vocab_size, num_embeddings))
    # transformers 4 calls it torch_dtype, and 5 reads both.
    _write_json(
        folder / HF_CONFIG_FILE,
        family.to_hf_config(
            run.config, num_embeddings, torch_dtype=dtype, bos_token_id=tokenizer.bos, **common_keys, **auto_map_keys
        ),
    )
    _write_json(
        folder / "generation_config.json", {**common_keys, **({"suppress_tokens": padding_ids} if padding_ids else {})}
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise UserError(f"--dtype is {name!r}; {format_choices(name, DTYPES)}")
    return DTYPES[name]


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B|)", text.strip().upper())
    if match is None or int(match[1]) < 1:
        raise UserError(f"--shard is {text!r}; write a size such as 500MB or 2GB")
    return int(match[1]) * _SIZE_UNITS[match[2]]


def _check_target(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise UserError(f"{target}: is a file; name a folder that is to be made")
    file_names = sorted(path.name for path in target.iterdir())
    if file_names and not overwrite:
        raise UserError(f"{target}: is not empty; name another folder, or replace an export by --overwrite")
    if file_names and not _is_export(target):
        raise UserError(f"{target}: is not empty, and no export: --overwrite replaces nothing else")
    if foreign_files := [
        name for name in file_names if not _EXPORT_FILE_NAMES.fullmatch(name) or (target / name).is_dir()
    ]:
        raise UserError(
            f"{target}: holds {foreign_files[0]} beside an export, which --overwrite would delete; move it away"
        )


def _is_export(folder: Path) -> bool:
    """Only our own exports say which of our tokenizers they have."""
    try:
        values = parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and TOKENIZER_TYPE_KEY in values
