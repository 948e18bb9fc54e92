"""`./deepy.py import`: a model from elsewhere becomes a run folder, whole or not at all.

    RUN/config.yml                     the keys of model and position; a training says the others
    RUN/tokenizer/                     its copy, as every run keeps one
    RUN/checkpoints/step_0000000/      model.safetensors in float32, config.yml, progress.json, manifest.json

The checkpoint has weights alone, no optimizer's states: it is evaluated, exported and finetuned, not resumed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from megatron.checkpoint.layout import suggest_folder
from megatron.config.schema import Config
from megatron.config.yaml_files import dump_yaml
from megatron.conversion.families.farfield import TOKENIZER_CONFIG_FILE, TOKENIZER_TYPE_KEY
from megatron.conversion.hf_checkpoint import read_hf_source
from megatron.conversion.model_family import HF_CONFIG_FILE
from megatron.conversion.model_source import ModelSource, WeightReader
from megatron.conversion.neox_checkpoint import find_neox_checkpoint, read_neox_source
from megatron.data.load_tokenizer import save_tokenizer
from megatron.data.tokenizers import Tokenizer, tokenizer_from_files
from megatron.options.data import TokenizerType
from megatron.planning.model_costs import count_parameters
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors
from megatron.utils.atomic_io import parse_json
from megatron.utils.errors import RunError, UserError
from megatron.utils.suggestions import format_choices

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
"""What a tokenizer is known by, the first that is there."""
CLASSES_WITHOUT_BOS = ("GPTNeoXTokenizer", "GPTNeoXTokenizerFast")
"""Classes of transformers that put nothing before a text, whatever a tokenizer.json says (transformers 5.23)."""


@dataclass(frozen=True)
class ImportedRun:
    """What was made."""

    run: Path
    config: Config
    num_parameters: int
    tokenizer: str


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
    check_target_folder(run)
    model_source = read_source(Path(source), [Path(config) for config in configs])
    vocabulary, merges = (None if file is None else Path(file) for file in (vocab_file, merge_file))
    run_tokenizer = resolve_tokenizer(model_source, tokenizer, vocabulary, merges, end_token, add_bos)
    model_source.build_config()  # refused here if it cannot be one of ours, before torch
    return write_imported_run(model_source, run, run_tokenizer), model_source.notes


def check_target_folder(run: Path) -> None:
    """Refuse a place that holds something. Raises UserError."""
    if run.is_dir() and any(run.iterdir()):
        raise UserError(f"{run}: is there already, and is not empty; name another folder")
    if run.exists() and not run.is_dir():
        raise UserError(f"{run}: is a file; name a folder")


def resolve_tokenizer(
    source: ModelSource,
    tokenizer_type: str | None,
    vocab_file: Path | None,
    merge_file: Path | None,
    end_token: str | None = None,
    add_bos: bool | None = None,
) -> Tokenizer:
    """The tokenizer that was named, or the source's own.

    Args:
        end_token: the token that ends a document, if it has none of the usual names.
        add_bos: does a token stand before every text? As the source says if None.

    Raises UserError: there is none, or its files are not what they should be.
    """
    if tokenizer_type is not None:
        return tokenizer_from_files(tokenizer_type, vocab_file, merge_file, end_token=end_token, bos=add_bos)
    if vocab_file is not None or merge_file is not None:
        raise UserError("vocab_file: say which tokenizer it belongs to with --tokenizer")
    files_by_type = dict(HF_TOKENIZER_FILES)
    if source.tokenizer_folder is not None:
        declared_type = _read_tokenizer_type(source.tokenizer_folder)
        for candidate_type, files in (
            ((declared_type, files_by_type.get(declared_type, ())),)
            if declared_type is not None
            else HF_TOKENIZER_FILES
        ):
            if all((source.tokenizer_folder / file).is_file() for file in files):
                bos = _resolve_bos(source.tokenizer_folder, candidate_type, add_bos)
                return tokenizer_from_files(
                    candidate_type, *(source.tokenizer_folder / file for file in files), end_token=end_token, bos=bos
                )
    names = "; ".join(" and ".join(files) for _, files in HF_TOKENIZER_FILES)
    raise UserError(
        f"{source.path}: holds no tokenizer ({names}); name it with --tokenizer (bytes, HFTokenizer, GPT2BPETokenizer "
        "or SPMTokenizer) and --vocab-file"
    )


def _read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """What transformers knows of the tokenizer of a folder; nothing if there is no such file that can be read."""
    try:
        values = parse_json((folder / TOKENIZER_CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # others' tokenizers are known by their files
    return values if isinstance(values, dict) else {}


def _resolve_bos(folder: Path, tokenizer_type: str, add_bos: bool | None) -> bool | str | None:
    """What stands before every text, as transformers does it: `bos` of `tokenizer_from_files`.

    A tokenizer.json says so itself, but for classes that do not ask it; other files leave it to `add_bos_token`.
    """
    values = _read_tokenizer_config(folder)
    token = values.get("bos_token")
    name = token.get("content") if isinstance(token, dict) else token
    bos = name if isinstance(name, str) else True
    if add_bos is not None:
        return bos if add_bos else False
    if tokenizer_type == "HFTokenizer":
        return False if values.get("tokenizer_class") in CLASSES_WITHOUT_BOS else None
    return bos if values.get("add_bos_token") is True else False


def _read_tokenizer_type(folder: Path) -> str | None:
    """The kind of tokenizer that an export of this project says it has."""
    path = folder / TOKENIZER_CONFIG_FILE
    tokenizer_type = _read_tokenizer_config(folder).get(TOKENIZER_TYPE_KEY)
    if tokenizer_type is not None and tokenizer_type not in get_args(TokenizerType):
        raise UserError(
            f"{path}: {TOKENIZER_TYPE_KEY} is {tokenizer_type!r}; "
            f"{format_choices(str(tokenizer_type), get_args(TokenizerType))}"
        )
    return tokenizer_type


def check_vocab_size(vocab_size: int, num_embeddings: int, source: Path) -> None:
    """Refuse a tokenizer with more tokens than the embedding has rows. Raises UserError."""
    if vocab_size > num_embeddings:
        raise UserError(
            f"{source}: the tokenizer has {vocab_size:,} tokens, but the embedding has {num_embeddings:,} rows; it "
            f"is another "
            "model's, or name the right one with --tokenizer"
        )


def check_parameter_count(source: ModelSource) -> None:
    """Refuse a configuration of more parameters than there can be in the files of weights, before so many layers are
    built that it takes a while; fewer are compared with the files one by one.

    Raises UserError.
    """
    config = source.build_config()
    if config.model.num_layers < MIN_LAYERS_TO_CHECK:
        return
    try:
        num_parameters = count_parameters(config, vocab_size=1)
    except UserError:  # an encoding whose parameters nobody has counted
        return
    weight_bytes = sum(path.stat().st_size for path in source.path.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    if num_parameters > weight_bytes > 0:  # no format has less than a byte for a parameter
        raise UserError(
            f"{source.path}: its configuration describes {num_parameters:,} parameters, but its files of weights have "
            f"{weight_bytes:,} bytes"
        )


def write_imported_run(source: ModelSource, run: Path, tokenizer: Tokenizer) -> ImportedRun:
    """Make the run.

    Raises:
        UserError: the model cannot be built.
        RunError: a file of the source is damaged or does not fit its configuration, or the disk refuses. Nothing is
            left then.
    """
    check_parameter_count(source)
    with (
        describe_write_errors(run),
        source.open_weights(source.build_config()) as weights,
        atomic_directory(run.resolve()) as new_folder,
    ):
        check_vocab_size(tokenizer.vocab_size, weights.num_embeddings, source.path)
        # The multiple that pads any number of tokens to these rows, whatever ranks can divide them.
        config = source.build_config(make_vocab_size_divisible_by=weights.num_embeddings)
        parameters = _write_run_files(new_folder, source, config, weights, tokenizer)
    return ImportedRun(run, config, parameters, tokenizer.name)


def _write_run_files(
    new_folder: Path, source: ModelSource, config: Config, weights: WeightReader, tokenizer: Tokenizer
) -> int:
    from megatron.checkpoint import layout, manifest, tensor_files
    from megatron.checkpoint.trainer_state import TrainerState
    from megatron.distributed.process_groups import single_process
    from megatron.model.build import build_model

    gpt = build_model(config.model, config.position, tokenizer.vocab_size, groups=single_process(), device="meta")
    tensor_headers = {
        name: tensor_files.TensorSpec(tuple(parameter.shape)) for name, parameter in gpt.named_parameters()
    }
    weights.check_names(list(tensor_headers))
    config_text = _format_config(source, config)
    (new_folder / layout.CONFIG).write_text(config_text, encoding="utf-8")
    save_tokenizer(tokenizer, new_folder)
    checkpoint = new_folder / layout.CHECKPOINTS / layout.format_checkpoint_name(0)
    checkpoint.mkdir(parents=True)
    weights_checksum = tensor_files.write_tensor_stream(
        checkpoint / layout.WEIGHTS,
        tensor_headers,
        _iter_checked_weights(source, weights, tensor_headers),
        {"step": "0"},
    )
    (checkpoint / layout.CONFIG).write_text(config_text, encoding="utf-8")
    vocabulary: dict[str, Any] = {"size": tokenizer.vocab_size, "name": tokenizer.name}
    if config.position.attention_mask == "document":
        vocabulary["eod"] = tokenizer.eod
    TrainerState(vocabulary=vocabulary).write(checkpoint)
    other_checksums = manifest.compute_checksums(checkpoint, [checkpoint / layout.CONFIG, checkpoint / layout.PROGRESS])
    manifest.write_manifest(checkpoint, {layout.WEIGHTS: weights_checksum} | other_checksums)
    return gpt.num_parameters()


def _iter_checked_weights(
    source: ModelSource, weights: WeightReader, tensor_headers: "Mapping[str, TensorSpec]"
) -> "Iterator[Tensor]":
    """The weights as the model wants them, one at a time."""
    import torch

    for name, tensor_header in tensor_headers.items():
        tensor = weights(name)
        if tuple(tensor.shape) != tensor_header.shape:
            raise RunError(
                f"{source.path}: {name} comes out as {list(tensor.shape)}, its configuration makes it "
                f"{list(tensor_header.shape)}"
            )
        weight = tensor.to(tensor_header.dtype)
        if not bool(torch.isfinite(weight).all()):
            raise RunError(f"{source.path}: {name} is not finite")
        yield weight


def _format_config(source: ModelSource, config: Config) -> str:
    """config.yml: what the model is, and nothing of how it was trained."""
    sections = (config.model, config.position)
    config_keys = {
        name: value for section in sections for name, value in section.model_dump(exclude_unset=True).items()
    }
    header = f"# A {source.format_name} model, imported. A training says the rest: train_iters, train_data_paths …"
    return f"{header}\n{dump_yaml(config_keys)}"
