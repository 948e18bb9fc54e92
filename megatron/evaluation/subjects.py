"""Which subject models are asked about: a text, the task that they learned, or a probe.

Everything else of an evaluation is the same for all of them (`run.py`): opening runs, saying what it costs, loading,
writing results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.checkpoint.trained_run import TrainedRun
from megatron.config.schema import Config
from megatron.data.run_tokenizer import run_tokenizer
from megatron.data.tokenizers import Tokenizer, load_tokenizer
from megatron.evaluation.exercise import learned_task, questions
from megatron.evaluation.lengths import wanted_lengths
from megatron.evaluation.measures import check_measures
from megatron.evaluation.probes.chosen import probe_of
from megatron.evaluation.protocols import Plan, plan_of
from megatron.evaluation.subject import Scoring, Subject
from megatron.evaluation.texts import Text, check_tokenizer, common_text, text_of
from megatron.evaluation.work import plan_flops
from megatron.options.evaluation import PROBES, EvaluationOptions
from megatron.reports.records import Record

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT


@dataclass(frozen=True)
class OfText:
    """A text, by a plan that says which of its tokens are scored, and what is told of their losses."""

    text: Text
    plan: Plan
    measures: Sequence[str]

    @property
    def tokens_at_once(self) -> Sequence[int]:
        return self.plan.lengths

    def work(self, model: GPT) -> dict[int, float]:
        return plan_flops(model, self.plan)

    def score(self, loaded: LoadedModel, scoring: Scoring) -> list[Record]:
        from megatron.evaluation.perplexity import evaluate

        return evaluate(loaded, self.text, self.plan, scoring, self.measures)

    def beside(self) -> list[Record]:
        return []


def subject_of(runs: Sequence[TrainedRun], options: EvaluationOptions) -> Subject:
    """What runs are asked.

    Raises:
        UserError: they cannot be put side by side, or cannot be asked what the options say.
        RunError: a text's files are damaged.
    """
    configs = [run.config for run in runs]
    if learned_task(runs):
        return questions(options, configs)
    if options.protocol in PROBES:
        tokenizers = [run_tokenizer(run.folder, run.config.data, run.tokenizer_name) for run in runs]
        for run, tokenizer in zip(runs, tokenizers, strict=True):
            check_tokenizer(run.name, tokenizer.name, runs[0].name, tokenizers[0].name)
        return _probe(options, configs, tokenizers[0])
    return _text(options, configs, common_text(runs, options.data))


def subject_of_config(name: str, config: Config, options: EvaluationOptions) -> Subject:
    """What a model is asked that is still to be trained. Raises as `subject_of`."""
    if config.data.task is not None:
        return questions(options, [config])
    if options.protocol in PROBES:
        return _probe(options, [config], load_tokenizer(config.data))
    return _text(options, [config], text_of(name, config, options.data))


def _text(options: EvaluationOptions, configs: Sequence[Config], text: Text) -> Subject:
    plan = plan_of(options, [config.model.seq_length for config in configs], len(text.tokens))
    check_measures(options, plan)
    return OfText(text, plan, options.measures or ("perplexity",))


def _probe(options: EvaluationOptions, configs: Sequence[Config], tokenizer: Tokenizer) -> Subject:
    return probe_of(options, wanted_lengths(options, [config.model.seq_length for config in configs]), tokenizer)
