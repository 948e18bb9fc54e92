"""Checkpoints of GPT-NeoX, and of KERPLE and DAPE, which are based on it, with any tensor-parallel size.

    RUN/latest                                        name of the newest checkpoint
    RUN/global_step1000/layer_03-model_01-model_states.pt    one layer's shard of one tensor-parallel rank
    RUN/global_step1000/mp_rank_01_model_states.pt           or all layers', under `module`, as `sequential.3.…`
    RUN/global_step1000/configs/*.yml                 the configuration, if it was saved (`--config` sets others)

`neox_weights.py` defines the names of tensors and merges the shards of several ranks.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.load import merge_documents
from megatron.config.neox_keys import RULES
from megatron.config.neox_rules import MODEL_SECTIONS
from megatron.config.schema import Config, map_key_owners
from megatron.config.yaml_files import YamlDocument, read_yaml
from megatron.conversion.model_family import ModelSource
from megatron.conversion.neox_weights import (
    FC1_NAMES,
    IGNORED_TENSORS,
    NEOX_EMBEDDING,
    NeoxWeight,
    TensorParallelShards,
    list_neox_encoding_weights,
    list_neox_weights,
)
from megatron.options.model import GATED_ACTIVATIONS, compute_intermediate_size, get_ffn_hidden_size
from megatron.utils.errors import RunError, UserError, shorten_text

if TYPE_CHECKING:
    from torch import Tensor

LATEST_FILE, CONFIGS_FOLDER = "latest", "configs"
MAX_LATEST_CHARS = 4096
"""Maximum number of characters read from `latest`, which contains a name."""

NEOX_TRAINING_KEYS = {
    "init_method", "output_layer_init_method", "init_method_std", "hidden_dropout", "attention_dropout",
    "checkpoint_activations", "checkpoint_num_layers", "attention_backend", "attention_chunk_rows", "compile_regions",
    "make_vocab_size_divisible_by",
}  # fmt: skip
"""Model keys that do not affect trained weights."""
UNSUPPORTED_MODEL_KEYS = (
    "sparsity_config", "sparse_attention", "num_unique_layers", "opt_pos_emb_offset", "soft_prompt_tuning",
    "moe_num_experts", "use_mup",
)  # fmt: skip
"""Keys that are rejected in training configurations and change what the weights compute."""


def find_neox_checkpoint(path: Path) -> Path | None:
    """Return the GPT-NeoX checkpoint in a folder, or the folder itself if it is one, or None."""
    if (path / LATEST_FILE).is_file():
        with open(path / LATEST_FILE, encoding="utf-8", errors="replace") as file:
            name = file.read(MAX_LATEST_CHARS).strip()
        if name and Path(name).name == name and os.path.isdir(path / name):
            return path / name
        if not _has_state_files(path):
            raise UserError(f"{path / LATEST_FILE}: names {shorten_text(name)!r}, but this folder does not exist")
    return path if _has_state_files(path) else None


def _has_state_files(path: Path) -> bool:
    """Return True if a folder contains checkpoint files."""
    return any(any(path.glob(pattern)) for pattern in ("*_model_states.pt", "layer_*-model_*-model_states.pt"))


def read_neox_source(checkpoint: Path, configs: Sequence[Path] = ()) -> ModelSource:
    """Read the description of a checkpoint from its configuration.

    Args:
        checkpoint: folder of the checkpoint.
        configs: configuration files; those saved with the checkpoint if empty.

    Raises UserError if there is no configuration or it is not supported, with the key.
    """
    files = list(configs) or sorted((checkpoint / CONFIGS_FOLDER).glob("*.y*ml"))
    if not files:
        raise UserError(
            f"{checkpoint}: contains no {CONFIGS_FOLDER}/*.yml; specify the model's configuration with --config"
        )
    documents = [read_yaml(path) for path in files]
    loaded = merge_documents([_select_model_keys(document) for document in documents])
    config = loaded.config
    if config.model.use_qk_layernorm:
        raise UserError(
            f"{checkpoint}: use_qk_layernorm: true: not supported; GPT-NeoX normalizes the heads of a rank together, "
            "and queries and keys with one norm"
        )
    if (patterns := config.position.list_patterns()) and set(patterns) != {"attention_window"}:
        raise UserError(
            f"{checkpoint}: {', '.join(patterns)} differ between layers in its configuration, which is not possible in "
            "GPT-NeoX"
        )
    sections = (config.model, config.position)
    keys = {name: value for section in sections for name, value in section.model_dump(exclude_unset=True).items()}
    keys.pop("mlp_multiple_of", None)
    if config.model.norm == "rmsnorm" and not _has_fused_rmsnorm(documents):
        # GPT-NeoX divides by rms + ε, which √(rms² + ε²) equals up to a factor of 1 + ε/rms. √(rms² + ε) may not.
        keys["rms_norm_epsilon"] = config.model.rms_norm_epsilon**2
    notes = loaded.notes
    if (activation := config.model.activation) in GATED_ACTIVATIONS:
        ffn_size = _read_gated_ffn_size(checkpoint)
        keys["intermediate_size"] = compute_intermediate_size(ffn_size, activation)
        if (configured_size := get_ffn_hidden_size(config.model)) != ffn_size:
            notes = (
                *notes,
                f"{checkpoint}: using the feed-forward width of its weights, {ffn_size}, not {configured_size}",
            )
    return ModelSource(checkpoint, "GPT-NeoX", keys, partial(_open_weights, checkpoint), None, notes)


def _has_fused_rmsnorm(documents: Sequence[YamlDocument]) -> bool:
    """Return True if a configuration selects a kernel for its rmsnorm, which adds ε to the mean square as we do."""
    values = {name.replace("-", "_"): value for document in documents for name, value in document.values.items()}
    return values.get("norm") == "te_rmsnorm" or values.get("rmsnorm_fusion") is True


def _read_gated_ffn_size(checkpoint: Path) -> int:
    """Return the width of gated layers from the weights; versions of GPT-NeoX define it differently."""
    shards = TensorParallelShards(checkpoint)
    return shards.count_rows(f"{shards.select_module(2, FC1_NAMES)}.weight") // 2


def _select_model_keys(document: YamlDocument) -> YamlDocument:
    """Return the configuration with only the keys that describe the model, without training keys."""
    model_values = {name: value for name, value in document.values.items() if _is_model_key(name.replace("-", "_"))}
    return YamlDocument(document.source, model_values, document.lines)


def _is_model_key(name: str) -> bool:
    if (rule := RULES.get(name)) is not None:
        return rule.describes_model() or name in UNSUPPORTED_MODEL_KEYS
    return map_key_owners().get(name) in MODEL_SECTIONS and name not in NEOX_TRAINING_KEYS


@contextmanager
def _open_weights(checkpoint: Path, config: Config) -> "Iterator[NeoxWeightReader]":
    yield NeoxWeightReader(checkpoint, config)


class NeoxWeightReader:
    """Reader of a checkpoint's weights by our names."""

    def __init__(self, checkpoint: Path, config: Config) -> None:
        self.checkpoint, self.config, self.shards = checkpoint, config, TensorParallelShards(checkpoint)
        self.weights = {weight.megatron_name: weight for weight in list_neox_weights(config, self.shards)}
        self.num_embeddings = self.shards.count_rows(NEOX_EMBEDDING)

    def check_names(self, names: list[str]) -> None:
        used_names = set()
        for name in names:
            for neox_name in self._get_weight(name).neox_names:
                self.shards.check_name(neox_name)
                used_names.add(neox_name)
        if not self.config.position.pos_emb_per_layer:
            self._check_shared_encoding()
        expected_names = used_names | self._list_unread_names(used_names)
        unused = [
            name
            for name in self.shards.names
            if name not in expected_names
            and not IGNORED_TENSORS.fullmatch(name)
            and not IGNORED_TENSORS.fullmatch(name.partition(".")[2])
        ]
        if unused:
            more_text = f", and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise RunError(
                f"{self.checkpoint}: contains {unused[0]}{more_text}, which a model with its configuration does not "
                "have; it would be dropped"
            )

    def __call__(self, name: str) -> "Tensor":
        weight = self._get_weight(name)
        try:
            tensors = [weight.merge(self.shards[neox_name]) for neox_name in weight.neox_names]
            return weight.convert(*tensors) if weight.convert is not None else tensors[0]
        except (RuntimeError, ValueError, IndexError) as error:
            message = str(error).splitlines()[0]
            raise RunError(
                f"{self.checkpoint}: the shards of {weight.neox_names[0]} do not match its configuration ({message})"
            ) from None

    def _get_weight(self, name: str) -> NeoxWeight:
        if name not in self.weights:
            encodings = ", ".join(sorted(list_neox_encoding_weights(self.config)))
            raise UserError(
                f"{self.checkpoint}: pos_emb {self.config.position.pos_emb} cannot be imported from GPT-NeoX files; "
                f"supported encodings with weights: {encodings}"
            )
        return self.weights[name]

    def _list_unread_names(self, used_names: set[str]) -> set[str]:
        """Return the names of tensors in a checkpoint that are not needed."""
        model = self.config.model
        suffixes = {name.partition(".")[2] for name in used_names if name.startswith("2.")}
        # Copies of shared weights in the other layers' files.
        names = {f"{number}.{suffix}" for number in self._layer_numbers() for suffix in suffixes}
        if not model.no_weight_tying:  # copy for the last stage
            names.add(f"{model.num_layers + 4}.final_linear.weight")
        if model.gpt_j_tied:  # created but never used
            modules = tuple(f"{number}.post_attention_layernorm." for number in self._layer_numbers())
            names |= {name for name in self.shards.names if name.startswith(modules)}
        return names

    def _check_shared_encoding(self) -> None:
        """Check that a shared encoding is the same in every layer's file."""
        first, *others = (
            {
                suffix: name
                for suffix, name in self.shards.find_position_tensors(number).items()
                if "mlp2." not in suffix
            }
            for number in self._layer_numbers()
        )
        for other in others:
            for suffix, name in other.items():
                pairs = zip(self.shards[name], self.shards[first.get(suffix, name)], strict=True)
                if suffix not in first or not all(a.equal(b) for a, b in pairs):
                    raise RunError(
                        f"{self.checkpoint}: {name} differs from that of layer 2, but its configuration has "
                        "pos_emb_per_layer: false; use a configuration with true via --config"
                    )

    def _layer_numbers(self) -> range:
        return range(2, self.config.model.num_layers + 2)
