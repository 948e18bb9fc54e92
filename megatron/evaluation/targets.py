"""Which target models are asked about (a text, the task that they learned, or a probe), and what that will cost.

Everything else of an evaluation is the same for all of them (`run.py`): opening runs, saying what it costs, loading,
writing results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.checkpoint.trained_run import TrainedRun
from megatron.config.position_overrides import list_overrides, locate_rope_errors, override_position
from megatron.config.schema import Config
from megatron.data.load_tokenizer import load_data_tokenizer, load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.eval_target import EvalTarget, ScoringContext
from megatron.evaluation.jobs import check_end_of_document
from megatron.evaluation.key_tokens import KeyTokenFile, open_key_tokens
from megatron.evaluation.lengths import choose_lengths, limit_lengths
from megatron.evaluation.loss_records import check_measures
from megatron.evaluation.probes.passkey import Passkey
from megatron.evaluation.probes.probe import Probe
from megatron.evaluation.probes.repeated import RepeatedTokens
from megatron.evaluation.protocols import ScoringPlan, plan_from_options
from megatron.evaluation.task_eval import build_task_eval, is_task_run
from megatron.evaluation.texts import EvalText, check_tokenizer, load_common_text, load_text
from megatron.model.device_dtype import check_backend
from megatron.options.evaluation import LOSS_OPTIONS, EvaluationOptions, refuse_choices_of_text, refuse_task_options
from megatron.reports.records import Record
from megatron.utils.errors import UserError

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

PROBES: dict[str, type[Probe]] = {probe.name: probe for probe in (RepeatedTokens, Passkey)}
"""By the names of their protocols, which `megatron.options.evaluation` has for the command line."""

DEFAULT_PROBE_SEQUENCES = 64
"""For each value on the axis of each length, unless said otherwise."""


@dataclass(frozen=True)
class TextEval:
    """A text, the plan that says which of its tokens are scored, and the measures that are reported of their losses."""

    text: EvalText
    plan: ScoringPlan
    measures: Sequence[str]
    smoothing: int | None = None
    key_tokens: KeyTokenFile | None = None

    @property
    def sequence_lengths(self) -> Sequence[int]:
        return self.plan.lengths

    def count_flops(self, model: GPT) -> dict[int, float]:
        return self.plan.count_flops(model)

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        from megatron.evaluation.perplexity import evaluate_perplexity

        return evaluate_perplexity(
            loaded,
            self.text,
            self.plan,
            scoring,
            self.measures,
            smoothing=self.smoothing,
            key_tokens=self.key_tokens,
        )

    def build_baseline_records(self) -> list[Record]:
        return []

    def describe_documents(self, trained: str, asked: str | None) -> str | None:
        """A line on how much of its context a model sees that keeps documents apart, or that it does not any more; None
        where attention crosses documents as in training.

        Args:
            trained: the run's attention_mask.
            asked: of the evaluation; None for the run's.

        Raises:
            UserError: the text's tokenizer cannot tell documents apart.
        """
        if (asked or trained) == "causal":
            return None if trained == "causal" else "attention crosses documents, unlike in training"
        import torch

        from megatron.attention.documents import find_document_starts

        length, vocabulary = self.plan.lengths[-1], self.text.vocabulary
        eod = check_end_of_document(vocabulary.name, vocabulary.eod)
        seen = []
        for start in self.plan.starts[length].tolist():
            window = torch.from_numpy(np.asarray(self.text.tokens[start : start + length]).astype(np.int64))
            own = torch.arange(1, length + 1) - find_document_starts(window, eod)
            seen.append(float(own[-self.plan.num_scored(length) :].double().mean()))
        how = "as" if trained == "document" else "unlike"
        return (
            f"documents are kept apart, {how} in training: at length {length:,} a scored token is predicted from "
            f"{sum(seen) / len(seen):,.0f} tokens of its own document on average"
        )


def build_eval_target(runs: Sequence[TrainedRun], options: EvaluationOptions) -> EvalTarget:
    """The target that runs are asked about.

    Raises:
        UserError: they cannot be put side by side, or cannot be asked what the options say.
        RunError: a text's files are damaged.
    """
    configs = [run.config for run in runs]
    if is_task_run(runs):
        return build_task_eval(options, configs)
    refuse_task_options(options)
    if options.protocol in PROBES:
        tokenizers = [load_run_tokenizer(run.folder, run.config.data, run.tokenizer_name) for run in runs]
        for run, tokenizer in zip(runs, tokenizers, strict=True):
            check_tokenizer(run.name, tokenizer.name, runs[0].name, tokenizers[0].name)
        return _build_probe_for(configs, options, tokenizers[0])
    return _build_text_eval(options, configs, load_common_text(runs, options.data))


def build_eval_target_of_config(name: str, config: Config, options: EvaluationOptions) -> EvalTarget:
    """The target of a model that is still to be trained. Raises as `build_eval_target`."""
    if options.find_key_tokens:
        raise UserError("find_key_tokens: one run fixes the key tokens, with evaluate; a sweep reads key_tokens")
    if config.data.task is not None:
        return build_task_eval(options, [config])
    refuse_task_options(options)
    if options.protocol in PROBES:
        return _build_probe_for([config], options, load_data_tokenizer(config.data))
    return _build_text_eval(options, [config], load_text(name, config, options.data))


def _build_text_eval(options: EvaluationOptions, configs: Sequence[Config], text: EvalText) -> EvalTarget:
    for name in ("depths", "effective_score"):
        if getattr(options, name) is not None:
            raise UserError(f"{name}: a needle map is of protocol passkey, or of a task that was learned; leave it out")
    plan = plan_from_options(options, [config.model.seq_length for config in configs], len(text.tokens))
    check_measures(options, plan)
    key_tokens = open_key_tokens(options, text, plan)
    return TextEval(text, plan, options.measures or ("perplexity",), options.smoothing, key_tokens)


def _build_probe_for(configs: Sequence[Config], options: EvaluationOptions, tokenizer: Tokenizer) -> EvalTarget:
    return build_probe(options, choose_lengths(options, [config.model.seq_length for config in configs]), tokenizer)


def build_probe(options: EvaluationOptions, lengths: Sequence[int], tokenizer: Tokenizer) -> Probe:
    """The probe that options ask for.

    Args:
        options: protocol, windows, and what the probe takes besides.
        lengths: of windows, in tokens, ascending.
        tokenizer: of the models.

    Raises:
        UserError: an option that says which text is scored, or lengths that are too short.
    """
    unused = ("data", "stride", "min_context", "measures", "attention_mask", *LOSS_OPTIONS)
    refuse_choices_of_text(options, unused, f"protocol {options.protocol} makes its own")
    num_sequences = options.windows or DEFAULT_PROBE_SEQUENCES
    probe = PROBES[options.protocol].from_options(options, lengths, num_sequences, tokenizer)
    probe.check_lengths()
    return probe


@dataclass(frozen=True)
class EvalEstimate:
    """A configuration's model without weights, and what scoring it will cost."""

    model: GPT  # on the meta device: shapes alone
    flops: float  # of scoring it
    note: str | None
    """One line if the model's positions end before the largest length, or it keeps documents apart."""


