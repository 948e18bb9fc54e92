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
from megatron.data.run_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import Tokenizer, load_tokenizer
from megatron.evaluation.exercise import build_task_eval, is_task_run
from megatron.evaluation.lengths import choose_lengths
from megatron.evaluation.measures import check_measures
from megatron.evaluation.probes.chosen import build_probe
from megatron.evaluation.protocols import ScoringPlan, plan_from_options
from megatron.evaluation.subject import EvalTarget, ScoringContext
from megatron.evaluation.texts import EvalText, check_tokenizer, load_common_text, load_text
from megatron.evaluation.work import count_plan_flops
from megatron.options.evaluation import PROBES, EvaluationOptions
from megatron.reports.records import Record

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.model.gpt import GPT


@dataclass(frozen=True)
class TextEval:
    """A text, by a plan that says which of its tokens are scored, and what is told of their losses."""

    text: EvalText
    plan: ScoringPlan
    measures: Sequence[str]

    @property
    def max_tokens_per_batch(self) -> Sequence[int]:
        return self.plan.lengths

    def count_flops(self, model: GPT) -> dict[int, float]:
        return count_plan_flops(model, self.plan)

    def score(self, loaded: LoadedModel, scoring: ScoringContext) -> list[Record]:
        from megatron.evaluation.perplexity import evaluate_perplexity

        return evaluate_perplexity(loaded, self.text, self.plan, scoring, self.measures)

    def baseline_records(self) -> list[Record]:
        return []


def build_eval_target(runs: Sequence[TrainedRun], options: EvaluationOptions) -> EvalTarget:
    """What runs are asked.

    Raises:
        UserError: they cannot be put side by side, or cannot be asked what the options say.
        RunError: a text's files are damaged.
    """
    configs = [run.config for run in runs]
    if is_task_run(runs):
        return build_task_eval(options, configs)
    if options.protocol in PROBES:
        tokenizers = [load_run_tokenizer(run.folder, run.config.data, run.tokenizer_name) for run in runs]
        for run, tokenizer in zip(runs, tokenizers, strict=True):
            check_tokenizer(run.name, tokenizer.name, runs[0].name, tokenizers[0].name)
        return _build_probe(options, configs, tokenizers[0])
    return _build_text_eval(options, configs, load_common_text(runs, options.data))


def build_eval_target_of_config(name: str, config: Config, options: EvaluationOptions) -> EvalTarget:
    """What a model is asked that is still to be trained. Raises as `build_eval_target`."""
    if config.data.task is not None:
        return build_task_eval(options, [config])
    if options.protocol in PROBES:
        return _build_probe(options, [config], load_tokenizer(config.data))
    return _build_text_eval(options, [config], load_text(name, config, options.data))


def _build_text_eval(options: EvaluationOptions, configs: Sequence[Config], text: EvalText) -> EvalTarget:
    plan = plan_from_options(options, [config.model.seq_length for config in configs], len(text.tokens))
    check_measures(options, plan)
    return TextEval(text, plan, options.measures or ("perplexity",))


def _build_probe(options: EvaluationOptions, configs: Sequence[Config], tokenizer: Tokenizer) -> EvalTarget:
    return build_probe(options, choose_lengths(options, [config.model.seq_length for config in configs]), tokenizer)
