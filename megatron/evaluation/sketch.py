"""What scoring a model will be, known from its configuration: its cost, and where its positions end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.config.schema import Config
from megatron.evaluation.subject import EvalTarget
from megatron.evaluation.subjects import build_eval_target_of_config
from megatron.model.device_dtype import check_backend
from megatron.options.evaluation import EvaluationOptions
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.model.gpt import GPT


@dataclass(frozen=True)
class EvalEstimate:
    """A configuration's model without weights, and what it will be asked."""

    model: GPT  # on the meta device: shapes alone
    flops: float  # of scoring it
    note: str | None
    """One line if the model's positions end before the largest length."""


def estimate_evaluation(name: str, config: Config, subject: EvalTarget, options: EvaluationOptions) -> EvalEstimate:
    """Build the model without weights. Raises UserError if it cannot be scored at any of the lengths."""
    model = build_meta_model(config, options)
    note = describe_length_limit(
        name, config, model, subject.max_tokens_per_batch
    )  # refuses what has no length to score
    return EvalEstimate(model, sum(subject.count_flops(model).values()), note)


def build_meta_model(config: Config, options: EvaluationOptions) -> GPT:
    """A configuration's model without weights. Raises UserError if the backend cannot do it."""
    from megatron.distributed.process_groups import single_process
    from megatron.model.build import build_model

    check_backend(options.backend)
    position = config.position
    if options.window is not None:
        position = position.replace(attention_window=options.window)
    return build_model(config.model, position, 1, groups=single_process(), device="meta", backend=options.backend)


def estimate_untrained(name: str, config: Config, options: EvaluationOptions) -> EvalEstimate:
    """The sketch of a model that is still to be trained. Raises what scoring it would."""
    return estimate_evaluation(name, config, build_eval_target_of_config(name, config, options), options)


def describe_length_limit(name: str, config: Config, model: GPT, lengths: Sequence[int]) -> str | None:
    """What is said of a model whose positions end before the largest length. Raises UserError if all are past them."""
    if model.max_length is None or max(lengths) <= model.max_length:
        return None
    key = "randomized_positions" if config.position.randomized_positions is not None else "max_position_embeddings"
    end = f"pos_emb {config.position.pos_emb} ends at {model.max_length:,} positions ({key})"
    known = [length for length in lengths if length <= model.max_length]
    if not known:
        raise UserError(
            f"{name}: {end}, length {min(lengths):,} is past it; use lengths up to {model.max_length:,} or leave it out"
        )
    return f"{end}; scored at lengths up to {max(known):,}"
