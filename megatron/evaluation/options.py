"""How trained models are scored: the options of `./deepy.py evaluate`, most of them also of `evaluate:` in a sweep."""

from typing import Literal

from megatron.options import Section, key

Protocol = Literal["last", "nonoverlapping"]


class TaskOptions(Section):
    """Which tasks of lm-evaluation-harness a model is given, and how much of them."""

    tasks: list[str] = key(..., "names of tasks, groups or tags; * stands for anything", min_length=1)
    include_path: str | None = key(None, "with --tasks: folder with tasks of your own (YAML files)")
    limit: int | None = key(None, "with --tasks: documents of each task, the first ones; all if absent", ge=1)
    num_fewshot: int | None = key(
        None, "with --tasks: solved examples before each question; the task's own number if absent", ge=0
    )


class EvaluationOptions(Section):
    """How models are scored, declared once: the command line, sweep files and Python callers all choose these."""

    lengths: list[int] | None = key(None, "context lengths in tokens", min_length=1)
    multiples: list[float] | None = key(
        None, "context lengths in training lengths; 1 to 32 if neither these nor lengths are given", min_length=1
    )
    protocol: Protocol = key(
        "last",
        "which tokens are scored: last (of windows that end at the same places) or nonoverlapping (all, KERPLE's way)",
    )
    windows: int | None = key(None, "windows per length; 64 (last) or all (nonoverlapping) if absent", ge=1)
    targets: int | None = key(None, "tokens scored per window of last; the training length if absent", ge=1)
    data: str | None = key(
        None, "text to score: .txt or .jsonl file, corpus folder or dataset; each run's own test split if absent"
    )
    window: int | None = key(None, "attend to the last this many keys only, the own included", ge=1)
    device: str = key("auto", "where models are scored, auto, cpu or cuda; in a sweep that of the training if absent")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )
    backend: str | None = key(None, "attention backend; the run's own if absent")
    batch_tokens: int | None = key(
        None, "input tokens per forward pass; 4,096 on a CPU and 65,536 on a GPU if absent", ge=1
    )
