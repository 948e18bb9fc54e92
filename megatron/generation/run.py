"""`./deepy.py generate RUN`: what is gone on with, by which model, and how it is shown."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from megatron.checkpoint.trained_run import TrainedRun, open_run
from megatron.data.run_tokenizer import load_run_tokenizer
from megatron.data.sources import decode_document, describe_source_file, iter_raw_documents
from megatron.data.tokenizers import Tokenizer
from megatron.model.device_dtype import check_backend, check_precision, resolve_device, resolve_dtype
from megatron.options.generation import GenerationOptions
from megatron.utils.errors import FarfieldError, UserError
from megatron.utils.progress import AnnounceWait

if TYPE_CHECKING:
    from megatron.generation.writer import Completion, TextGenerator

# What needs torch is imported where it is used: a mistake in what was asked for is told at once.

LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class GenerationRequest:
    """A run whose model is not loaded yet, and how it is to write."""

    run: TrainedRun
    tokenizer: Tokenizer
    options: GenerationOptions
    prompts: tuple[str, ...]  # none: they are typed one by one


def collect_prompts(prompts: Sequence[str], files: Sequence[Path], standard_input: TextIO) -> tuple[str, ...]:
    """What is gone on with: prompts as they are written, then the text of each file, and all texts of a .jsonl file.

    Without any, what standard input holds is one prompt; from a terminal they are typed later, and there is none here.
    The line break that ends a file or standard input is no part of the prompt.

    Raises:
        UserError: a file is missing, or is no text.
    """
    found = list(prompts)
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: {'is a folder' if path.is_dir() else 'no such file'}; --file names a text")
        texts = [decode_document(document) or "" for document in iter_raw_documents(describe_source_file(path))]
        if not texts:
            raise UserError(f"{path}: there is no text in it")
        found += texts if len(texts) > 1 else [texts[0].removesuffix("\n")]
    if not found and not standard_input.isatty():
        try:
            found.append(standard_input.read().removesuffix("\n"))
        except UnicodeDecodeError as error:
            raise UserError(f"standard input: not UTF-8 at byte {error.start} ({error.reason})") from None
    for text in found:
        _check_characters(text)
    return tuple(found)


def _check_characters(text: str) -> None:
    """Bytes that are not UTF-8 reach Python's command line and standard input as halves of characters."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = ord(text[error.start]) & 0xFF
        raise UserError(f"the prompt is not UTF-8: byte 0x{found:02x} at character {error.start}") from None


def read_generation_request(run: str, options: GenerationOptions, prompts: tuple[str, ...]) -> GenerationRequest:
    """Open a run to write with it. Raises UserError or RunError for what is wrong with the run or the options."""
    check_precision(options.precision, options.device)
    check_backend(options.backend)
    if "" in options.stop:
        raise UserError("--stop is empty; every text contains that")
    opened = open_run(run)
    tokenizer = load_run_tokenizer(opened.folder, opened.config.data, opened.tokenizer_name)
    return GenerationRequest(opened, tokenizer, options, prompts)


def load_text_generator(request: GenerationRequest) -> TextGenerator:
    """Load a run's model to write with it.

    Raises:
        UserError: the device is not there, the backend cannot do this model, or it has no positions for so many tokens,
            which is known before the weights are read.
        RunError: the checkpoint is damaged.
    """
    from megatron.checkpoint.load_model import load_model
    from megatron.distributed.process_groups import single_process
    from megatron.generation.decode import check_prompt_length
    from megatron.generation.writer import TextGenerator
    from megatron.model.build import build_model

    run, options = request.run, request.options
    device = resolve_device(options.device)
    dtype = resolve_dtype(options.precision, run.config.training.precision, device)
    outline = build_model(
        run.config.model, run.config.position, request.tokenizer.vocab_size, groups=single_process(), device="meta",
        backend=options.backend,
    )  # fmt: skip
    for prompt in request.prompts or ("",):
        check_prompt_length(outline, len(request.tokenizer.encode_with_bos(prompt)) or 1, options.maximum_tokens)
    loaded = load_model(run.checkpoint, device=device, dtype=dtype, backend=options.backend, window=options.window)
    return TextGenerator(loaded.model, request.tokenizer, options)