def estimate_evaluation(name: str, config: Config, target: EvalTarget, options: EvaluationOptions) -> EvalEstimate:
    """Build the model without weights. Raises UserError if it cannot be scored at any of the lengths."""
    model = build_meta_model(config, options)
    notes = [describe_length_limit(name, config, model, target.sequence_lengths)]  # refuses what has none to score
    if isinstance(target, TextEval):
        notes.append(target.describe_documents(config.position.attention_mask, options.attention_mask))
    return EvalEstimate(model, sum(target.count_flops(model).values()), "; ".join(filter(None, notes)) or None)


def estimate_untrained(name: str, config: Config, options: EvaluationOptions) -> EvalEstimate:
    """The estimate for a model that is still to be trained. Raises what scoring it would."""
    return estimate_evaluation(name, config, build_eval_target_of_config(name, config, options), options)


def build_meta_model(config: Config, options: EvaluationOptions) -> GPT:
    """A configuration's model without weights. Raises UserError if the backend cannot do it."""
    from megatron.distributed.process_groups import single_process
    from megatron.model.build import build_model

    check_backend(options.backend)
    position = override_position(config.model, config.position, **list_overrides(options))
    with locate_rope_errors(options.rope):
        return build_model(config.model, position, 1, groups=single_process(), device="meta", backend=options.backend)


def describe_length_limit(name: str, config: Config, model: GPT, lengths: Sequence[int]) -> str | None:
    """A line on a model whose positions end before the largest length. Raises UserError if all are past them."""
    key = "randomized_positions" if config.position.randomized_positions is not None else "max_position_embeddings"
    limit = f"pos_emb {', '.join(config.position.encodings)} ends at {model.max_length or 0:,} positions ({key})"
    supported = limit_lengths(lengths, model.max_length, reason=f"{name}: {limit}")
    return None if max(lengths) in supported else f"{limit}; scored at lengths up to {supported[-1]:,}"
