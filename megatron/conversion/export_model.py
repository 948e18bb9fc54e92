"""`./deepy.py export RUN DIR`: export a checkpoint to a folder that transformers loads.

Weights are renamed to the family's names and written to one or more files; at most one file is in memory at a time.
The model card (README.md) describes architecture, training and results, and how to load the model.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron.checkpoint import manifest
from megatron.checkpoint.layout import WEIGHTS
from megatron.checkpoint.manifest import map_to_stored_names
from megatron.checkpoint.trained_run import TrainedRun
from megatron.config.schema import Config
from megatron.conversion.export_request import ExportRequest, read_export_request
from megatron.conversion.families.farfield import (
    AUTO_MAP,
    CHECKSUMS_FILE,
    find_longest_input,
)
from megatron.conversion.hf_tokenizer import write_hf_tokenizer
from megatron.conversion.model_family import HF_CONFIG_FILE, ModelFamily, WeightMapping
from megatron.conversion.modeling_code import add_content_digest, bundle_modeling_code
from megatron.data.load_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.options.model import get_ffn_hidden_size, get_padded_vocab_size
from megatron.reports.comparison_table import ComparisonTable, build_comparison_tables
from megatron.reports.depth_maps import split_depth_maps
from megatron.reports.html_page import render_template
from megatron.reports.records import RESULTS_FILE, Record, read_records
from megatron.reports.table_formats import render_comparison_markdown
from megatron.utils.atomic_directory import atomic_directory, describe_write_errors
from megatron.utils.errors import RunError, describe_cause
from megatron.utils.formatting import format_count, format_quantity

WEIGHTS_INDEX_FILE = "model.safetensors.index.json"

_SAFETENSORS_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
PLOT_FILE = "results.png"
CARD_TEMPLATE = Path(__file__).parent / "templates" / "model_card.md"


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
    """Export a model for transformers atomically.

    Args:
        source: folder of a run (its newest checkpoint) or of a checkpoint.
        target: folder to create.
        native: use a model class of transformers that computes the same results; otherwise the code is included.
        dtype: data type of the weights: float32 (exactly as stored), bfloat16 or float16.
        max_shard_size: maximum size of a weight file, such as 2GB; also the memory used for weights.
        license: license of the weights, for the model card.
        overwrite: replace an existing export.

    Raises:
        UserError: as for `read_export_request`.
        RunError: as for `write_export`.
    """
    return write_export(
        read_export_request(
            source,
            target,
            native=native,
            dtype=dtype,
            max_shard_size=max_shard_size,
            license=license,
            overwrite=overwrite,
        ),
        log,
    )


def write_export(request: ExportRequest, log: Callable[[str], object] = print) -> Path:
    """Write an export and return its folder.

    Raises:
        RunError: the checkpoint is damaged, the disk fails, or another command created the folder meanwhile.
    """
    run, target, family, dtype = request.run, request.target, request.family, request.dtype
    native = request.is_native
    if (problem := manifest.find_damage(run.checkpoint, manifest.MODEL_FILES)) is not None:
        raise RunError(f"{run.checkpoint}: damaged: {problem}")
    tokenizer = load_run_tokenizer(run.folder, run.config.data, run.tokenizer_name)
    weights = HFWeights(
        run.checkpoint / WEIGHTS, family, run.config, None if dtype == "float32" else getattr(torch, dtype)
    )
    with describe_write_errors(target), atomic_directory(target.resolve(), replaces=request.replaced_version) as folder:
        auto_map_keys = {} if native else {"auto_map": _write_code(run, folder)}
        longest_input = run.config.model.seq_length if native else find_longest_input(run.config)
        padding_id = write_hf_tokenizer(tokenizer, folder, longest_input)
        _write_configs(run, tokenizer, family, dtype, folder, {"pad_token_id": padding_id}, auto_map_keys)
        write_shards(weights, folder, request.max_shard_bytes)
        manifest.write_manifest(
            folder, manifest.compute_checksums(folder, folder.glob("*.safetensors")), CHECKSUMS_FILE
        )
        page, plot = render_model_card(
            run, tokenizer, family, num_parameters=weights.num_parameters, license=request.license, title=target.name
        )
        write_model_card(folder, page, plot)
    total_bytes = sum(path.stat().st_size for path in target.iterdir())
    log(
        f"{target}: {weights.num_parameters:,} parameters in {dtype}, {total_bytes / 1e6:,.1f} MB, step "
        f"{run.trainer_state.step:,}" + (f", as {family.architecture} of transformers" if native else "")
    )
    flag = "" if native else ", trust_remote_code=True"
    log(f"load it with AutoModelForCausalLM.from_pretrained({str(target)!r}{flag})")
    if family.known_difference is not None:
        log(f"note: {family.known_difference}")
    if run.config.position.attention_mask == "document" and native:
        log(f"note: {describe_native_documents(family)}")
    return target


def _write_code(run: TrainedRun, folder: Path) -> dict[str, str]:
    """Write the code of a model and return its classes (`auto_map`)."""
    position = run.config.position
    files, suffix = add_content_digest(
        bundle_modeling_code(position.encodings, position.processors, position.temperatures)
    )
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return {auto_class: name.replace(".", f"{suffix}.") for auto_class, name in AUTO_MAP.items()}


def _write_configs(
    run: TrainedRun,
    tokenizer: Tokenizer,
    family: ModelFamily,
    dtype: str,
    folder: Path,
    padding_keys: dict[str, Any],
    auto_map_keys: dict[str, Any],
) -> None:
    """Write config.json and generation_config.json. Vocabulary padding is never sampled."""
    num_embeddings = get_padded_vocab_size(run.config.model, tokenizer.vocab_size)
    common_keys = {
        "eos_token_id": tokenizer.eod,
        **padding_keys,
        "use_cache": run.config.position.randomized_positions is None,
    }
    own_keys = {} if not auto_map_keys else {"document_end_token_id": _find_document_end(run, tokenizer)}
    padding_ids = list(range(tokenizer.vocab_size, num_embeddings))
    # transformers 4 names it torch_dtype; 5 accepts both names.
    _write_json(
        folder / HF_CONFIG_FILE,
        family.to_hf_config(
            run.config,
            num_embeddings,
            torch_dtype=dtype,
            bos_token_id=tokenizer.bos,
            **common_keys,
            **own_keys,
            **auto_map_keys,
        ),
    )
    _write_json(
        folder / "generation_config.json", {**common_keys, **({"suppress_tokens": padding_ids} if padding_ids else {})}
    )


def _find_document_end(run: TrainedRun, tokenizer: Tokenizer) -> int | None:
    """Return the end-of-document token of a run trained with document masking, or None."""
    if run.config.position.attention_mask != "document":
        return None
    return (run.trainer_state.vocabulary or {}).get("eod", tokenizer.eod)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class HFWeights:
    """Weights of a checkpoint under a family's names, read on demand.

    Args:
        path: model.safetensors of a checkpoint.
        family: family that defines the names; it must support the configuration.
        config: configuration of the checkpoint.
        dtype: data type to convert to; None keeps the stored type.

    Raises:
        RunError: the file cannot be read, or its weights do not match the configuration.
    """

    def __init__(self, path: Path, family: ModelFamily, config: Config, dtype: torch.dtype | None = None) -> None:
        self.path, self.dtype = path, dtype
        mappings = list(family.weight_mappings(config))
        self._mappings = {name: mapping for mapping in mappings for name in mapping.hf_names}
        with self._open_file() as file:
            self._stored_names = map_to_stored_names(path.parent, file.keys())
            stored = {name: file.get_slice(stored_name) for name, stored_name in self._stored_names.items()}
            if unmatched := set(stored) ^ {mapping.megatron_name for mapping in mappings}:
                raise RunError(f"{path}: does not match its configuration: {min(unmatched)} is only in one of them")
            self._shapes = {
                name: (tensor_slice.get_shape(), _SAFETENSORS_DTYPES[tensor_slice.get_dtype()])
                for name, tensor_slice in stored.items()
            }

    @contextmanager
    def _open_file(self) -> Iterator[Any]:
        """Open the file for one weight at a time: its data counts as this process's memory until it is closed."""
        try:
            with safe_open(self.path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise RunError(f"{self.path}: cannot be read as safetensors ({error})") from None

    @property
    def num_parameters(self) -> int:
        """Total number of parameters."""
        return sum(math.prod(shape) for shape, _ in self._shapes.values())

    def __getitem__(self, name: str) -> Tensor:
        mapping = self._mappings[name]
        with self._open_file() as file:
            tensor = file.get_tensor(self._stored_names[mapping.megatron_name])
        tensor = tensor if self.dtype is None else tensor.to(self.dtype)
        return mapping.transform.to_hf(tensor)[mapping.hf_names.index(name)]

    def get_tensor_sizes(self) -> dict[str, int]:
        """Return the size of each weight as it will be written, in bytes."""
        hf_tensors = {
            mapping.megatron_name: mapping.transform.to_hf(self._make_meta_tensor(mapping))
            for mapping in self._mappings.values()
        }
        return {
            name: hf_tensors[mapping.megatron_name][mapping.hf_names.index(name)].nbytes
            for name, mapping in self._mappings.items()
        }

    def _make_meta_tensor(self, mapping: WeightMapping) -> Tensor:
        """Return a tensor like the stored one on the meta device."""
        shape, dtype = self._shapes[mapping.megatron_name]
        return torch.empty(shape, dtype=self.dtype or dtype, device="meta")


def write_shards(weights: HFWeights, folder: Path, max_shard_bytes: int) -> None:
    """Write weights to as many files as needed, and an index if there are several.

    Args:
        folder: output folder that already contains config.json, whose file mode the weights get.
        max_shard_bytes: maximum file size in bytes; a single weight may be larger.

    Raises RunError if the checkpoint cannot be read, and OSError if the disk fails.
    """
    sizes: Mapping[str, Any] = weights.get_tensor_sizes()
    split = split_state_dict_into_shards_factory(
        dict(sizes),  # the planner asks only for sizes
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        shard = {name: weights[name].contiguous() for name in names}
        try:
            save_file(shard, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(describe_cause(error)) from error
        shutil.copymode(folder / HF_CONFIG_FILE, folder / file)  # safetensors restricts the file to its owner
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(split.tensor_to_filename.items()))}
        (folder / WEIGHTS_INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def render_model_card(
    run: TrainedRun, tokenizer: Tokenizer, family: ModelFamily, *, num_parameters: int, license: str | None, title: str
) -> tuple[str, bytes | None]:
    """Return the page, and a plot of the results if there are any.

    Args:
        family: family of the export.
        num_parameters: number of parameters of the model.
        license: license of the weights; None if not given.
        title: name of the model.
    """
    records = _read_results(run)
    all_tables = build_comparison_tables(records)
    tables, depth_maps = split_depth_maps(all_tables)
    page = render_template(
        CARD_TEMPLATE,
        license=license,
        title=title,
        num_parameters=format_count(num_parameters),
        position=run.config.position,
        train_length=run.config.model.seq_length,
        family=family,
        native_documents=describe_native_documents(family),
        tables=[
            *map(render_comparison_markdown, tables),
            *(depth_map.build_text_table().to_markdown() for depth_map in depth_maps),
        ],
        plot_file=PLOT_FILE,
        settings=_list_settings(run, tokenizer),
    )
    return page, _render_plot(all_tables) if records else None


def describe_native_documents(family: ModelFamily) -> str:
    """Return a sentence for a native transformers model whose run was trained with document masking."""
    return (
        "this model was trained with attention_mask: document, but the native transformers class "
        f"{family.architecture} treats a row as one document; put each document in its own row, or pass position_ids "
        "that restart"
    )


def _read_results(run: TrainedRun) -> list[Record]:
    path = run.folder / RESULTS_FILE
    return read_records(path) if path.is_file() else []


def _render_plot(tables: Sequence[ComparisonTable]) -> bytes:
    from megatron.reports.plots import render_plots_png  # importing matplotlib is slow

    return render_plots_png(tables)


def _list_settings(run: TrainedRun, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    model, training, trainer_state = run.config.model, run.config.training, run.trainer_state
    heads = format_quantity(model.num_attention_heads, "head")
    architecture = f"{format_quantity(model.num_layers, 'layer')}, width {model.hidden_size:,}, {heads}"
    position = run.config.position
    options = {
        "encoding options": position.pos_emb_options,
        "score processor options": position.score_processor_options,
        "temperature options": position.attention_temperature_options,
    }
    rows = [
        ("shape", f"{architecture}, feed-forward {get_ffn_hidden_size(model):,}, {model.activation}, {model.norm}"),
        *(
            (title, ", ".join(f"{name} = {value}" for name, value in chosen.items()))
            for title, chosen in options.items()
            if chosen
        ),
        ("tokenizer", f"{tokenizer.name}, {tokenizer.vocab_size:,} tokens"),
    ]
    if trainer_state.step:
        optimizer, batch_size = run.config.optimizer, training.train_batch_size
        rows += [
            ("steps", f"{trainer_state.step:,}"),
            ("tokens seen", f"{trainer_state.consumed_tokens:,}"),
            ("batch", format_quantity(batch_size, "sequence") if batch_size else "as configured"),
            ("precision", training.compute_dtype),
            ("optimizer", f"{optimizer.optimizer.type}, learning rate {optimizer.optimizer.params.lr:g}"),
        ]
    return rows


def write_model_card(folder: Path, page: str, plot: bytes | None) -> None:
    """Write README.md and its plot."""
    (folder / "README.md").write_text(page, encoding="utf-8", errors="replace")  # names may not be valid UTF-8
    if plot is not None:
        (folder / PLOT_FILE).write_bytes(plot)
