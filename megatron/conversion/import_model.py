"""`./deepy.py import`: a model from elsewhere becomes a run folder."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.layout import suggest_folder
from megatron.conversion import imported_run
from megatron.conversion.hf_checkpoint import read_hf_source
from megatron.conversion.imported_run import ImportedRun
from megatron.conversion.model_family import HF_CONFIG_FILE
from megatron.conversion.model_source import ModelSource
from megatron.conversion.neox_checkpoint import find_neox_checkpoint, read_neox_source
from megatron.utils.errors import UserError


def read_source(path: Path, configs: Sequence[Path] = ()) -> ModelSource:
    """What a path holds. Raises UserError if it is nothing that can be imported."""
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path}: is a file; name its folder")
        raise UserError(f"{path}: no such folder; {suggest_folder(path)}".rstrip("; "))
    if (path / HF_CONFIG_FILE).is_file():
        if configs:
            raise UserError(f"--config {configs[0]}: {path / HF_CONFIG_FILE} says what the model is")
        return read_hf_source(path)
    if (checkpoint := find_neox_checkpoint(path)) is not None:
        return read_neox_source(checkpoint, configs)
    raise UserError(
        f"{path}: holds neither {HF_CONFIG_FILE}, as a folder of Hugging Face's libraries does, nor files of "
        f"GPT-NeoX's "
        "(layer_00-model_00-model_states.pt)"
    )


def import_model(
    source: str | Path,
    run: str | Path,
    *,
    configs: Sequence[str | Path] = (),
    tokenizer: str | None = None,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    end_token: str | None = None,
    add_bos: bool | None = None,
) -> tuple[ImportedRun, tuple[str, ...]]:
    """Make a run folder of a model from elsewhere.

    Args:
        source: a folder of Hugging Face's libraries, or a checkpoint of GPT-NeoX's.
        run: the folder to make.
        configs: configuration files of GPT-NeoX's model, where its checkpoint has none, or others.
        tokenizer, vocab_file, merge_file: the model's tokenizer, where the source does not hold it, or another one.
        end_token: the token that ends a document, if it has none of the usual names.
        add_bos: does a token stand before every text? As the source says if None.

    Returns:
        What was made, and lines worth telling.

    Raises:
        UserError: it is no model of ours, naming what stands against it.
        RunError: a file is damaged, or the disk refuses. Nothing is left then.
    """
    run = Path(run)
    imported_run.check_target_folder(run)
    model_source = read_source(Path(source), [Path(config) for config in configs])
    vocabulary, merges = (None if file is None else Path(file) for file in (vocab_file, merge_file))
    run_tokenizer = imported_run.resolve_tokenizer(model_source, tokenizer, vocabulary, merges, end_token, add_bos)
    model_source.build_config()  # refused here if it cannot be one of ours, before torch
    return imported_run.write_imported_run(model_source, run, run_tokenizer), model_source.notes
