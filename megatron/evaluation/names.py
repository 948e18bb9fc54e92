"""What a method is called in tables: its position encoding, with whatever differs from the defaults.

    rotary                              an encoding, nothing else
    cdape+kerple_log                    a processor on an encoding
    cdape(kernel_size=5)+kerple_log     options that are not the default's
    kerple_log(per_layer)               parameters of its own in every layer
    rotary(window=64)                   trained and evaluated with attention_window 64
    rotary(window=64 at evaluation)     trained otherwise; `evaluate --window 64`
    rotary(randomized=2048)             trained at positions drawn from 2,048

Runs that differ in more than the seed but would share a name get their run folder added, so that no table ever
averages two different things.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.schema import Config
from megatron.model.position_modules import canonical_options
from megatron.options.model import PositionOptions
from megatron.position.base import PositionModule
from megatron.position.registry import load_encoding_class, load_processor_class


def format_method_name(position: PositionOptions, window: int | None = None) -> str:
    """The name of a position configuration, as above.

    Args:
        position: what was trained.
        window: attention window of the evaluation; None is the run's own.
    """
    options = _list_differing_options(position.pos_emb_options, load_encoding_class(position.pos_emb))
    if position.pos_emb_per_layer:
        options.append("per_layer")
    if position.randomized_positions is not None:
        options.append(f"randomized={position.randomized_positions}")
    if window is not None and window != position.attention_window:
        options.append(f"window={window} at evaluation")
    elif position.attention_window is not None:
        options.append(f"window={position.attention_window}")
    name = _format_name(position.pos_emb, options)
    if position.score_processor == "none":
        return name
    options = _list_differing_options(position.score_processor_options, load_processor_class(position.score_processor))
    return f"{_format_name(position.score_processor, options)}+{name}"


def assign_distinct_names(configs: Sequence[Config], runs: Sequence[str], window: int | None = None) -> list[str]:
    """A name per run: equal for runs that differ in their seed alone, different for all others."""
    names = [format_method_name(config.position, window) for config in configs]
    trained = [{**config.training_fingerprint(), "seed": None} for config in configs]
    result = []
    for index, name in enumerate(names):
        same = [other for other in range(len(names)) if names[other] == name]
        seeds = [configs[other].training.seed for other in same]
        alike = all(trained[other] == trained[index] for other in same) and len(set(seeds)) == len(seeds)
        result.append(name if alike else f"{name} [{runs[index]}]")
    return result


def _list_differing_options(given: Mapping[str, Any], method: type[PositionModule]) -> list[str]:
    """Options that are not the default's, except those that only say where training starts."""
    defaults = canonical_options(method, {})
    options = sorted(canonical_options(method, given).items())
    return [f"{key}={value}" for key, value in options if key not in defaults or defaults[key] != value]


def _format_name(name: str, options: Sequence[str]) -> str:
    return f"{name}({', '.join(options)})" if options else name
