"""`./deepy.py generate RUN`: collect prompts, load a model, and print completions."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatron.checkpoint.trained_run import TrainedRun, open_run
from megatron.data.corpus.sources import decode_document, describe_source_file, iter_raw_documents
from megatron.data.load_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import Tokenizer
from megatron.model.device_dtype import check_precision, resolve_device, resolve_dtype
from megatron.options.commands import GenerationOptions
from megatron.utils.errors import FarfieldError, UserError, check_reachable
from megatron.utils.formatting import format_quantity, suggest_path
from megatron.utils.imports import pause_garbage_collection
from megatron.utils.progress import WaitAnnouncer

if TYPE_CHECKING:
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.evaluation.text_generator import Completion, TextGenerator

# torch is imported inside functions, so that errors in a request are reported at once.

LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class GenerationRequest:
    """Run whose model generates text (not loaded yet), with the options and the prompts."""

    run: TrainedRun
    tokenizer: Tokenizer
    options: GenerationOptions
    prompts: tuple[str, ...]  # empty if prompts are entered interactively


def collect_prompts(prompts: Sequence[str], files: Sequence[Path], standard_input: TextIO) -> tuple[str, ...]:
    """Collect the prompts: arguments first, then the text of each file, or all texts of a .jsonl file.

    If there are none, standard input is a single prompt. On a terminal, prompts are entered later, and the result is
    empty. The final newline of a file or of standard input is removed.

    Raises:
        UserError: a file is missing, or is not text.
    """
    collected = list(prompts)
    for path in files:
        if not path.is_file():
            check_reachable(path)
            problem = "is a folder; " if path.is_dir() else f"no such file; {suggest_path(path)}"
            raise UserError(f"{path}: {problem}--file expects a text file")
        texts = [decode_document(document) or "" for document in iter_raw_documents(describe_source_file(path))]
        if not texts:
            raise UserError(f"{path}: no text found")
        collected += texts if len(texts) > 1 else [texts[0].removesuffix("\n")]
    if not collected and not standard_input.isatty():
        try:
            collected.append(standard_input.read().removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not UTF-8 at byte {error.start} ({error.reason})") from None
    for text in collected:
        _check_utf8(text)
    return tuple(collected)


def _check_utf8(text: str) -> None:
    """Check for invalid UTF-8, which Python reads from the command line and standard input as surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        byte = ord(text[error.start]) & 0xFF
        raise UserError(f"the prompt is not UTF-8: byte 0x{byte:02x} at character {error.start}") from None


def read_generation_request(run: str, options: GenerationOptions, prompts: tuple[str, ...]) -> GenerationRequest:
    """Open a run for text generation.

    Raises:
        UserError, RunError: the run or an option is invalid.
    """
    check_precision(options.precision, options.device)
    if "" in options.stop:
        raise UserError("--stop: it must be a nonempty string")
    trained_run = open_run(run)
    tokenizer = load_run_tokenizer(trained_run.folder, trained_run.config.data, trained_run.tokenizer_name)
    return GenerationRequest(trained_run, tokenizer, options, prompts)


def load_text_generator(request: GenerationRequest) -> TextGenerator:
    """Load the model of a run for text generation.

    Raises:
        UserError: the device is unavailable, the backend does not support the model, or the maximum length is too
            small; checked before weights are loaded.
        RunError: the checkpoint is damaged.
    """
    with pause_garbage_collection():
        from megatron.checkpoint.load_model import build_meta_model
    from megatron.evaluation.forward_passes import check_prompt_length
    from megatron.evaluation.text_generator import TextGenerator

    run, options = request.run, request.options
    meta_model = build_meta_model(run.config, request.tokenizer.vocab_size, backend=options.backend)
    for prompt in request.prompts or ("",):
        check_prompt_length(meta_model, len(request.tokenizer.encode_with_bos(prompt)) or 1, options.max_new_tokens)
    # Training's self-check does not cover decoding one row per step.
    loaded = load_requested_model(request, backend=options.backend or run.config.model.attention_backend)
    return TextGenerator(loaded.model, request.tokenizer, options)


def load_requested_model(request: GenerationRequest, *, backend: str | None) -> LoadedModel:
    """Load the model of a request on its device. Raises the errors of `load_model` and of an unavailable device."""
    with pause_garbage_collection():
        from megatron.checkpoint.load_model import load_model

    run, options = request.run, request.options
    device = resolve_device(options.device)
    return load_model(
        run, device=device, dtype=resolve_dtype(options.precision, run.config.training.precision, device),
        backend=backend, window=options.window, attention_temperature=options.attention_temperature, rope=options.rope,
        end_of_document=request.tokenizer.eod,
    )  # fmt: skip


