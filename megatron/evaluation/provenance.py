"""Provenance of records: model, time, machine, and software of a measurement.

A method is named after its position encoding and its settings that differ from the defaults:

    rotary                              an encoding with default settings
    cdape+kerple_log                    a score processor on top of an encoding
    cdape(kernel_size=5)+kerple_log     options other than the defaults
    kerple_log(per_layer)               separate parameters in every layer
    rotary(window=64)                   trained and evaluated with attention_window 64
    rotary(window=64 at evaluation)     trained otherwise; `evaluate --window 64`
    rotary(temperature=ssmax)           trained and evaluated with attention_temperature ssmax
    rotary(temperature=logn at evaluation)   trained otherwise; `evaluate --attention-temperature logn`
    rotary(softmax=learnable)           trained and evaluated with softmax_type learnable
    rotary(scaling=hope)                trained without position in the slow pairs
    rotary(rope=yarn:8 at evaluation)   trained with plain frequencies; `evaluate --rope yarn:8`
    rotary(randomized=2048)             trained at positions drawn from 2,048
    rotary(attention_mask=document)     trained and evaluated with documents masked from each other
    rotary(attention_mask=document at evaluation)
                                        trained across documents; `evaluate --attention-mask document`
    3 × rotary(window=64) | none        layers that differ, a repeating pattern of four

A record contains this name and a digest of the training configuration. If runs with the same name differ in more than
the seed, tables add the run folder (`reports/method_rows.py`), so that a table never averages different methods.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.position_overrides import format_rope, override_position
from megatron.options.position import PositionOptions, find_period
from megatron.utils.formatting import format_quantity
from megatron.utils.project import get_farfield_version

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.load_model import LoadedModel
    from megatron.config.schema import Config
    from megatron.position.base import PositionModule

# torch is imported inside functions, so that errors in the options are reported at once.


def format_method_name(position: PositionOptions, evaluated: PositionOptions | None = None) -> str:
    """Return the name of a position configuration, in the format described above.

    Args:
        position: position options of the training.
        evaluated: position options of the evaluation (`config/position_overrides.py`); None if unchanged.
    """
    from megatron.model.position_modules import list_layer_positions

    evaluated = evaluated or position
    period = lcm(position.period, evaluated.period)
    layers = zip(list_layer_positions(position, period), list_layer_positions(evaluated, period), strict=True)
    masks = _list_mask_names(position, evaluated)
    is_pattern = period > 1  # settings common to all layers then appear once, at the end
    names = [_format_layer_name(*pair, [] if is_pattern else masks) for pair in layers]
    groups = [(name, len(list(group))) for name, group in groupby(find_period(names))]
    whole = " | ".join(name if count == 1 else f"{count} × {name}" for name, count in groups)
    return f"{whole} ({', '.join(masks)})" if is_pattern and masks else whole


def _list_mask_names(position: PositionOptions, evaluated: PositionOptions) -> list[str]:
    if evaluated.attention_mask != position.attention_mask:
        return [f"attention_mask={evaluated.attention_mask} at evaluation"]
    return [] if position.attention_mask == "causal" else [f"attention_mask={position.attention_mask}"]


def _format_layer_name(position: PositionOptions, evaluated: PositionOptions, masks: Sequence[str]) -> str:
    from megatron.position.registry import load_encoding_class, load_processor_class

    options = _list_differing_options(position.pos_emb_options, load_encoding_class(position.encoding))
    if position.pos_emb_per_layer:
        options.append("per_layer")
    if position.randomized_positions is not None:
        options.append(f"randomized={position.randomized_positions}")
        options += ["continuous"] if position.continuous_positions else []
    for key, (before, now) in {
        "window": (position.window, evaluated.window),
        "temperature": (_get_temperature_name(position), _get_temperature_name(evaluated)),
    }.items():
        if before != now:
            options.append(f"{key}={now or 'none'} at evaluation")
        elif now is not None:
            options.append(f"{key}={now}")
    if position.softmax != "vanilla":
        options.append(f"softmax={position.softmax}")
    if evaluated.pos_emb_options != position.pos_emb_options:
        options.append(f"rope={format_rope(evaluated.pos_emb_options)} at evaluation")
    options += masks
    name = _format_name(position.encoding, options)
    if position.processor == "none":
        return name
    options = _list_differing_options(position.score_processor_options, load_processor_class(position.processor))
    return f"{_format_name(position.processor, options)}+{name}"


def _get_temperature_name(position: PositionOptions) -> str | None:
    from megatron.position.registry import load_temperature_class

    name = position.temperature
    if name == "none":
        return None
    options = _list_differing_options(position.attention_temperature_options, load_temperature_class(name))
    return _format_name(name, options)


def list_method_names(configs: Sequence[Config], **overrides: Any) -> list[str]:
    """Return the name of each run's method.

    Args:
        overrides: position options changed at evaluation (`override_position`).
    """
    return [
        format_method_name(config.position, override_position(config.model, config.position, **overrides))
        for config in configs
    ]


def distinguish_names(names: Sequence[str], configs: Sequence[Config], runs: Sequence[str]) -> list[str]:
    """Return the method names of runs, with the run added to names that runs share despite different trainings.

    Args:
        names: method names (`list_method_names`).
        configs: configurations of the runs. Runs that differ only in the seed share a name.
        runs: names of the runs.
    """
    fingerprints = [{**config.get_training_fingerprint(), "seed": None} for config in configs]
    distinct_names = []
    for index, name in enumerate(names):
        namesakes = [other for other in range(len(names)) if names[other] == name]
        seeds = [configs[other].training.seed for other in namesakes]
        same_training = all(fingerprints[other] == fingerprints[index] for other in namesakes)
        differ_in_seed_alone = same_training and len(set(seeds)) == len(seeds)
        distinct_names.append(name if differ_in_seed_alone else f"{name} [{runs[index]}]")
    return distinct_names


def _list_differing_options(options: Mapping[str, Any], method: type[PositionModule]) -> list[str]:
    """List options that differ from the defaults, except those that only set initial values."""
    from megatron.model.position_modules import canonicalize_options

    defaults = canonicalize_options(method, {})
    items = sorted(canonicalize_options(method, options).items())
    return [f"{key}={value}" for key, value in items if key not in defaults or defaults[key] != value]


def _format_name(name: str, options: Sequence[str]) -> str:
    return f"{name}({', '.join(options)})" if options else name


def describe_model(loaded: LoadedModel) -> dict[str, Any]:
    """Return the record fields that describe a model."""
    import torch

    config, model = loaded.run.config, loaded.model
    name = format_method_name(config.position, loaded.position)
    parameter = next(model.parameters())
    device = parameter.device
    return {
        "method": name,
        "train_length": config.model.seq_length,
        "seed": config.training.seed,
        "position": name,
        "max_length": model.max_length,
        "parameters": model.num_parameters(),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def start_stopwatch(model: torch.nn.Module) -> Callable[[], dict[str, Any]]:
    """Start a measurement of a model's work. The returned function ends it.

    Returns:
        Function that returns record fields for the time and the peak memory: allocated on the model's GPU, or resident
            in this process if the system reports it.
    """
    device = next(model.parameters()).device
    reset_peak_memory(device)
    start, cpu_start = time.perf_counter(), time.process_time()

    def stop() -> dict[str, Any]:
        now = datetime.now(UTC)
        seconds, cpu_seconds = round(time.perf_counter() - start, 3), round(time.process_time() - cpu_start, 3)
        memory = read_peak_memory(device)
        fields = {} if memory is None else {"memory_gib": round(memory, 4)}
        return {"seconds": seconds, "cpu_seconds": cpu_seconds, **fields, "date": now.isoformat(timespec="seconds")}

    return stop


PROCESS_STATUS, PROCESS_PEAKS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory counters of a GPU and of this process, if the system supports it."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        PROCESS_PEAKS.write_text("5", encoding="ascii")  # Linux, see proc(5)


def read_peak_memory(device: torch.device) -> float | None:
    """Return the peak memory since the last reset, in GiB, or None if the system does not report it."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    try:
        lines = PROCESS_STATUS.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        return None  # not Linux
    peaks = [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]
    return peaks[0] / 2**20 if peaks else None


def describe_machine() -> str:
    """Describe the operating system, processor, and number of threads."""
    import torch

    processor = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
    except OSError:
        pass  # not Linux
    return (
        f"{platform.system()} {platform.machine()}, {processor}, {format_quantity(torch.get_num_threads(), 'thread')}"
    )


def list_software_versions() -> str:
    """List the versions of this project, Python, torch, and megatron-core."""
    import torch

    python = ".".join(map(str, sys.version_info[:3]))
    packages = f"torch {torch.__version__}, megatron-core {version('megatron-core')}"
    return f"farfield {get_farfield_version()}, Python {python}, {packages}"
