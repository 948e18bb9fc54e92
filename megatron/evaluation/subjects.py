"""What models are asked, and how a model answers: a text, the task that it learned, or a probe.

Everything else of an evaluation is the same for all of them (`run.py`): opening runs, saying what it costs, loading,
writing results. Each is made before torch is imported, and refuses then what cannot be asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from megatron.checkpoint.trained import Run
from megatron.config.schema import Config
from megatron.data.run_tokenizer import run_tokenizer
from megatron.data.tokenizers import Tokenizer, load_tokenizer
from megatron.data.vocabulary import Vocabulary
from megatron.errors import UserError
from megatron.evaluation import exercise
from megatron.evaluation.exercise import Questions, learned_task, questions
from megatron.evaluation.lengths import wanted_lengths
from megatron.evaluation.measures import check_measures
from megatron.evaluation.options import PROBES, EvaluationOptions
from megatron.evaluation.probes import probe_of
from megatron.evaluation.protocols import Plan, plan_of
from megatron.evaluation.texts import Text, common_text, text_of
from megatron.reports.records import Record

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.evaluation.perplexity import Progress
    from megatron.model.gpt import GPT


class Subject(Protocol):
    """What models are asked."""

    @property
    def places(self) -> Sequence[int]:
        """How many tokens a model is given at once."""

    def work(self, model: GPT) -> dict[int, float]:
        """FLOPs of scoring a model at each length that it has positions for. Raises UserError if there is none."""

    def score(
        self,
        loaded: LoadedModel,
        *,
        about: Mapping[str, Any],
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Record]:
        """What a model answers.

        Args:
            loaded: the model.
            about: fields of the records that say where it comes from.
            batch_tokens: input tokens per forward pass.
            progress: called after every batch.

        Raises:
            UserError: the model has positions for none of the lengths.
            RunError: a loss is not finite, or the memory is too small.
        """

    def beside(self) -> list[Record]:
        """What stands beside the models' answers, and is none of theirs."""


@dataclass(frozen=True)
class OfText:
    """A text, by a plan that says which of its tokens are scored."""

    text: Text
    plan: Plan
    measures: Sequence[str]

    @property
    def places(self) -> Sequence[int]:
        return self.plan.lengths

    def work(self, model: GPT) -> dict[int, float]:
        from megatron.evaluation.perplexity import forward_flops

        return forward_flops(model, self.plan)

    def score(
        self,
        loaded: LoadedModel,
        *,
        about: Mapping[str, Any],
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Record]:
        from megatron.evaluation.perplexity import evaluate

        text = self.text
        source = {"dataset": text.name, "text_digest": text.digest, "tokenizer": text.vocabulary.name}
        return evaluate(
            loaded,
            text.tokens,
            self.plan,
            vocabulary=text.vocabulary,
            batch_tokens=batch_tokens,
            progress=progress,
            about={**about, **source},
            measures=self.measures,
        )

    def beside(self) -> list[Record]:
        return []


@dataclass(frozen=True)
class OfTask:
    """The task that models learned."""

    asked: Questions

    @property
    def places(self) -> Sequence[int]:
        return [self.asked.exercise.task.places(length) for length in self.asked.lengths]

    def work(self, model: GPT) -> dict[int, float]:
        return self.asked.work(model)

    def score(
        self,
        loaded: LoadedModel,
        *,
        about: Mapping[str, Any],
        batch_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> list[Record]:
        return exercise.score(loaded, self.asked, batch_tokens=batch_tokens, progress=progress, about=about)

    def beside(self) -> list[Record]:
        return exercise.floors(self.asked)


def subject_of(runs: Sequence[Run], options: EvaluationOptions) -> Subject:
    """What runs are asked.

    Raises:
        UserError: they cannot be put side by side, or cannot be asked what the options say.
        RunError: a text's files are damaged.
    """
    configs = [run.config for run in runs]
    if learned_task(runs):
        return OfTask(questions(options, configs))
    if options.protocol in PROBES:
        tokenizers = [run_tokenizer(run.folder, run.config.data, run.tokenizer_name) for run in runs]
        return _probe(options, configs, [run.name for run in runs], tokenizers)
    return _text(common_text(runs, options.data), options, configs)


def subject_of_config(name: str, config: Config, options: EvaluationOptions) -> Subject:
    """What a model is asked that is still to be trained. Raises as `subject_of`."""
    if config.data.task is not None:
        return OfTask(questions(options, [config]))
    if options.protocol in PROBES:
        return _probe(options, [config], [name], [load_tokenizer(config.data)])
    return _text(text_of(name, config, options.data), options, [config])


def _text(text: Text, options: EvaluationOptions, configs: Sequence[Config]) -> Subject:
    plan = plan_of(options, [config.model.seq_length for config in configs], len(text.tokens))
    check_measures(options, plan)
    return OfText(text, plan, options.measures or ("perplexity",))


def _probe(
    options: EvaluationOptions, configs: Sequence[Config], names: Sequence[str], tokenizers: Sequence[Tokenizer]
) -> Subject:
    first = tokenizers[0]
    for name, tokenizer in zip(names, tokenizers, strict=True):
        if tokenizer.name != first.name:
            raise UserError(
                f"{name} was trained with tokenizer {tokenizer.name}, {names[0]} with {first.name}: losses per token "
                "cannot be compared"
            )
    lengths = wanted_lengths(options, [config.model.seq_length for config in configs])
    return probe_of(options, lengths, Vocabulary(first.vocab_size, first.name, first.eod), first)
