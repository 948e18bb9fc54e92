"""What is analysed, of what: the options of `./deepy.py analyze`."""

from typing import Annotated, Literal

from megatron.options.evaluation import LENGTHS_METAVAR, LengthOptions
from megatron.options.section import CommaSeparated, config_field


class AnalysisOptions(LengthOptions):
    """How models are looked at, declared once for the command line and Python callers."""

    lengths: Annotated[list[int] | None, CommaSeparated] = config_field(
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
    window: int | None = config_field(None, "attend to the last this many keys only, the own included", ge=1)
    device: str = config_field("auto", "where models read, auto, cpu or cuda")
    precision: Literal["auto", "fp32", "bf16", "fp16"] = config_field(
        "auto", "compute type: fp32, bf16, fp16, or auto (fp32 on a CPU, the run's own on a GPU)"
    )
