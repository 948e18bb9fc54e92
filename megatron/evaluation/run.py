"""`./deepy.py evaluate RUN…`: score trained runs, and write records, a table, and files.

Each model is rebuilt from the configuration in its checkpoint. All runs are scored on the same tokens of the same text
by the same protocol. Incompatible runs (other tokenizers, other data) are rejected before the first model is loaded. A
model with limited positions is scored on the same targets up to its maximum length, and a note reports this. Files are
written after each run, so that results survive a later failure. Results of other runs, protocols, and texts in the
folder are kept.

`build_eval_target` selects the target: a text, the task that the runs were trained on, or a probe (`harness_tasks.py`
builds that of `--tasks`). The rest of an evaluation does not depend on it: opening runs, estimating cost, loading, and
writing results (`jobs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from megatron.checkpoint.trained_run import TrainedRun
from megatron.config.position_overrides import list_overrides, locate_rope_errors, override_position
from megatron.config.schema import Config
from megatron.data.load_tokenizer import load_data_tokenizer, load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.eval_target import EvalTarget, ProgressCallback, ScoringContext, choose_lengths, limit_lengths
from megatron.evaluation.jobs import (
    EvalRequest,
    build_eval_jobs,
    check_end_of_document,
    describe_output_folder,
    make_log_function,
    read_eval_request,
    run_eval_jobs,
)
from megatron.evaluation.key_tokens import KeyTokenFile, open_key_tokens
from megatron.evaluation.loss_records import check_measures
from megatron.evaluation.passkey import Passkey
from megatron.evaluation.probe import Probe, RepeatedTokens
from megatron.evaluation.protocols import ScoringPlan, plan_from_options
from megatron.evaluation.task_eval import build_task_eval, is_task_run
from megatron.evaluation.texts import EvalText, check_tokenizer, load_common_text, load_text
from megatron.options.evaluation import LOSS_OPTIONS, EvaluationOptions, reject_task_options, reject_text_options
from megatron.reports.records import Record
from megatron.utils.errors import UserError
from megatron.utils.progress import IMPORTING, WaitAnnouncer

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT

PROBES: dict[str, type[Probe]] = {probe.name: probe for probe in (RepeatedTokens, Passkey)}
"""Probes by protocol name. `megatron.options.evaluation` lists the names for the command line."""

DEFAULT_PROBE_SEQUENCES = 64
"""Default number of sequences for each axis value and length."""


@dataclass(frozen=True)
class TextEval:
    """Text to score, with its scoring plan and the measures of its losses."""

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

    def describe_documents(self, trained_mask: str, evaluation_mask: str | None) -> str | None:
        """Describe document masking in one line.

        Return None if attention crosses documents in training and evaluation.

        The line gives the average context of a scored token within its own document, or says that evaluation does not
        mask documents although training did.

        Args:
            trained_mask: attention_mask of the run.
            evaluation_mask: attention_mask of the evaluation; None for the run's.

        Raises:
            UserError: the tokenizer of the text has no end-of-document token.
        """
        if (evaluation_mask or trained_mask) == "causal":
            return None if trained_mask == "causal" else "attention crosses documents, unlike in training"
        import torch

        from megatron.attention.documents import find_document_starts

        length, vocabulary = self.plan.lengths[-1], self.text.vocabulary
        eod = check_end_of_document(vocabulary.name, vocabulary.eod)
        seen = []
        for start in self.plan.starts[length].tolist():
            window = torch.from_numpy(np.asarray(self.text.tokens[start : start + length]).astype(np.int64))
            own = torch.arange(1, length + 1) - find_document_starts(window, eod)
            seen.append(float(own[-self.plan.count_scored(length) :].double().mean()))
        how = "as" if trained_mask == "document" else "unlike"
        return (
            f"documents are masked from each other, {how} in training: at length {length:,} a scored token sees "
            f"{sum(seen) / len(seen):,.0f} tokens of its own document on average"
        )


def build_eval_target(runs: Sequence[TrainedRun], options: EvaluationOptions) -> EvalTarget:
    """Build the evaluation target of runs.

    Raises:
        UserError: the runs are not comparable, or do not support the options.
        RunError: the files of a text are damaged.
    """
    configs = [run.config for run in runs]
    if is_task_run(runs):
        return build_task_eval(options, configs)
    reject_task_options(options)
    if options.protocol in PROBES:
        tokenizers = [load_run_tokenizer(run.folder, run.config.data, run.tokenizer_name) for run in runs]
        for run, tokenizer in zip(runs, tokenizers, strict=True):
            check_tokenizer(run.name, tokenizer.name, runs[0].name, tokenizers[0].name)
        return _build_probe_for(configs, options, tokenizers[0])
    return _build_text_eval(options, configs, load_common_text(runs, options.data))


def build_eval_target_of_config(name: str, config: Config, options: EvaluationOptions) -> EvalTarget:
    """Build the evaluation target of a model that is not trained yet.

    Raises:
        UserError, RunError: as for `build_eval_target`.
    """
    if options.find_key_tokens:
        raise UserError(
            "find_key_tokens: not for sweeps; find key tokens with evaluate, and use key_tokens in the sweep"
        )
    if config.data.task is not None:
        return build_task_eval(options, [config])
    reject_task_options(options)
    if options.protocol in PROBES:
        return _build_probe_for([config], options, load_data_tokenizer(config.data))
    return _build_text_eval(options, [config], load_text(name, config, options.data))


def _build_text_eval(options: EvaluationOptions, configs: Sequence[Config], text: EvalText) -> EvalTarget:
    for name in ("depths", "score_threshold"):
        if getattr(options, name) is not None:
            raise UserError(f"{name}: only for needle maps (protocol passkey or runs trained on a task); omit it")
    plan = plan_from_options(options, [config.model.seq_length for config in configs], len(text.tokens))
    check_measures(options, plan)
    key_tokens = open_key_tokens(options, text, plan)
    return TextEval(text, plan, options.measures or ("perplexity",), options.smoothing, key_tokens)


def _build_probe_for(configs: Sequence[Config], options: EvaluationOptions, tokenizer: Tokenizer) -> EvalTarget:
    return build_probe(options, choose_lengths(options, [config.model.seq_length for config in configs]), tokenizer)


def build_probe(options: EvaluationOptions, lengths: Sequence[int], tokenizer: Tokenizer) -> Probe:
    """Build the probe that the options request.

    Args:
        options: protocol, windows, and options of the probe.
        lengths: window lengths in tokens, ascending.
        tokenizer: tokenizer of the models.

    Raises:
        UserError: an option applies to texts only, or a length is too short.
    """
    unused = ("data", "stride", "min_context", "measures", "attention_mask", *LOSS_OPTIONS)
    reject_text_options(options, unused, f"protocol {options.protocol} generates its own text")
    num_sequences = options.num_windows or DEFAULT_PROBE_SEQUENCES
    probe = PROBES[options.protocol].from_options(options, lengths, num_sequences, tokenizer)
    probe.check_lengths()
    return probe


@dataclass(frozen=True)
class EvalEstimate:
    """Model without weights, with the cost of scoring it."""

    model: GPT  # on the meta device
    flops: float  # cost of scoring it
    note: str | None
    """Note if the maximum length is below the largest length, or if documents are masked."""


def estimate_evaluation(name: str, config: Config, target: EvalTarget, options: EvaluationOptions) -> EvalEstimate:
    """Build a model without weights, and estimate the cost of scoring it.

    Raises:
        UserError: the model supports none of the lengths.
    """
    model = build_evaluated_model(config, options)
    notes = [describe_length_limit(name, config, model, target.sequence_lengths)]  # raises if no length is supported
    if isinstance(target, TextEval):
        notes.append(target.describe_documents(config.position.attention_mask, options.attention_mask))
    return EvalEstimate(model, sum(target.count_flops(model).values()), "; ".join(filter(None, notes)) or None)


def estimate_untrained(name: str, config: Config, options: EvaluationOptions) -> EvalEstimate:
    """Estimate the cost of scoring a model that is not trained yet.

    Raises:
        UserError, RunError: as for scoring it.
    """
    return estimate_evaluation(name, config, build_eval_target_of_config(name, config, options), options)


def build_evaluated_model(config: Config, options: EvaluationOptions) -> GPT:
    """Build a model without weights.

    Raises:
        UserError: the backend does not support the model.
    """
    from megatron.checkpoint.load_model import build_meta_model

    position = override_position(config.model, config.position, **list_overrides(options))
    with locate_rope_errors(options.rope):
        return build_meta_model(config, 1, position=position, backend=options.backend)


def describe_length_limit(name: str, config: Config, model: GPT, lengths: Sequence[int]) -> str | None:
    """Describe the maximum length of a model in one line, or return None if it supports all lengths.

    Raises:
        UserError: the model supports none of the lengths.
    """
    key = "randomized_positions" if config.position.randomized_positions is not None else "max_position_embeddings"
    limit = f"pos_emb {', '.join(config.position.encodings)} supports {model.max_length or 0:,} positions ({key})"
    supported = limit_lengths(lengths, model.max_length, reason=f"{name}: {limit}")
    return None if max(lengths) in supported else f"{limit}; scored at lengths up to {supported[-1]:,}"


def evaluate_runs(
    runs: Sequence[str | Path],
    options: EvaluationOptions | None = None,
    *,
    output: str | Path | None = None,
    console: Console | None = None,
    names: Sequence[str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[Record]:
    """Evaluate runs side by side.

    Args:
        runs: run folders (the latest checkpoint is used) or checkpoint folders.
        options: evaluation options; the defaults if None.
        output: folder for results.json, .csv, .md, and .png. If None, a single run folder receives its own results.
            Existing results are kept, unless they are measured again (`megatron.reports.records.merge_records`).
        console: console for progress, the table, and file names; None is silent.
        names: method names, one per run, instead of those derived from the configurations.
        progress: called by `evaluate` instead of showing a progress bar, for callers with their own display.

    Returns:
        Records of all runs and lengths. Runs of one method that differ in more than the seed have distinct names.

    Raises:
        UserError: the runs cannot be compared, or an option is invalid; raised before any work.
        RunError: scoring fails; the files of finished runs are kept.
    """
    request = read_eval_request(runs, options or EvaluationOptions(), output)
    return evaluate_target(request, build_eval_target(request.runs, request.options), console, names, progress)


def evaluate_target(
    request: EvalRequest,
    target: EvalTarget,
    console: Console | None,
    names: Sequence[str] | None = None,
    progress: ProgressCallback | None = None,
) -> list[Record]:
    """Evaluate the requested runs on a target: estimate the cost of each, then load, score, print and save.

    For arguments, result and errors see `evaluate_runs`.
    """
    log = make_log_function(console)
    with WaitAnnouncer(log, IMPORTING):
        estimates = [estimate_evaluation(run.name, run.config, target, request.options) for run in request.runs]
        jobs = build_eval_jobs(request, [(estimate.flops, estimate.note) for estimate in estimates], names)
    log(describe_output_folder(request))
    return run_eval_jobs(request, jobs, target, console, progress)
