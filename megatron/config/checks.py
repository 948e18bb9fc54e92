"""Checks that look at more than one key. Each yields the key to blame and one sentence with the values."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator

from megatron.config import names
from megatron.config.schema import Config

Problem = tuple[str, str]


def check(config: Config) -> Iterator[Problem]:
    """Everything that can be known to be wrong before torch is imported."""
    for rule in CHECKS:
        yield from rule(config)


def _shape(config: Config) -> Iterator[Problem]:
    model = config.model
    heads, width = model.num_attention_heads, model.hidden_size
    if width % heads:
        yield "num_attention_heads", f"hidden_size {width} is not divisible by num_attention_heads {heads}"
    if heads % config.launch.model_parallel_size:
        size = config.launch.model_parallel_size
        yield "model_parallel_size", f"num_attention_heads {heads} is not divisible by model_parallel_size {size}"
    if model.gpt_j_tied and not model.gpt_j_residual:
        yield "gpt_j_tied", "gpt_j_tied: true needs gpt_j_residual: true"
    if model.checkpoint_num_layers > model.num_layers:
        yield (
            "checkpoint_num_layers",
            f"checkpoint_num_layers {model.checkpoint_num_layers} is more than num_layers {model.num_layers}",
        )


def _method(
    kind: str, name: str, valid: list[str], options: dict[str, object], known: tuple[str, ...] | None
) -> Iterator[Problem]:
    if name not in valid:
        if (found := names.meant(name)) is not None:
            key, ours = found
            if key == kind:
                yield kind, f"{kind}: no method is called {name!r}; it is {ours!r} here"
            else:
                yield kind, f"{kind}: {name!r} is no choice of it but of {key}: {key}={ours}"
            return
        near = difflib.get_close_matches(name, valid, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield kind, f"{kind} {name} is not available; {hint}choose from {', '.join(valid)}"
        return
    for option in options:
        if known is not None and option not in known:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            takes = f"it takes {', '.join(known)}" if known else "it takes no options"
            yield f"{kind}_options.{option}", f"{kind} {name} has no option {option!r}; {takes}{hint}"


def _position(config: Config) -> Iterator[Problem]:
    position, model = config.position, config.model
    encodings, processors = names.encodings(), names.processors()
    known = names.encoding_options(position.pos_emb) if position.pos_emb in encodings else None
    yield from _method("pos_emb", position.pos_emb, encodings, position.pos_emb_options, known)
    known = names.processor_options(position.score_processor) if position.score_processor in processors else None
    yield from _method("score_processor", position.score_processor, processors, position.score_processor_options, known)
    size = position.score_processor_options.get("kernel_size")
    if isinstance(size, int) and (size < 1 or size % 2 == 0):
        yield (
            "score_processor_options.kernel_size",
            f"score_processor_options.kernel_size is {size}; it must be odd: 1, 3, 5, 7 …",
        )
    table, limit = model.max_position_embeddings, position.randomized_positions
    if limit is not None and limit < model.seq_length:
        yield "randomized_positions", f"randomized_positions {limit} is less than seq_length {model.seq_length}"
    if position.pos_emb == "learned" and table is not None and table < model.seq_length:
        yield (
            "max_position_embeddings",
            f"seq_length {model.seq_length} is longer than the learned table, max_position_embeddings {table}",
        )


def _batch(config: Config) -> Iterator[Problem]:
    training = config.training
    batch, micro = training.train_batch_size, training.train_micro_batch_size_per_gpu
    if batch is not None and "train_micro_batch_size_per_gpu" in training.model_fields_set and batch % micro:
        yield (
            "train_batch_size",
            f"train_batch_size {batch} is not divisible by train_micro_batch_size_per_gpu {micro}",
        )


def _schedule(config: Config) -> Iterator[Problem]:
    optimizer = config.optimizer
    params = optimizer.optimizer.params
    if optimizer.min_lr > params.lr:
        yield "min_lr", f"min_lr {optimizer.min_lr} is greater than optimizer.params.lr {params.lr}"
    if any(not 0 <= beta < 1 for beta in params.betas):
        yield "optimizer.params.betas", f"optimizer.params.betas are {params.betas}; each must be in [0, 1)"


def _precision(config: Config) -> Iterator[Problem]:
    if config.training.precision == "fp16" and config.launch.device == "cpu":
        yield "precision", "fp16 needs a GPU and device is cpu; choose precision fp32 or bf16"


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    paths = {
        "train": (data.train_data_paths, data.train_data_weights),
        "valid": (data.valid_data_paths, data.valid_data_weights),
        "test": (data.test_data_paths, data.test_data_weights),
    }
    for split, (files, weights) in paths.items():
        if data.data_path is not None and files:
            yield f"{split}_data_paths", f"{split}_data_paths and data_path exclude each other; give one of them"
        for path in sorted({path for path in files if files.count(path) > 1}):
            yield f"{split}_data_paths", f"{split}_data_paths names {path} more than once; give it a greater weight"
        if weights and len(weights) != len(files):
            yield (
                f"{split}_data_weights",
                f"{split}_data_weights has {len(weights)} values for {len(files)} paths in {split}_data_paths",
            )
        if any(weight <= 0 for weight in weights):
            yield (
                f"{split}_data_weights",
                f"{split}_data_weights are {weights}; each must be greater than 0; leave a dataset out instead",
            )
    yield from _split(data.split)
    needs = {
        "HFTokenizer": ("vocab_file",),
        "SPMTokenizer": ("vocab_file",),
        "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    }
    for name in needs.get(data.tokenizer_type or "", ()):
        if getattr(data, name) is None:
            yield "tokenizer_type", f"tokenizer_type {data.tokenizer_type} needs {name}"
    if data.tokenizer_type is None and data.vocab_file is not None:
        yield "vocab_file", "vocab_file is given without tokenizer_type; choose HFTokenizer or SPMTokenizer"


def _split(text: str) -> Iterator[Problem]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    good = 1 <= len(shares) <= 3 and all(0 <= share < float("inf") for share in shares) and sum(shares) > 0
    if not good or shares[0] == 0:
        yield (
            "split",
            f"split is {text!r}; it must be up to three shares, train, valid and test, such as 969,30,1",
        )


def _run(config: Config) -> Iterator[Problem]:
    if config.checkpoint.finetune and config.checkpoint.load is None:
        yield "finetune", "finetune: true needs load, the run to take the weights from"


CHECKS: tuple[Callable[[Config], Iterator[Problem]], ...] = (
    _shape,
    _position,
    _batch,
    _schedule,
    _precision,
    _data,
    _run,
)
