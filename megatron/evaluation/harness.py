"""Adapter that lets lm-evaluation-harness evaluate our models directly, without exporting them.

The harness builds prompts and scores answers. The model handles three request types (`lm_eval.api.model.LM`):

    loglikelihood            log-likelihood of a continuation after a context, and whether greedy decoding generates it
    loglikelihood_rolling    log-likelihood of a document, in windows of `max_length` that score each token once
    generate_until           text that the model generates after a context

Contexts that are too long are truncated on the left, as in `lm_eval --model hf`. Shorter requests of a batch are padded
on the left; padding does not affect the results. This module does not use transformers. It requires the package
lm_eval.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.data.tokenizers import Tokenizer
from megatron.evaluation.forward_passes import choose_batch_tokens, pad_left
from megatron.evaluation.text_generator import Completion, TextGenerator
from megatron.model.gpt import GPT
from megatron.options.commands import GenerationOptions
from megatron.utils.errors import RunError, is_out_of_memory

DEFAULT_MAX_GEN_TOKENS = 256
"""Default limit of generated tokens for tasks that set none; the harness uses the same."""

_GENERATION_KEYS = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}
"""Generation options that tasks may set."""

_TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts of a request, if any, and the tokens of its context and continuation."""


class LoglikelihoodAnswer(NamedTuple):
    """Log-likelihood of a continuation, and whether greedy decoding would generate it."""

    loglikelihood: float
    greedy: bool


@dataclass
class RequestCounts:
    """Statistics of the requests of one task."""

    num_tokens: int = 0
    """Number of tokens scored or generated."""
    num_requests: int = 0
    num_truncated: int = 0
    """Number of requests whose context was truncated."""
    digest: Any = field(default_factory=hashlib.sha256)
    """Hash of the requests, independent of the model that answers them."""


@dataclass(frozen=True)
class RequestSharding:
    """Sharding of requests among ranks that all make the same calls.

    Args:
        rank, num_ranks: this rank computes every `num_ranks`-th request, from `rank` on.
        exchange: gathers the answers of all ranks, by the number of the request.
    """

    rank: int = 0
    num_ranks: int = 1
    exchange: Callable[[dict[int, Any]], Sequence[dict[int, Any]]] = lambda answers: [answers]

    def gather(self, answers: dict[int, Any], count: int) -> list[Any]:
        """Return the answers of all ranks to `count` requests, in their order."""
        merged: dict[int, Any] = {}
        for part in self.exchange(answers):
            merged |= part
        return [merged[number] for number in range(count)]


