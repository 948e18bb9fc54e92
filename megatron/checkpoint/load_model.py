"""A trained model, rebuilt for evaluation from what a checkpoint says of itself.

Only `model.safetensors`, `config.yml` and `progress.json` are read: tensors and text. No pickle is opened, so a
checkpoint from elsewhere cannot run code here. They are compared with the checkpoint's manifest first.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.checkpoint.weights import read_weights
from megatron.config.position_overrides import has_two_rotations, locate_rope_errors, override_position
from megatron.config.schema import Config
from megatron.distributed.process_groups import single_process
from megatron.model.backend_choice import recall_choice
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.options.position import PositionOptions
from megatron.utils.errors import RunError


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode and where it comes from."""

    model: GPT
    config: Config
    """Of the run that trained it."""
    trainer_state: dict[str, Any]
    """`progress.json`: step, consumed samples and tokens, vocabulary."""
    checkpoint: Path
    verified: bool
    """Were the files compared with checksums? Checkpoints from before there were manifests carry none."""
    position: PositionOptions
    """Of the model as it was rebuilt: the run's, with the window, the mask and the temperature asked for."""


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
    window: int | None = None,
    attention_mask: Literal["causal", "document"] | None = None,
    attention_temperature: str | None = None,
    rope: str | None = None,
    end_of_document: int | None = None,
) -> LoadedModel:
    """Rebuild the model of a run (its newest checkpoint) or of one checkpoint.

    Args:
        path: a run's folder or a checkpoint's.
        device, dtype: where the model goes and the type of its weights; float32 holds what was stored exactly.
        backend: overrides attention_backend. Where that is auto and nothing overrides it, a model on a GPU is computed
            as the check of its training found best, if that was on such a card (`recall_choice`); nothing is checked.
        window, attention_mask, attention_temperature, rope: override what the run has of these (`override_position`);
            None keeps it.
        end_of_document: the token that ends documents, of a run that was not trained with documents apart and is to
            keep them so; the others know it.

    Raises:
        UserError: there is no checkpoint, or the backend cannot do this model.
        RunError: the checkpoint is damaged.
    """
    checkpoint = layout.resolve_checkpoint_path(path)
    manifest.verify_checkpoint(checkpoint, manifest.MODEL_FILES)
    trainer_state = TrainerState.read(checkpoint)
    config = load_checkpoint_config(checkpoint)
    if trainer_state.vocabulary is None:
        raise RunError(f"{checkpoint / layout.PROGRESS}: says nothing of the vocabulary")
    position = override_position(
        config.model,
        config.position,
        window=window,
        attention_mask=attention_mask,
        attention_temperature=attention_temperature,
        rope=rope,
    )
    is_auto = backend is None and config.model.attention_backend == "auto" and config.model.attention_check
    if is_auto and not has_two_rotations(position):  # of which the training had one, which more backends can do
        backend = recall_choice(layout.get_run_of_checkpoint(checkpoint), torch.device(device), dtype)
    # Whoever loads a model to look at it should not find the random states changed.
    with torch.random.fork_rng(devices=[]), locate_rope_errors(rope):
        size = trainer_state.vocabulary["size"]
        model = build_model(config.model, position, size, groups=single_process(), backend=backend)
    read_weights(model, checkpoint / layout.WEIGHTS)
    if position.attention_mask == "document":
        model.end_of_document = trainer_state.vocabulary.get("eod", end_of_document)
    model = model.to(device=device).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not the buffers: tables are float32 in training too
    return LoadedModel(model, config, asdict(trainer_state), checkpoint, manifest.has_checksums(checkpoint), position)
