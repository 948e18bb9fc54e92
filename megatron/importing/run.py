"""`./deepy.py import`: a model from elsewhere becomes a run folder."""

from collections.abc import Sequence
from pathlib import Path

from megatron.checkpoint.folder import near_folder
from megatron.errors import UserError
from megatron.formats.family import FILE
from megatron.importing import run_folder
from megatron.importing.hugging_face import hugging_face
from megatron.importing.neox import checkpoint_of, neox_checkpoint
from megatron.importing.run_folder import Imported
from megatron.importing.source import Source


def find_source(path: Path, configs: Sequence[Path] = ()) -> Source:
    """What a path holds. Raises UserError if it is nothing that can be imported."""
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path}: is a file; name its folder")
        raise UserError(f"{path}: no such folder; {near_folder(path)}".rstrip("; "))
    if (path / FILE).is_file():
        if configs:
            raise UserError(f"--config {configs[0]}: {path / FILE} says what the model is")
        return hugging_face(path)
    if (checkpoint := checkpoint_of(path)) is not None:
        return neox_checkpoint(checkpoint, configs)
    raise UserError(
        f"{path}: holds neither {FILE}, as a folder of Hugging Face's libraries does, nor files of GPT-NeoX's "
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
) -> tuple[Imported, tuple[str, ...]]:
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
    run_folder.check_place(run)
    found = find_source(Path(source), [Path(each) for each in configs])
    vocabulary, merges = (None if file is None else Path(file) for file in (vocab_file, merge_file))
    opened = run_folder.tokenizer_of(found, tokenizer, vocabulary, merges, end_token, add_bos)
    found.config()  # refused here if it cannot be one of ours, before torch
    return run_folder.write(found, run, opened), found.notes