class HarnessModel(TemplateLM):
    """Trained model that implements the harness's model interface.

    Args:
        model: a model in evaluation mode.
        tokenizer: tokenizer that the model was trained with.
        max_length: maximum input length in tokens.
        batch_tokens: tokens per forward pass, padding included; the default of the device if None.
        on_batch_done: called after every batch with the numbers of answered and of all requests of this rank and type.
        sharding: sharding of requests among the ranks of a run; by default one rank computes all.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        batch_tokens: int | None = None,
        on_batch_done: Callable[[int, int], None] | None = None,
        sharding: RequestSharding | None = None,
    ) -> None:
        super().__init__()
        self.model, self._tokenizer, self.max_length = model, tokenizer, max_length
        self._device = next(model.parameters()).device
        self.batch_tokens = choose_batch_tokens(self._device, batch_tokens)
        self._on_batch_done = on_batch_done or (lambda done, total: None)
        self._sharding = sharding or RequestSharding()
        self.request_counts: dict[str, RequestCounts] = {}
        """Statistics by task name."""
        self._token_counts: list[tuple[int, bool]] = []

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without a context."""
        return self._tokenizer.eod if self._tokenizer.bos is None else self._tokenizer.bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return list(
            self._tokenizer.encode(string) if add_special_tokens is False else self._tokenizer.encode_with_bos(string)
        )

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> list[LoglikelihoodAnswer]:
        empty = next((request for request in requests if not request.args[1]), None)
        if empty is not None:
            raise RunError(
                f"{empty.task_name}: document {empty.doc_id} has an empty choice, whose likelihood is undefined"
            )
        answers = super().loglikelihood(requests, disable_tqdm=True)
        self._record_requests(requests, self._token_counts)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> list[float]:
        windows: list[_TokenRequest] = []
        owners: list[int] = []
        counts: list[tuple[int, bool]] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            rolling = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            disjoint: list[_TokenRequest] = [(None, *make_disjoint_window(window)) for window in rolling]
            windows += disjoint
            owners += [number] * len(disjoint)
            counts.append((len(tokens), False))
        sums = [0.0] * len(requests)
        for number, answer in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += answer.loglikelihood
        self._record_requests(requests, counts)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, tuple[str, tuple[int, bool]]] = {}
        for numbers in by_options.values():
            options = self._read_generation_options(requests[numbers[0]])
            max_context = self.max_length - options.max_new_tokens
            contexts = [self.tok_encode(requests[number].args[0]) or [self.prefix_token_id] for number in numbers]
            own = range(self._sharding.rank, len(numbers), self._sharding.num_ranks)
            for completion in self._complete([context[-max_context:] for context in contexts], own, options):
                is_truncated = len(contexts[completion.prompt_index]) > max_context
                count = (max(len(completion.tokens), 1), is_truncated)
                answers[numbers[completion.prompt_index]] = (completion.text, count)
                self._on_batch_done(len(answers), -(-len(requests) // self._sharding.num_ranks))
        gathered = self._sharding.gather(answers, len(requests))
        self._record_requests(requests, [count for _, count in gathered])
        return [text for text, _ in gathered]

    def _complete(
        self, contexts: Sequence[Sequence[int]], own: Sequence[int], options: GenerationOptions
    ) -> Iterator[Completion]:
        """Yield the finished completions of the contexts with indices in `own`."""
        for completion, _ in TextGenerator(self.model, self._tokenizer, options).generate(contexts, own):
            if completion.finish_reason is not None:
                yield completion

    def _read_generation_options(self, request: Instance) -> GenerationOptions:
        """Read the generation options of a task.

        Raises:
            RunError: an option is not supported.
        """
        task_options: Any = normalize_gen_kwargs(dict(request.args[1]), DEFAULT_MAX_GEN_TOKENS)
        name, unsupported = request.task_name, sorted(set(task_options) - _GENERATION_KEYS)
        if unsupported:
            raise RunError(
                f"{name}: unsupported generation options {', '.join(unsupported)}; "
                f"choose from {', '.join(sorted(_GENERATION_KEYS))}"
            )
        tokens = task_options["max_gen_toks"]
        if tokens >= self.max_length:
            raise RunError(
                f"{name}: generates up to {tokens:,} tokens, which leaves no room for a context at length "
                f"{self.max_length:,}; use larger --lengths"
            )
        temperature = float(task_options.get("temperature", 1.0)) if task_options["do_sample"] else 0.0
        top_p = float(task_options.get("top_p", 1.0))
        return GenerationOptions(
            max_new_tokens=tokens,
            temperature=temperature,
            top_k=int(task_options.get("top_k", 0)),
            top_p=top_p,
            stop=[text for text in task_options["until"] if text],
            batch_size=max(1, self.batch_tokens // self.max_length),
        )

    def _record_requests(self, requests: Sequence[Instance], counts: Sequence[tuple[int, bool]]) -> None:
        """Add requests to the statistics of their tasks."""
        for request, (num_tokens, is_truncated) in zip(requests, counts, strict=True):
            task = self.request_counts.setdefault(request.task_name, RequestCounts())
            task.num_tokens += num_tokens
            task.num_requests += 1
            task.num_truncated += is_truncated
            task.digest.update(json.dumps([request.request_type, *request.args], default=str).encode())

    def _loglikelihood_tokens(self, requests: Sequence[_TokenRequest], **kwargs: Any) -> list[LoglikelihoodAnswer]:
        """Score continuations. Requests with the same input tokens, such as single-token choices, share a row."""
        self._token_counts = [
            (len(continuation), len(context) + len(continuation) > self.max_length + 1)
            for _, context, continuation in requests
        ]
        rows: dict[tuple[int, ...], list[int]] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise RunError(
                    f"a continuation of {len(continuation):,} tokens cannot be scored at length {self.max_length:,}; "
                    "use larger --lengths"
                )
            rows.setdefault(tuple([*context, *continuation][-self.max_length - 1 : -1]), []).append(number)
        answers: dict[int, LoglikelihoodAnswer] = {}
        own = sorted(rows, key=len, reverse=True)[self._sharding.rank :: self._sharding.num_ranks]
        total = sum(len(rows[row]) for row in own)
        for batch in self._iter_batches(own):
            continuations = [[requests[number][2] for number in rows[row]] for row in batch]
            for row, row_answers in zip(batch, self._score_rows(batch, continuations), strict=True):
                answers.update(zip(rows[row], row_answers, strict=True))
            self._on_batch_done(len(answers), total)
        return self._sharding.gather(answers, len(requests))

    def _iter_batches(self, rows: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        """Yield batches of consecutive rows that fit in a forward pass. Rows are sorted by length, longest first."""
        start = 0
        while start < len(rows):
            size = max(1, self.batch_tokens // len(rows[start]))
            yield list(rows[start : start + size])
            start += size

    def _score_rows(
        self, rows: Sequence[tuple[int, ...]], continuations: Sequence[list[list[int]]]
    ) -> list[list[LoglikelihoodAnswer]]:
        """Score the continuations at the end of each row. A batch that does not fit in memory is split in half.

        A sharded model cannot be called again, because the other ranks would not call theirs.
        """
        try:
            return self._forward(rows, continuations)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if len(rows) == 1 or self._is_sharded:
                batch = "" if len(rows) == 1 else f"{len(rows):,} texts of "
                raise RunError(f"{batch}{len(rows[0]):,} tokens do not fit the memory of {self._device}") from None
        half = len(rows) // 2
        first = self._score_rows(rows[:half], continuations[:half])
        return first + self._score_rows(rows[half:], continuations[half:])

    @property
    def _is_sharded(self) -> bool:
        """True if several ranks must call the model together."""
        return self.model.groups.mesh.tensor.size > 1 or self.model.is_sharded_by_zero3

    @torch.no_grad()
    def _forward(
        self, rows: Sequence[tuple[int, ...]], continuations: Sequence[list[list[int]]]
    ) -> list[list[LoglikelihoodAnswer]]:
        num_logits = max(len(continuation) for of_row in continuations for continuation in of_row)
        tokens, paddings = pad_left(rows, self._device)
        mask = torch.arange(tokens.shape[1], device=self._device) >= paddings if paddings.any() else None
        logits = self.model(tokens, num_logits=num_logits, attention_mask=mask)
        answers: list[list[LoglikelihoodAnswer]] = []
        for row_logits, of_row in zip(logits, continuations, strict=True):
            row_answers = []
            for continuation in of_row:
                scored = row_logits[-len(continuation) :].float()
                labels = torch.tensor(continuation, device=self._device)
                log_probs = scored.gather(-1, labels[:, None])[:, 0] - scored.logsumexp(-1)
                is_greedy = bool((scored.argmax(-1) == labels).all())
                row_answers.append(LoglikelihoodAnswer(float(log_probs.double().sum()), is_greedy))
            answers.append(row_answers)
        return answers


class RequestChecker(HarnessModel):
    """Model interface that checks requests without computing answers, so that errors appear before a long training."""

    def check(self, tasks: Iterable[Any], limit: int | None) -> None:
        """Check the requests of tasks.

        Args:
            tasks: tasks of the harness.
            limit: number of documents per task, or None for all.

        Raises:
            RunError: a request cannot be answered at this length, or needs an unsupported feature.
        """
        for task in tasks:
            task.build_all_requests(limit=limit, rank=0, world_size=1)
            by_type: dict[str, list[Instance]] = {}
            for request in task.instances:
                by_type.setdefault(request.request_type, []).append(request)
            for request_type, requests in by_type.items():
                getattr(self, request_type)(requests)

    def _complete(
        self, contexts: Sequence[Sequence[int]], own: Sequence[int], options: GenerationOptions
    ) -> Iterator[Completion]:
        return (Completion(index) for index in own)

    def _score_rows(
        self, rows: Sequence[tuple[int, ...]], continuations: Sequence[list[list[int]]]
    ) -> list[list[LoglikelihoodAnswer]]:
        return [[LoglikelihoodAnswer(0.0, greedy=False)] * len(of_row) for of_row in continuations]
