"""What is analysed, of what: the options of `./deepy.py analyze`."""

from typing import Literal

from megatron.options.section import Section, key


class AnalysisOptions(Section):
    """How models are looked at, declared once for the command line and Python callers."""

    lengths: list[int] | None = key(None, "window lengths in tokens", min_length=1)
    multiples: list[float] | None = key(
        None, "window lengths in training lengths; 1 and 4 if neither these nor lengths are given", min_length=1
    )
    only: list[str] | None = key(None, "analyses to make; all if absent", min_length=1)
    layers: list[int] | None = key(
        None, "layers whose maps are drawn, counted from 0; the first, the middle and the last if absent", min_length=1
    )
    heads: list[int] | None = key(
        None, "heads whose maps are drawn, counted from 0; the first and the last if absent", min_length=1
    )
    data: str | None = key(
        None,
        "text to read: .txt or .jsonl file, corpus folder or dataset; each run's own test split if absent, and of runs "
        "that learned a task, sequences of that task",
    )
    windows: int = key(4, "windows that attention is averaged over, at each length", ge=1)
    window: int | None = key(None, "attend to the last this many keys only, the own included", ge=1)
    device: str = key("auto", "where models read, auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = key(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )
