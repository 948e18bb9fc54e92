"""`./deepy.py import`: convert a model from another project to a run folder, atomically.

    RUN/config.yml                     keys of model and position; training adds the others
    RUN/tokenizer/                     copy of the tokenizer, as in every run
    RUN/checkpoints/step_0000000/      model.safetensors in float32, config.yml, progress.json, manifest.json

The checkpoint contains only weights, without optimizer states. It can be evaluated, exported and finetuned, but not
resumed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron.config.schema import CONFIG_FILE, Config
from megatron.config.yaml_files import dump_yaml
from megatron.conversion.families.farfield import ADD_BOS_KEY, TOKENIZER_CONFIG_FILE, TOKENIZER_TYPE_KEY
from megatron.conversion.hf_checkpoint import read_hf_source
from megatron.conversion.model_family import HF_CONFIG_FILE, ModelSource, WeightReader
from megatron.conversion.neox_checkpoint import find_neox_checkpoint, read_neox_source
from megatron.data.load_tokenizer import save_tokenizer
from megatron.data.tokenizers import Tokenizer, load_tokenizer_from_files
from megatron.options.data import TokenizerType
from megatron.options.model import get_ffn_hidden_size, get_q_hidden_size
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors
from megatron.utils.atomic_io import check_new_folder, parse_json
from megatron.utils.errors import RunError, UserError, check_reachable
from megatron.utils.formatting import format_choices, suggest_path

if TYPE_CHECKING:
    from torch import Tensor

    from megatron.checkpoint.tensor_files import TensorSpec

MIN_LAYERS_TO_CHECK = 500
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt")

HF_TOKENIZER_FILES = (
    ("HFTokenizer", ("tokenizer.json",)),
    ("GPT2BPETokenizer", ("vocab.json", "merges.txt")),
    ("SPMTokenizer", ("tokenizer.model",)),
)
"""Files that identify a tokenizer type; the first match is used."""
CLASSES_WITHOUT_BOS = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
"""Tokenizer classes in transformers that add no token before a text, regardless of tokenizer.json (transformers 5.23).
"""


@dataclass(frozen=True)
class ImportedRun:
    """Result of an import."""

    run: Path
    config: Config
    num_parameters: int
    tokenizer: str


def read_source(path: Path, configs: Sequence[Path] = ()) -> ModelSource:
    """Read the description of the model at a path. Raises UserError if it cannot be imported."""
    if not path.is_dir():
        if path.exists():
            raise UserError(f"{path}: is a file; give its folder")
        check_reachable(path)
        raise UserError(f"{path}: no such folder; {suggest_path(path, is_folder=True)}".rstrip("; "))
    if (path / HF_CONFIG_FILE).is_file():
        if configs:
            raise UserError(f"--config {configs[0]}: the model is already described by {path / HF_CONFIG_FILE}")
        return read_hf_source(path)
    if (checkpoint := find_neox_checkpoint(path)) is not None:
        return read_neox_source(checkpoint, configs)
    raise UserError(
        f"{path}: contains neither {HF_CONFIG_FILE} (Hugging Face) nor files of GPT-NeoX "
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
    """Convert a model from another project to a run folder.

    Args:
        source: a Hugging Face model folder or a GPT-NeoX checkpoint.
        run: folder to create.
        configs: configuration files of the GPT-NeoX model, if its checkpoint has none, or to replace them.
        tokenizer, vocab_file, merge_file: tokenizer of the model, if the source has none, or to replace it.
        end_token: end-of-document token, if it does not have one of the common names.
        add_bos: True to add a token before every text; as in the source if None.

    Returns:
        The result, and notes for the user.

    Raises:
        UserError: the model is not supported; the message gives the reason.
        RunError: a file is damaged, or the disk fails. Nothing is left behind.
    """
    run = Path(run)
    check_target_folder(run)
    model_source = read_source(Path(source), [Path(config) for config in configs])
    vocabulary, merges = (None if file is None else Path(file) for file in (vocab_file, merge_file))
    run_tokenizer = resolve_tokenizer(model_source, tokenizer, vocabulary, merges, end_token, add_bos)
    model_source.build_config()  # reject unsupported models before importing torch
    return write_imported_run(model_source, run, run_tokenizer), model_source.notes


def check_target_folder(run: Path) -> None:
    """Reject a target that is not empty, or cannot be created. Raises UserError."""
    if run.is_dir() and any(run.iterdir()):
        raise UserError(f"{run}: exists and is not empty; choose another folder")
    check_new_folder("--output", run)


def resolve_tokenizer(
    source: ModelSource,
    tokenizer_type: str | None,
    vocab_file: Path | None,
    merge_file: Path | None,
    end_token: str | None = None,
    add_bos: bool | None = None,
) -> Tokenizer:
    """Return the given tokenizer, or the source's own.

    Args:
        end_token: end-of-document token, if it does not have one of the common names.
        add_bos: True to add a token before every text; as in the source if None.

    Raises UserError if there is no tokenizer or its files are invalid.
    """
    if tokenizer_type is not None:
        return load_tokenizer_from_files(tokenizer_type, vocab_file, merge_file, end_token=end_token, bos=add_bos)
    if vocab_file is not None or merge_file is not None:
        raise UserError("vocab_file: specify its tokenizer type with --tokenizer")
    if source.tokenizer_folder is not None:
        if (own_type := _read_tokenizer_type(source.tokenizer_folder)) is not None:
            return _load_export_tokenizer(source.tokenizer_folder, own_type, end_token, add_bos)
        for candidate_type, files in HF_TOKENIZER_FILES:
            if all((source.tokenizer_folder / file).is_file() for file in files):
                bos = _resolve_bos(source.tokenizer_folder, candidate_type, add_bos)
                return load_tokenizer_from_files(
                    candidate_type, *(source.tokenizer_folder / file for file in files), end_token=end_token, bos=bos
                )
    names = "; ".join(" and ".join(files) for _, files in HF_TOKENIZER_FILES)
    raise UserError(
        f"{source.path}: contains no tokenizer ({names}); specify it with --tokenizer (bytes, HFTokenizer, "
        "GPT2BPETokenizer or SPMTokenizer) and --vocab-file"
    )


def _load_export_tokenizer(
    folder: Path, tokenizer_type: TokenizerType, end_token: str | None, add_bos: bool | None
) -> Tokenizer:
    """Load the tokenizer of an export of this project, with the end-of-document token of its run."""
    names = dict(HF_TOKENIZER_FILES).get(tokenizer_type, ())
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise UserError(
            f"{folder}: {' and '.join(missing)} of tokenizer {tokenizer_type} not found; transformers does not save "
            "them; copy them from the original export, or specify another tokenizer with --tokenizer"
        )
    files, bos = [folder / name for name in names], _resolve_bos(folder, tokenizer_type, add_bos)
    stated = _get_token_name(_read_tokenizer_config(folder), "eos_token")
    if end_token is None and files and stated is not None:
        with suppress(UserError):  # it has no token with a common name
            tokenizer = load_tokenizer_from_files(tokenizer_type, *files, bos=bos)
            if tokenizer.token_to_id(stated) in (None, tokenizer.eod):
                return tokenizer
        end_token = stated
    return load_tokenizer_from_files(tokenizer_type, *files, end_token=end_token, bos=bos)


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; empty if it cannot be read."""
    try:
        values = parse_json((folder / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # tokenizers of other projects are identified by their files
    return values if isinstance(values, dict) else {}


def _resolve_bos(folder: Path, tokenizer_type: str, add_bos: bool | None) -> bool | str | None:
    """Return `bos` of `load_tokenizer_from_files`, following transformers.

    A tokenizer.json defines its prefix itself, except for classes that ignore it; for other files `add_bos_token`
    decides.
    """
    values = _read_tokenizer_config(folder)
    bos = _get_token_name(values, "bos_token") or True
    if add_bos is not None:
        return bos if add_bos else False
    if tokenizer_type == "HFTokenizer":
        return False if values.get("tokenizer_class") in CLASSES_WITHOUT_BOS else None
    return bos if values.get("add_bos_token", values.get(ADD_BOS_KEY)) is True else False


def _get_token_name(values: Mapping[str, Any], key: str) -> str | None:
    """Return the name of a special token in tokenizer_config.json, or None if it has none."""
    token = values.get(key)
    name = token.get("content") if isinstance(token, dict) else token
    return name if isinstance(name, str) else None


def _read_tokenizer_type(folder: Path) -> TokenizerType | None:
    """Return the tokenizer type recorded in an export of this project, or None."""
    path = folder / TOKENIZER_CONFIG_FILE
    tokenizer_type = _read_tokenizer_config(folder).get(TOKENIZER_TYPE_KEY)
    if tokenizer_type is not None and tokenizer_type not in get_args(TokenizerType):
        raise UserError(
            f"{path}: {TOKENIZER_TYPE_KEY} is {tokenizer_type!r}; "
            f"{format_choices(str(tokenizer_type), get_args(TokenizerType))}"
        )
    return tokenizer_type


def check_vocab_size(vocab_size: int, num_embeddings: int, source: Path) -> None:
    """Reject a tokenizer with more tokens than the embedding has rows. Raises UserError."""
    if vocab_size > num_embeddings:
        raise UserError(
            f"{source}: the tokenizer has {vocab_size:,} tokens, but the embedding has {num_embeddings:,} rows; it "
            "belongs to another model; specify the right one with --tokenizer"
        )


def check_parameter_count(source: ModelSource) -> None:
    """Reject a configuration with more parameters than the weight files can contain, before many layers are built.

    Only the output matrices of attention and feed-forward layers are counted. Smaller differences are detected when
    weights are compared one by one. Raises UserError.
    """
    model = source.build_config().model
    if model.num_layers < MIN_LAYERS_TO_CHECK:
        return
    num_parameters = model.num_layers * model.hidden_size * (get_q_hidden_size(model) + get_ffn_hidden_size(model))
    weight_bytes = sum(path.stat().st_size for path in source.path.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if num_parameters > weight_bytes > 0:  # every format needs at least one byte per parameter
        raise UserError(
            f"{source.path}: the configuration describes over {num_parameters:,} parameters, but the weight files "
            f"contain {weight_bytes:,} bytes"
        )


def write_imported_run(source: ModelSource, run: Path, tokenizer: Tokenizer) -> ImportedRun:
    """Write the run folder.

    Raises:
        UserError: the model cannot be built.
        RunError: a file of the source is damaged or does not match its configuration, or the disk fails. Nothing is
            left behind.
    """
    check_parameter_count(source)
    with (
        describe_write_errors(run),
        source.open_weights(source.build_config()) as weights,
        atomic_directory(run.resolve()) as new_folder,
    ):
        check_vocab_size(tokenizer.vocab_size, weights.num_embeddings, source.path)
        # This multiple pads any vocabulary to the given rows, for any number of ranks.
        config = source.build_config(make_vocab_size_divisible_by=weights.num_embeddings)
        parameters = _write_run_files(new_folder, source, config, weights, tokenizer)
    return ImportedRun(run, config, parameters, tokenizer.name)


def _write_run_files(
    new_folder: Path, source: ModelSource, config: Config, weights: WeightReader, tokenizer: Tokenizer
) -> int:
    from megatron.checkpoint import layout, manifest, tensor_files
    from megatron.checkpoint.load_model import build_meta_model
    from megatron.checkpoint.trainer_state import TrainerState

    gpt = build_meta_model(config, tokenizer.vocab_size)
    tensor_headers = {
        name: tensor_files.TensorSpec(tuple(parameter.shape)) for name, parameter in gpt.named_parameters()
    }
    weights.check_names(list(tensor_headers))
    config_text = _format_config(source, config)
    (new_folder / CONFIG_FILE).write_text(config_text, encoding="utf-8")
    save_tokenizer(tokenizer, new_folder)
    checkpoint = new_folder / layout.CHECKPOINTS / layout.format_checkpoint_name(0)
    checkpoint.mkdir(parents=True)
    weights_checksum = tensor_files.write_tensor_stream(
        checkpoint / layout.WEIGHTS,
        tensor_headers,
        _iter_checked_weights(source, weights, tensor_headers),
        {"step": "0"},
    )
    (checkpoint / CONFIG_FILE).write_text(config_text, encoding="utf-8")
    vocabulary: dict[str, Any] = {"size": tokenizer.vocab_size, "name": tokenizer.name}
    if config.position.attention_mask == "document":
        vocabulary["eod"] = tokenizer.eod if source.document_end is None else source.document_end
    TrainerState(vocabulary=vocabulary).write(checkpoint)
    other_checksums = manifest.compute_checksums(checkpoint, [checkpoint / CONFIG_FILE, checkpoint / layout.PROGRESS])
    manifest.write_manifest(checkpoint, {layout.WEIGHTS: weights_checksum} | other_checksums)
    return gpt.num_parameters()


def _iter_checked_weights(
    source: ModelSource, weights: WeightReader, tensor_headers: "Mapping[str, TensorSpec]"
) -> "Iterator[Tensor]":
    """Yield the weights in the model's order, checked one at a time."""
    import torch

    for name, tensor_header in tensor_headers.items():
        tensor = weights(name)
        if tuple(tensor.shape) != tensor_header.shape:
            raise RunError(
                f"{source.path}: {name} has shape {list(tensor.shape)}, but the configuration requires "
                f"{list(tensor_header.shape)}"
            )
        weight = tensor.to(tensor_header.dtype)
        if not bool(torch.isfinite(weight).all()):
            raise RunError(f"{source.path}: {name} is not finite")
        yield weight


def _format_config(source: ModelSource, config: Config) -> str:
    """Return config.yml with the keys of the model and position, and none of training."""
    sections = (config.model, config.position)
    config_keys = {
        name: value for section in sections for name, value in section.model_dump(exclude_unset=True).items()
    }
    header = f"# Imported {source.format_name} model. Training needs further keys: train_iters, train_data_paths …"
    return f"{header}\n{dump_yaml(config_keys)}"
