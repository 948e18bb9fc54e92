"""Command options outside the configuration: analyze, export, generate, import, plan, rehearse and report."""

from typing import Annotated

from megatron.options.evaluation import (
    LENGTHS_METAVAR,
    PRECISION_FIELD,
    ROPE_FIELD,
    TEMPERATURE_FIELD,
    WINDOW_FIELD,
    Length,
    LengthOptions,
    Multiple,
    Precision,
)
from megatron.options.model import AttentionBackend
from megatron.options.section import CommaSeparated, ConfigSection, config_field


class AnalysisOptions(LengthOptions):
    """Options of the analysis of trained models, shared by the command line and Python."""

    lengths: Annotated[list[Length] | None, CommaSeparated] = config_field(
        None,
        "window lengths, in tokens (512) or training lengths (2x); 1x and 4x if absent",
        min_length=1,
        metavar=LENGTHS_METAVAR,
    )
    multiples: list[Multiple] | None = config_field(
        None, "window lengths in training lengths, added to `lengths`: [1, 4] is `lengths: [1x, 4x]`", min_length=1
    )
    only: Annotated[list[str] | None, CommaSeparated] = config_field(
        None, "analyses to run; all if absent", min_length=1, metavar="NAME,…"
    )
    layers: Annotated[list[int] | None, CommaSeparated] = config_field(
        None,
        "layers whose attention maps are plotted, counted from 0 (-1 is the last); first, middle and last if absent",
        min_length=1,
        metavar="0,5,…",
    )
    heads: Annotated[list[int] | None, CommaSeparated] = config_field(
        None,
        "heads whose attention maps are plotted, counted from 0 (-1 is the last); first and last if absent",
        min_length=1,
        metavar="0,3,…",
    )
    data: str | None = config_field(
        None,
        "text to analyze: .txt or .jsonl file, corpus folder or dataset; if absent, each run's test split, or "
        "sequences of the task that a run was trained on",
    )
    num_windows: int = config_field(4, "windows per length over which attention is averaged", ge=1, old_name="windows")
    window: int | None = WINDOW_FIELD
    attention_temperature: str | None = TEMPERATURE_FIELD
    rope: str | None = ROPE_FIELD
    device: str = config_field("auto", "device of the models: auto, cpu or cuda")
    precision: Precision = PRECISION_FIELD


MAX_NEW_TOKENS = 10**9
"""Upper bound of `max_new_tokens`. Memory runs out long before it, but is allocated on demand."""


class GenerationOptions(ConfigSection):
    """Options of text generation with a trained model."""

    max_new_tokens: int = config_field(
        64,
        "maximum number of tokens to generate per prompt",
        ge=1,
        le=MAX_NEW_TOKENS,
        old_name="maximum_tokens",
    )
    temperature: float = config_field(
        1.0, "sampling temperature, the divisor of the logits; 0 always selects the most likely token (greedy)", ge=0
    )
    top_k: int = config_field(0, "sample from the k most likely tokens only; 0 samples from all", ge=0)
    top_p: float = config_field(
        1.0,
        "sample from the smallest set of most likely tokens with this total probability; 1 samples from all",
        gt=0,
        le=1,
    )
    seed: int = config_field(1234, "seed of sampling; the same seed, prompt and options give the same text", ge=0)
    stop: list[str] = config_field(list, "stop string: generation ends before it; may be repeated")
    batch_size: int = config_field(8, "maximum number of prompts per batch", ge=1)
    window: int | None = WINDOW_FIELD
    attention_temperature: str | None = TEMPERATURE_FIELD
    rope: str | None = ROPE_FIELD
    device: str = config_field("auto", "device of the model: auto, cpu or cuda")
    precision: Precision = PRECISION_FIELD
    backend: AttentionBackend | None = config_field(None, "attention backend; the run's own if absent")