def print_completions(
    generator: TextGenerator, prompts: Sequence[str], out: TextIO, log: LogFunction, *, as_json: bool = False
) -> None:
    """Continue prompts and stream the texts in prompt order.

    Args:
        generator: text generator.
        prompts: texts to continue.
        out: stream for the texts.
        log: function that prints a line of other output.
        as_json: print a JSON object per prompt instead: `prompt`, `text`, `tokens`, and `finish`, the reason for its
            end (eod, stop, or length).

    Raises:
        KeyboardInterrupt: after the text so far is printed.
    """
    speed, output = _SpeedMeter(), _OrderedOutput(len(prompts))
    prompt_tokens = [generator.encode(prompt) for prompt in prompts]
    num_prompt_tokens = sum(map(len, prompt_tokens))
    announced, in_line = -1, False
    wait = WaitAnnouncer(log, f"processing {format_quantity(num_prompt_tokens, 'prompt token')}")
    wait.begin()
    try:
        for completion, new_text in speed.count_pieces(generator.generate(prompt_tokens)):
            wait.end()
            output.add(completion, new_text)
            for index, piece, finished in output.pop_ready():
                if as_json:
                    if finished is not None:
                        result = {"prompt": prompts[index], "text": finished.text, "tokens": len(finished.tokens)}
                        print(json.dumps({**result, "finish": finished.finish_reason}), file=out, flush=True)
                    continue
                if index > announced and len(prompts) > 1:
                    log(f"{index + 1} of {len(prompts)}: {_shorten(prompts[index])}")
                announced, in_line = index, finished is None
                print(piece, end="" if finished is None else "\n", file=out, flush=True)
    except BaseException:
        if in_line:
            print(file=out, flush=True)
        raise
    finally:
        wait.end()
    log(speed.summarize(num_prompt_tokens))


def run_interactive(generator: TextGenerator, out: TextIO, log: LogFunction) -> None:
    """Read lines from the terminal and continue each, until end of file (Ctrl-D).

    Ctrl-C stops the current text; on an empty line it ends the command.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (lines can be edited and found again)
    log("enter a text to continue; Ctrl-C stops the current text, Ctrl-D exits")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print(file=out)
            return
        try:
            print_completions(generator, [prompt], out, log)
        except KeyboardInterrupt:
            log("interrupted")
        except FarfieldError as error:
            log(f"error: {error}")


class _OrderedOutput:
    """Buffer that outputs concurrently generated texts in order."""

    def __init__(self, num_texts: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(num_texts)]
        self._finished: list[Completion | None] = [None] * num_texts
        self._next = 0

    def add(self, completion: Completion, piece: str) -> None:
        self._pieces[completion.prompt_index].append(piece)
        if completion.finish_reason is not None:
            self._finished[completion.prompt_index] = completion

    def pop_ready(self) -> Iterator[tuple[int, str, Completion | None]]:
        """Yield printable pieces: prompt index, new piece of its text, and the completion if it is finished."""
        while self._next < len(self._pieces):
            index, finished = self._next, self._finished[self._next]
            piece, self._pieces[index] = "".join(self._pieces[index]), []
            if piece or finished is not None:
                yield index, piece, finished
            if finished is None:
                return
            self._next += 1


class _SpeedMeter:
    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None
        self._last = self._start
        self._count = 0

    def count_pieces(self, pieces: Iterator[tuple[Completion, str]]) -> Iterator[tuple[Completion, str]]:
        """Pass pieces through and count them; each is one token."""
        for completion, piece in pieces:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._count += 1
            yield completion, piece

    def summarize(self, num_prompt_tokens: int) -> str:
        """Summarize token counts and speed. The speed excludes the first token, which waits for the prompt."""
        first = self._start if self._first is None else self._first
        line = (
            f"{format_quantity(num_prompt_tokens, 'prompt token')}, first new token after {first - self._start:.2f} s; "
            f"{format_quantity(self._count, 'new token')}"
        )
        seconds = self._last - first
        return f"{line}, {(self._count - 1) / seconds:,.0f} tokens/s" if seconds > 0 else line


def _shorten(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:29]} … {words[-28:]}"
