"""What commands are asked beside a configuration: the options of analyze, export, generate, import, plan, rehearse and
report."""

from typing import Annotated, Literal

from megatron.options.evaluation import LENGTHS_METAVAR, Length, LengthOptions
from megatron.options.model import MAX_LENGTH
from megatron.options.section import CommaSeparated, ConfigSection, config_field


class AnalysisOptions(LengthOptions):
    """How models are looked at, declared once for the command line and Python callers."""

    lengths: Annotated[list[Length] | None, CommaSeparated] = config_field(
        None,
        "window lengths in tokens; on the command line also in training lengths, and 1x and 4x if absent",
        min_length=1,
        metavar=LENGTHS_METAVAR,
    )
    multiples: list[float] | None = config_field(
        None, "window lengths in training lengths; 1 and 4 if neither these nor lengths are given", min_length=1
    )
    only: Annotated[list[str] | None, CommaSeparated] = config_field(
        None, "analyses to make; all if absent", min_length=1, metavar="NAME,…"
    )
    layers: Annotated[list[int] | None, CommaSeparated] = config_field(
        None,
        "layers whose maps are drawn, counted from 0; the first, the middle and the last if absent",
        min_length=1,
        metavar="0,5,…",
    )
    heads: Annotated[list[int] | None, CommaSeparated] = config_field(
        None,
        "heads whose maps are drawn, counted from 0; the first and the last if absent",
        min_length=1,
        metavar="0,3,…",
    )
    data: str | None = config_field(
        None,
        "text to read: .txt or .jsonl file, corpus folder or dataset; each run's own test split if absent, and of runs "
        "that learned a task, sequences of that task",
    )
    windows: int = config_field(4, "windows that attention is averaged over, at each length", ge=1)
    window: int | None = config_field(
        None, "attend to the last this many keys only, the own included", ge=1, le=MAX_LENGTH
    )
    attention_temperature: str | None = config_field(
        None,
        "temperature of attention to read with, one without learned parameters, as NAME or NAME:OPTION=VALUE: logn, "
        "llama4:floor_scale=512; the run's own if absent",
    )
    rope: str | None = config_field(
        None,
        "scaling of rotary to read with, of a run that was trained without: pi:8, ntk:8, dynamic, yarn:8, "
        "longrope:FILE, selfextend:GROUP,NEIGHBORS or rerope:NEIGHBORS",
    )
    device: str = config_field("auto", "where models read, auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = config_field(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )


MAX_NEW_TOKENS = 10**9
"""Tokens. Memory ends long before, but is taken as it is needed."""


class GenerationOptions(ConfigSection):
    """How a trained model goes on with a text."""

    maximum_tokens: int = config_field(
        64, "tokens that are written after a prompt, unless the text ends before", ge=1, le=MAX_NEW_TOKENS
    )
    temperature: float = config_field(
        1.0, "logits are divided by it; 0 takes the likeliest token always (greedy)", ge=0
    )
    top_k: int = config_field(0, "draw from the k likeliest tokens alone; 0 from all", ge=0)
    top_p: float = config_field(
        1.0, "draw from the fewest likeliest tokens whose probabilities reach this sum; 1 from all", gt=0, le=1
    )
    seed: int = config_field(1234, "of the draws: the same seed, prompt and options give the same text", ge=0)
    stop: list[str] = config_field(
        list, "a text that ends what is written where it occurs, and is left out; as many as you like"
    )
    batch_size: int = config_field(8, "prompts that are read together, at most", ge=1)
    window: int | None = config_field(
        None, "attend to the last this many keys only, the own included", ge=1, le=MAX_LENGTH
    )
    attention_temperature: str | None = config_field(
        None,
        "temperature of attention to read with, one without learned parameters, as NAME or NAME:OPTION=VALUE: logn, "
        "llama4:floor_scale=512; the run's own if absent",
    )
    rope: str | None = config_field(
        None,
        "scaling of rotary to read with, of a run that was trained without: pi:8, ntk:8, dynamic, yarn:8, "
        "longrope:FILE, selfextend:GROUP,NEIGHBORS or rerope:NEIGHBORS",
    )
    device: str = config_field("auto", "where the model computes: auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = config_field(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )
    backend: str | None = config_field(None, "attention backend; the run's own if absent")


class ImportOptions(ConfigSection):
    """What a foreign checkpoint does not say of itself."""

    config: list[str] = config_field(list, "GPT-NeoX's configuration files, if SOURCE has none", metavar="FILE")
    tokenizer: str | None = config_field(
        None, "one of bytes, HFTokenizer, GPT2BPETokenizer and SPMTokenizer; the one in SOURCE if absent"
    )
    vocab_file: str | None = config_field(None, "tokenizer.json, vocab.json or .model file")
    merge_file: str | None = config_field(None, "merges.txt of GPT2BPETokenizer")
    end_token: str | None = config_field(None, "the token that ends a document, if it has none of the usual names")
    add_bos: bool | None = config_field(
        None, "put the tokenizer's token for the beginning of a text before each; as its file says if absent"
    )


class ExportOptions(ConfigSection):
    """What an exported folder holds."""

    native: bool = config_field(False, "as a model of transformers' own, where one computes the same")
    dtype: str = config_field("float32", "of the weights: float32 (exact), bfloat16 or float16")
    shard: str = config_field("2GB", "the largest file of weights, which is also what memory holds")
    license: str | None = config_field(None, "of the weights, for the model card: apache-2.0, …")
    overwrite: bool = config_field(False, "replace an export that is there; with --refresh, also code that was edited")
    refresh: bool = config_field(
        False, "renew the code of an existing export, given instead of RUN and DIR; its weights do not change"
    )


class PlanOptions(ConfigSection):
    """A cluster, and how much of the plan is shown."""

    gpus: int = config_field(8, "GPUs in all", ge=1, le=8192)
    gpu: str = config_field("a100-40gb", "which: a100-40gb, a100-80gb, h100, …")
    gpus_per_node: int = config_field(8, "GPUs of one machine", ge=1, le=1024)
    network: float = config_field(25.0, "GB/s of one node to the others; 25 is one 200 Gbit/s adapter", ge=0.001)
    mfu: float = config_field(0.45, "share of its peak that a GPU reaches while it computes", ge=0.001, le=1)
    gib: float | None = config_field(None, "memory of one GPU in GiB, if it differs from the data sheet", ge=0.1)
    vocabulary: int | None = config_field(None, "tokens; the data's if they are here, else 50257", ge=1)
    layouts: int = config_field(10, "layouts to list", ge=1)


class RehearseOptions(ConfigSection):
    """Whose GPUs are played, and which ranks of the run are executed."""

    gpus: int | None = config_field(None, "GPUs in all; as the configuration says if absent", ge=1, le=8192)
    gpu: str = config_field(
        "a100-40gb", "which: a100-40gb, a100-80gb, h100, … (of those that `plan` knows, compute capability 8.0 and 9.0)"
    )
    gpus_per_node: int | None = config_field(
        None, "GPUs of one machine; the configuration's num_gpus, or 8, if absent", ge=1, le=1024
    )
    ranks: str = config_field(
        "roles",
        "which to execute: roles (two of each pipeline stage, which stand for the others), all, or numbers",
        metavar="roles|all|0,5,60-63",
    )
    gib: float | None = config_field(
        None, "memory of one GPU in GiB, if it differs from the data sheet", ge=0.1, le=8192
    )
    vocabulary: int | None = config_field(None, "tokens; the data's if they are here, else 50257", ge=2, le=1 << 24)
    network: float = config_field(25.0, "GB/s of one node to the others, for the estimate of time", ge=0.001)
    mfu: float = config_field(0.45, "share of its peak that a GPU reaches, for the estimate of time", ge=0.001, le=1)


class ReportOptions(ConfigSection):
    """What is compared, and what counts as extrapolating."""

    against: str | None = config_field(None, "compare all others with this method", metavar="METHOD")
    delta: float = config_field(0.1, "a method extrapolates if its perplexity changes by less than this fraction", ge=0)
    title: str | None = config_field(None, "of the page")