def generate_all(
    writer: TextGenerator, prompts: Sequence[str], out: TextIO, say: LogFunction, *, as_json: bool = False
) -> None:
    """Go on with prompts and show what is written, in their order; what cannot be shown yet waits.

    Args:
        out: for the texts; pieces are shown as they are written.
        say: for everything else, line by line.
        as_json: one JSON object for each prompt instead: `prompt`, `text`, `tokens`, and `finish`, the reason why it
            ends (eod, stop or length).

    Raises:
        KeyboardInterrupt: after what was written until then is shown.
    """
    clock, shown, waiting = _SpeedMeter(), 0, _OrderedOutput(len(prompts))
    tokens = [writer.encode(prompt) for prompt in prompts]
    begun = -1
    wait = AnnounceWait(say, f"reading {sum(map(len, tokens)):,} tokens")
    wait.begin()
    try:
        for text, piece in clock.timed(writer.generate(tokens)):
            wait.end()
            waiting.add(text, piece)
            for number, part, done in waiting.ready():
                if as_json:
                    if done is not None:
                        found = {"prompt": prompts[number], "text": done.text, "tokens": len(done.tokens)}
                        print(json.dumps({**found, "finish": done.reason}), file=out, flush=True)
                    continue
                if number > begun and len(prompts) > 1:
                    say(f"{number + 1} of {len(prompts)}: {_shorten(prompts[number])}")
                begun = number
                print(part, end="" if done is None else "\n", file=out, flush=True)
                shown = 0 if done is not None else 1
    except BaseException:
        if shown:
            print(file=out, flush=True)
        raise
    finally:
        wait.end()
    say(clock.line(sum(map(len, tokens))))


def run_interactive(writer: TextGenerator, out: TextIO, say: LogFunction) -> None:
    """Go on with one line after the other, typed on a terminal, until there is no more (Ctrl-D).

    Ctrl-C ends the text that is being written; at an empty line it ends the command.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (lines can be edited and found again)
    say("type a text to go on with; Ctrl-C ends what is written, Ctrl-D everything")
    while True:
        try:
            prompt = input("> ")
        except EOFError:
            print(file=out)
            return
        try:
            generate_all(writer, [prompt], out, say)
        except KeyboardInterrupt:
            say("interrupted")
        except FarfieldError as error:
            say(f"error: {error}")


class _OrderedOutput:
    """Pieces of several texts that are written at once, in the order of the texts."""

    def __init__(self, texts: int) -> None:
        self._pieces: list[list[str]] = [[] for _ in range(texts)]
        self._done: list[Completion | None] = [None] * texts
        self._next = 0

    def add(self, text: Completion, piece: str) -> None:
        self._pieces[text.prompt].append(piece)
        if text.reason is not None:
            self._done[text.prompt] = text

    def ready(self) -> Iterator[tuple[int, str, Completion | None]]:
        """What can be shown: the number of its text, what is new of it, and the whole text where it is finished."""
        while self._next < len(self._pieces):
            number, done = self._next, self._done[self._next]
            piece, self._pieces[number] = "".join(self._pieces[number]), []
            if piece or done is not None:
                yield number, piece, done
            if done is None:
                return
            self._next += 1


class _SpeedMeter:
    """How fast tokens come."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None
        self._count = 0
        self._last = self._start

    def timed(self, pieces: Iterator[tuple[Completion, str]]) -> Iterator[tuple[Completion, str]]:
        for text, piece in pieces:
            self._last = time.monotonic()
            self._first = self._first or self._last
            self._count += 1
            yield text, piece

    def line(self, read: int) -> str:
        """What was read and written; the speed is that of the tokens after the first, which waits for the prompt."""
        first = self._start if self._first is None else self._first
        line = f"{read:,} tokens read, the first written after {first - self._start:.2f} s; {self._count:,} written"
        seconds = self._last - first
        return f"{line}, {(self._count - 1) / seconds:,.0f} tokens/s" if seconds > 0 else line


def _shorten(text: str) -> str:
    """A prompt as part of a line."""
    words = " ".join(text.split())
    return words if len(words) <= 60 else f"{words[:29]} … {words[-28:]}"