class ImportOptions(ConfigSection):
    """Information that another project's checkpoint lacks."""

    config: list[str] = config_field(list, "GPT-NeoX's configuration files, if SOURCE has none", metavar="FILE")
    tokenizer: str | None = config_field(
        None, "tokenizer: bytes, HFTokenizer, GPT2BPETokenizer or SPMTokenizer; by default the one in SOURCE"
    )
    vocab_file: str | None = config_field(None, "tokenizer.json, vocab.json or .model file")
    merge_file: str | None = config_field(None, "merges.txt of GPT2BPETokenizer")
    end_token: str | None = config_field(None, "end-of-document token, if its name is not one of the usual ones")
    add_bos: bool | None = config_field(
        None, "prepend the tokenizer's beginning-of-text token to each text; if absent, as the tokenizer's file says"
    )


class ExportOptions(ConfigSection):
    """Options of an export."""

    native: bool = config_field(False, "export as a model class of transformers, if one computes the same function")
    dtype: str = config_field("float32", "data type of the weights: float32 (exact), bfloat16 or float16")
    shard: str = config_field("2GB", "maximum size of a weight file, and memory needed to export")
    license: str | None = config_field(None, "license of the weights for the model card: apache-2.0, …")
    overwrite: bool = config_field(False, "replace an existing export; with --refresh, also edited code")
    refresh: bool = config_field(
        False, "update the code of an existing export, given instead of RUN; its weights do not change"
    )


class PlanOptions(ConfigSection):
    """Cluster to plan for, and the number of layouts to list."""

    gpus: int | None = config_field(
        None, "total number of GPUs; num_gpus × nodes of the configuration, or one machine, if absent", ge=1, le=8192
    )
    gpu: str = config_field("a100-40gb", "GPU model: a100-40gb, a100-80gb, h100, …")
    gpus_per_node: int | None = config_field(
        None, "GPUs per machine; the configuration's num_gpus, or 8, if absent", ge=1, le=1024
    )
    network: float = config_field(25.0, "network bandwidth of a node in GB/s; 25 is one 200 Gbit/s adapter", ge=0.001)
    mfu: float = config_field(0.45, "fraction of its peak that a GPU reaches while computing", ge=0.001, le=1)
    gpu_memory: float | None = config_field(
        None, "memory of one GPU in GiB, if it differs from the data sheet", ge=0.1, old_name="gib"
    )
    vocabulary: int | None = config_field(
        None, "vocabulary size; if absent, that of the data if present, else 50257", ge=1
    )
    layouts: int = config_field(10, "number of layouts to list", ge=1)


class RehearseOptions(ConfigSection):
    """Simulated GPUs, and the ranks of the run to execute."""

    gpus: int | None = config_field(
        None, "total number of GPUs; num_gpus × nodes of the configuration, or one machine, if absent", ge=1, le=8192
    )
    gpu: str = config_field(
        "a100-40gb", "GPU model: a100-40gb, a100-80gb, h100, … (those of `plan` with compute capability 8.0 or 9.0)"
    )
    gpus_per_node: int | None = config_field(
        None, "GPUs per machine; the configuration's num_gpus, or 8, if absent", ge=1, le=1024
    )
    ranks: str = config_field(
        "roles",
        "ranks to execute: roles (two of each pipeline stage, representing the others), all, or rank numbers",
        metavar="roles|all|0,5,60-63",
    )
    gpu_memory: float | None = config_field(
        None, "memory of one GPU in GiB, if it differs from the data sheet", ge=0.1, le=8192, old_name="gib"
    )
    vocabulary: int | None = config_field(
        None, "vocabulary size; if absent, that of the data if present, else 50257", ge=2, le=1 << 24
    )
    network: float = config_field(25.0, "network bandwidth of a node in GB/s, for the time estimate", ge=0.001)
    mfu: float = config_field(0.45, "fraction of its peak that a GPU reaches, for the time estimate", ge=0.001, le=1)


class ReportOptions(ConfigSection):
    """Comparison of methods, and the threshold for extrapolation."""

    against: str | None = config_field(None, "baseline method for all comparisons", metavar="METHOD")
    max_change: float = config_field(
        0.1,
        "a method extrapolates if its perplexity changes by less than this fraction",
        old_name="delta",
        ge=0,
    )
    title: str | None = config_field(None, "title of the page")
    figure_width: float | None = config_field(
        None, "width of --figure in inches; 3.25, one column of a paper, if absent", ge=2, le=20
    )
    figure_font: float | None = config_field(
        None, "font size of --figure in points; 8 if absent; ticks and legend are 10% smaller", ge=4, le=24
    )
