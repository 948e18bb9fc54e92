"""Loading a trained model for evaluation from its checkpoint.

Only `model.safetensors`, `config.yml` and `progress.json` are read, that is, tensors and text. No pickle is opened, so
a checkpoint from an untrusted source cannot run code here. The files are first verified against the checkpoint's
manifest: the two texts when the run is opened (`trained_run.py`), the weights here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.trained_run import TrainedRun, open_run
from megatron.checkpoint.weights import read_weights
from megatron.config.position_overrides import has_two_rotations, locate_rope_errors, override_position
from megatron.config.schema import Config
from megatron.distributed.process_groups import build_single_process_groups
from megatron.model.backend_choice import load_backend_choice
from megatron.model.build import build_model
from megatron.model.gpt import GPT
from megatron.options.position import PositionOptions
from megatron.utils.errors import RunError


@dataclass(frozen=True)
class LoadedModel:
    """Model in evaluation mode, and its origin."""

    model: GPT
    run: TrainedRun
    """Run that trained it, with its configuration and progress."""
    verified: bool
    """True if the files were verified by checksum. Checkpoints that predate manifests have no checksums."""
    position: PositionOptions
    """Position options of the model: those of the run, with the requested window, mask and temperature."""


def build_meta_model(
    config: Config, vocab_size: int, *, position: PositionOptions | None = None, backend: str | None = None
) -> GPT:
    """Build a model without weights in one process, to know its shapes, costs and limits.

    Args:
        config: configuration of a run.
        vocab_size: size of the tokenizer's vocabulary; 1 if it does not matter.
        position: position options, if they differ from the configuration's.
        backend: overrides attention_backend.

    Raises:
        UserError: the backend does not support the model.
    """
    position = config.position if position is None else position
    return build_model(
        config.model, position, vocab_size, groups=build_single_process_groups(), device="meta", backend=backend
    )


def load_model(
    run: TrainedRun | str | Path,
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
    """Rebuild the model of a run (its newest checkpoint) or of a specific checkpoint.

    Args:
        run: opened run, or the folder of a run or a checkpoint.
        device, dtype: device and data type of the weights; float32 preserves the stored values exactly.
        backend: overrides attention_backend. For auto without an override, a model on a GPU uses the backend that the
            self-check of its training selected on the same kind of GPU (`load_backend_choice`); no check is run here.
        window, attention_mask, attention_temperature, rope: override these options of the run (`override_position`);
            None keeps them.
        end_of_document: end-of-document token, needed to mask documents if the run was trained without document
            masking; other runs store it.

    Raises:
        UserError: there is no checkpoint, or the backend does not support this model.
        RunError: the checkpoint is damaged.
    """
    if not isinstance(run, TrainedRun):
        run = open_run(run)
    config, checkpoint, vocabulary = run.config, run.checkpoint, run.trainer_state.vocabulary
    manifest.verify_checkpoint(checkpoint, (layout.WEIGHTS,))
    if vocabulary is None:
        raise RunError(f"{checkpoint / layout.PROGRESS}: has no vocabulary")
    position = override_position(
        config.model,
        config.position,
        window=window,
        attention_mask=attention_mask,
        attention_temperature=attention_temperature,
        rope=rope,
    )
    is_auto = backend is None and config.model.attention_backend == "auto" and config.model.attention_check
    if is_auto and not has_two_rotations(position):  # training had one rotation, which more backends support
        backend = load_backend_choice(run.folder, torch.device(device), dtype)
    # Loading a model should not change the caller's random states.
    with torch.random.fork_rng(devices=[]), locate_rope_errors(rope):
        groups = build_single_process_groups()
        model = build_model(config.model, position, vocabulary["size"], groups=groups, backend=backend)
    read_weights(model, checkpoint / layout.WEIGHTS)
    if position.attention_mask == "document":
        model.end_of_document = vocabulary.get("eod", end_of_document)
    model = model.to(device=device).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # not the buffers: tables are float32 in training too
    return LoadedModel(model, run, manifest.has_checksums(checkpoint), position)
