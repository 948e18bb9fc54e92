"""A trained model in a script: its predictions, its position biases and its attention maps.

Results agree with those of the command line: the loss of a target with `evaluate` (which may score fewer targets of a
text, `docs/evaluation.md`), texts with `generate`, and maps with `analyze`.
Arrays are NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from farfield.arguments import describe_value, report_argument_errors, to_integer, to_path, to_string
from farfield.attention_maps import AttentionMaps, compute_maps
from megatron.data.tokenizers import ByteTokenizer
from megatron.options.commands import GenerationOptions
from megatron.options.model import MAX_LENGTH
from megatron.options.section import list_accepted_names
from megatron.utils.errors import UserError
from megatron.utils.formatting import format_choices, format_quantity

if TYPE_CHECKING:
    from megatron.attention.inputs import AttentionInputs
    from megatron.checkpoint.load_model import LoadedModel
    from megatron.data.tokenizers import Tokenizer

LOADED_OPTIONS = ("window", "attention_temperature", "rope", "device", "precision", "backend")
"""Options of `GenerationOptions` that are fixed when a model is loaded."""
MAX_MAP_BYTES = 4 << 30
"""Limit for all maps together, in bytes: enough for 4 layers of 32 heads at 1,400 tokens."""


@report_argument_errors
def load(
    run: str | Path,
    *,
    device: str = "auto",
    precision: str = "auto",
    backend: str | None = None,
    window: int | None = None,
    attention_temperature: str | None = None,
    rope: str | None = None,
) -> Model:
    """Load the newest checkpoint of a run, or a specific one.

    Args:
        run: the run folder, or `RUN/checkpoints/step_…`.
        device: auto, cpu, cuda or cuda:1.
        precision: fp32, bf16, fp16, or auto: fp32 on a CPU, the precision of the run on a GPU.
        backend: attention backend that overrides the run's.
        window, attention_temperature, rope: overrides of the training configuration, as in `evaluate`.

    Raises:
        UserError: the run does not exist, or does not support these options.
        RunError: the checkpoint is damaged.
    """
    from megatron.config.schema import parse_section
    from megatron.evaluation.generate_text import load_requested_model, read_generation_request

    reading = {
        "window": None if window is None else to_integer("window", window, 1, MAX_LENGTH),
        "attention_temperature": attention_temperature, "rope": rope, "device": device, "precision": precision,
    }  # fmt: skip
    options = parse_section(GenerationOptions, {**reading, "backend": backend}, source=None)
    request = read_generation_request(to_path("run", run), options, ())
    return Model(load_requested_model(request, backend=options.backend), request.tokenizer, reading)


class Model:
    """A trained model in evaluation mode, returned by `load`. Several threads may use it; its passes run in turn."""

    def __init__(self, loaded: LoadedModel, tokenizer: Tokenizer, reading: dict[str, Any]) -> None:
        self._loaded, self._reading = loaded, reading
        self._checkpoint = loaded.run.checkpoint.absolute()  # the current folder may change
        self._lock = Lock()
        self.tokenizer = tokenizer

    def __reduce__(self) -> Any:
        raise UserError(f"a model cannot be copied or pickled; load it where it is used: {str(self._checkpoint)!r}")

    def __repr__(self) -> str:
        return (
            f"<farfield.Model {self.method_name}, {self.num_parameters:,} parameters, trained {self.step:,} steps of "
            f"{self.train_length:,} tokens, {self._loaded.run.checkpoint}>"
        )

    @property
    def module(self) -> Any:
        """The `torch.nn.Module`: `module(tokens [B, T])` returns logits [B, T, vocabulary].

        It may be trained further. The model's other methods use its current weights, without dropout.
        """
        return self._loaded.model

    @property
    def method_name(self) -> str:
        """Name of the position method with its options, as shown in tables, such as cdape(width=16)+kerple_log."""
        from megatron.evaluation.provenance import format_method_name

        return format_method_name(self._loaded.run.config.position, self._loaded.position)

    @property
    def config(self) -> dict[str, Any]:
        """The training configuration: every key with its value."""
        return self._loaded.run.config.to_flat()

    @property
    def step(self) -> int:
        """Number of optimizer steps that the model was trained for."""
        return self._loaded.run.trainer_state.step

    @property
    def train_length(self) -> int:
        """Length of a training sequence, in tokens."""
        return self._loaded.run.config.model.seq_length

    @property
    def num_layers(self) -> int:
        return self._loaded.run.config.model.num_layers

    @property
    def num_heads(self) -> int:
        return self._loaded.run.config.model.num_attention_heads

    @property
    def num_parameters(self) -> int:
        return self._loaded.model.num_parameters()

    @report_argument_errors
    def encode(self, text: str) -> list[int]:
        """Tokenize a text. Prepends the tokenizer's beginning-of-text token if it has one."""
        return self.tokenizer.encode_with_bos(to_string("text", text))

    @report_argument_errors
    def decode(self, tokens: Iterable[int]) -> str:
        """Convert tokens to text."""
        if isinstance(tokens, Iterator):
            tokens = list(tokens)
        return self.tokenizer.decode(self._check_tokens("tokens", tokens).tolist())

    @report_argument_errors
    def score(
        self, text: str | bytes | Sequence[int] | np.ndarray, length: int | None = None, *, stride: int | None = None
    ) -> TokenLosses:
        """Compute the loss of each token of a text, read in windows of one length.

        A window has `length` tokens and predicts the successor of each. Tokens at the end of the text that do not fill
        a window are not scored.

        Args:
            text: a text or its tokens; bytes with the bytes tokenizer.
            length: tokens per window; the training length if None.
            stride: score only the last `stride` targets of each window, and advance windows by `stride`. Every target
                then has more than length − stride tokens of context, and the first length − stride targets of the text
                are not scored. `evaluate` with protocol strided scores the same windows, except those of an incomplete
                block at the end.

        Raises:
            UserError: the text is shorter than a window, or the window exceeds the positions that the model supports.
        """
        from megatron.evaluation.perplexity import compute_window_losses

        length = self.train_length if length is None else to_integer("length", length, 1)
        tokens = self._to_tokens(text)
        num_scored = length if stride is None else to_integer("stride", stride, 1, length)
        self._check_length(length)
        if len(tokens) < length + 1:
            raise UserError(
                f"the text has {format_quantity(len(tokens), 'token')}; a window of {length:,} needs {length + 1:,}"
            )
        starts = np.arange(0, len(tokens) - length, num_scored, dtype=np.int64)
        with self._evaluation_mode():
            losses = compute_window_losses(self._loaded.model, tokens, starts, length, num_scored)
        targets = starts[:, None] + np.arange(length - num_scored + 1, length + 1)
        return TokenLosses(length, tokens[targets], losses)

    @report_argument_errors
    def generate(self, prompt: str | Sequence[str] = "", **options: Any) -> Any:
        """Complete a text or each of several texts.

        Args:
            prompt: a text or a list of texts.
            options: options of `./deepy.py generate`: max_new_tokens, temperature, top_k, top_p, seed, stop (a string
                or a list of strings), batch_size.

        Returns:
            The text generated after the prompt, or a list of texts for a list of prompts.

        Raises:
            UserError: the name or value of an option is invalid, or the text exceeds the positions that the model
                supports.
        """
        from megatron.config.schema import parse_section
        from megatron.evaluation.text_generator import TextGenerator

        own_names = [name for name in GenerationOptions.model_fields if name not in LOADED_OPTIONS]
        for name in options:
            if name in LOADED_OPTIONS:
                raise UserError(f"{name} is an option of farfield.load")
            if name not in list_accepted_names(GenerationOptions):
                raise UserError(f"there is no option {name}; {format_choices(name, own_names)}")
        if isinstance(options.get("stop"), str):
            options["stop"] = [options["stop"]]
        generator = TextGenerator(
            self._loaded.model, self.tokenizer, parse_section(GenerationOptions, options, source=None)
        )
        if not isinstance(prompt, str | Sequence):
            raise UserError(f"prompt is {describe_value(prompt)}; it must be a string or a list of strings")
        if isinstance(prompt, str):
            prompts = [to_string("prompt", prompt)]
        else:
            prompts = [to_string(f"item {number} of prompt", each) for number, each in enumerate(prompt, start=1)]
        if not prompts:
            return []
        texts = [""] * len(prompts)
        with self._evaluation_mode():
            for completion, _ in generator.generate([generator.encode(each) for each in prompts]):
                texts[completion.prompt_index] = completion.text
        return texts[0] if isinstance(prompt, str) else texts

    @report_argument_errors
    def bias_table(self, length: int | None = None) -> np.ndarray:
        """Return the bias that the encoding adds to the scores at each distance: float64 [layers, heads, length].

        If the bias also depends on the position of the query, the table is that of the query at position length − 1.
        Distances beyond the window of a layer are −∞.

        Args:
            length: number of distances, from 0; the training length if None.

        Raises:
            UserError: the encoding adds no bias, or its bias depends on the layer's input.
        """
        import torch

        from megatron.evaluation.analysis.bias_series import compute_bias_by_distance, mask_window
        from megatron.evaluation.forward_passes import list_attention_layers

        most = MAX_MAP_BYTES // (8 * self.num_layers * self.num_heads)
        length = self.train_length if length is None else to_integer("length", length, 1, most)
        self._check_length(length)
        layers = list_attention_layers(self._loaded.model)
        encodings = [layer.encoding for layer in layers]
        if any(type(encoding).overrides_hook("gate") for encoding in encodings):
            raise UserError(
                f"the bias of {self.method_name} depends on the layer's input; use attention_maps to see it for a text"
            )
        if not any(encoding.adds_bias for encoding in encodings) and all(layer.window is None for layer in layers):
            raise UserError(f"{self.method_name} adds no bias to the scores")
        with torch.no_grad():
            tables = [
                mask_window(compute_bias_by_distance(layer.encoding, length), layer.window).cpu() for layer in layers
            ]
        return torch.stack(tables).numpy()

    @report_argument_errors
    def attention_maps(
        self, text: str | bytes | Sequence[int] | np.ndarray, layers: Iterable[int] | None = None
    ) -> dict[int, AttentionMaps]:
        """Compute scores, bias, logits and attention weights of layers for a text read as one window.

        Args:
            text: a text or its tokens; bytes with the bytes tokenizer.
            layers: layer indices, from 0, or from −1 backwards; all layers if None.

        Returns:
            The maps by layer index, from 0.

        Raises:
            UserError: no layer is given or an index is out of range, the text is empty, or it exceeds the limit of the
                model or `MAX_MAP_BYTES`.
        """
        from megatron.evaluation.forward_passes import run_forward

        tokens = self._to_tokens(text)
        try:
            if isinstance(layers, str):  # iterable, but not of indices
                raise TypeError
            asked = list(range(self.num_layers) if layers is None else layers)
        except TypeError:
            raise UserError(f"layers is {describe_value(layers)}; it must be a list of layer indices") from None
        wanted = sorted(
            {
                to_integer(f"item {number} of layers", layer, -self.num_layers, self.num_layers - 1) % self.num_layers
                for number, layer in enumerate(asked, start=1)
            }
        )
        if not wanted:
            raise UserError("layers is empty; list layers, or omit the argument for all layers")
        if not len(tokens):
            raise UserError("the text has no tokens")
        self._check_length(len(tokens))
        num_bytes = 4 * 4 * len(wanted) * self.num_heads * len(tokens) ** 2
        if num_bytes > MAX_MAP_BYTES:
            raise UserError(
                f"maps of {len(wanted)} layers at {len(tokens):,} tokens take {num_bytes / (1 << 30):.1f} GiB; the "
                f"limit is {MAX_MAP_BYTES >> 30} GiB; use fewer layers or a shorter text"
            )
        found: dict[int, AttentionMaps] = {}

        def capture_layer(layer: int, inputs: AttentionInputs) -> None:
            if layer in wanted:
                found[layer] = compute_maps(inputs)

        with self._evaluation_mode():
            run_forward(self._loaded.model, tokens, capture_layer)
        return found

    @report_argument_errors
    def analyze(self, output: str | Path | None = None, **options: Any) -> Path:
        """Make the page of `./deepy.py analyze` for this run with the options it was loaded with.

        See `farfield.analyze`.
        """
        from farfield.commands import analyze

        return analyze([self._checkpoint], output, **{**self._reading, **options})

    @contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Reserve the model for this thread, and disable dropout even if a training loop has left it enabled."""
        with self._lock:
            in_training = [part for part in self.module.modules() if part.training]
            self.module.eval()
            try:
                yield
            finally:
                for part in in_training:
                    part.training = True

    def _to_tokens(self, text: str | bytes | Sequence[int] | np.ndarray) -> np.ndarray:
        if isinstance(text, str):
            return np.asarray(self.encode(text), dtype=np.int64)
        if isinstance(text, bytes):
            if not isinstance(self.tokenizer, ByteTokenizer):
                raise UserError(
                    f"text is {describe_value(text)}; only the bytes tokenizer reads bytes; give text.decode()"
                )
            text = np.frombuffer(text, dtype=np.uint8)
        return self._check_tokens("text", text, "it must be a string, or ")

    def _check_tokens(self, name: str, value: Any, others: str = "") -> np.ndarray:
        """Return tokens as int64. Raises UserError with the name and the value of the argument."""
        size = self.tokenizer.vocab_size
        tokens: np.ndarray
        try:
            tokens = np.asarray(value)
        except (TypeError, ValueError, RuntimeError):  # ragged lists, or a tensor on a GPU
            tokens = np.zeros((0, 0))
        range_ = f"from 0 to {size - 1:,}"
        if tokens.ndim != 1:
            expected = f"a list of tokens, which are integers {range_}"
            raise UserError(f"{name} is {describe_value(value)}; {others or 'it must be '}{expected}")
        for number, token in enumerate(value if tokens.dtype.kind not in "iu" else (), start=1):
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise UserError(f"item {number} of {name} is {describe_value(token)}; it must be an integer {range_}")
        wrong = np.flatnonzero((tokens < 0) | (tokens >= size)).tolist() if tokens.size else []
        if wrong:
            raise UserError(f"item {wrong[0] + 1} of {name} is {tokens[wrong[0]]}; it must be an integer {range_}")
        return tokens.astype(np.int64)

    def _check_length(self, length: int) -> None:
        max_length = self._loaded.model.max_length
        if max_length is not None and length > max_length:
            raise UserError(f"the model supports {max_length:,} positions; a window of {length:,} tokens is too long")


@dataclass(frozen=True, eq=False, repr=False)
class TokenLosses:
    """Losses of the tokens of a text, by window. Equality is identity, because arrays have no truth value."""

    length: int
    """Number of tokens per window."""
    tokens: np.ndarray
    """Target tokens, int64 [windows, targets]."""
    values: np.ndarray
    """Losses −log p of the targets in nats, float64 [windows, targets]."""

    def __repr__(self) -> str:
        windows, targets = self.values.shape
        size = f"{format_quantity(windows, 'window')} × {format_quantity(targets, 'target')}"
        return f"<TokenLosses: {size}, loss {self.loss:.4f} nats per token>"

    @property
    def losses(self) -> np.ndarray:
        """Former name of `values`."""
        return self.values

    @property
    def loss(self) -> float:
        """Mean loss, in nats per token."""
        return float(self.values.mean())

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def average_by_position(self) -> np.ndarray:
        """Return the mean loss at each target position of the window, float64 [targets]."""
        mean: np.ndarray = self.values.mean(axis=0)
        return mean
