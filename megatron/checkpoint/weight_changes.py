"""Finetuning with another position encoding, or with a score processor that the checkpoint has not.

The rest of the model stays. What the new encoding needs and the file does not hold starts fresh, and what the file
holds of the old one is dropped; both are said. An added score processor has no effect at first.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from megatron.config.schema import Config
from megatron.config.yaml_files import format_value
from megatron.model.parameter_groups import list_dispensable_weights, list_encoding_weights, map_to_shared_names
from megatron.model.position_modules import canonical_position_options

ENCODING_KEYS = ("pos_emb", "pos_emb_options", "pos_emb_per_layer")
"""The keys that say what encoding a model has."""

OLD_ENCODING_NAMES = re.compile(r"position\..*|.*\.core_attention\.position\..*")
"""Names of an encoding's weights in a file, shared by all layers or of each one."""
_IN_LAYER = re.compile(r"decoder\.layers\.\d+\.self_attention\.core_attention\.")


def is_finetune_change(config: Config, stored: Config) -> set[str]:
    """The keys of another encoding that the configuration names itself; defaults ask for nothing."""
    named = config.position.model_fields_set
    if config.position.pos_emb == stored.position.pos_emb:
        return named & {"pos_emb_options"}
    # Another encoding has its own options and sets, so what the old one had of them is no question.
    return {"pos_emb", "pos_emb_options", "pos_emb_per_layer"} if "pos_emb" in named else set()


@dataclass(frozen=True)
class WeightChanges:
    """What of the model does not come from the file, and what of the file is not used."""

    initialized: frozenset[str]
    unused: frozenset[str]

    def describe(self, config: Config, stored: Config) -> str:
        """One line."""
        new, old = (
            {**part.position.model_dump(), **canonical_position_options(part.position)} for part in (config, stored)
        )
        keys = (*ENCODING_KEYS, "score_processor", "score_processor_options")
        changed = [
            f"{key} {_format_value(old[key])} → {_format_value(new[key])}" for key in keys if old[key] != new[key]
        ]
        parts = [("fresh", self.initialized), ("dropped", self.unused)]
        return "; ".join(
            [", ".join(changed), *(f"{word}: {', '.join(_to_patterns(names)) or 'nothing'}" for word, names in parts)]
        )


def _format_value(value: Any) -> str:
    if not isinstance(value, Mapping):
        return format_value(value)
    return "{" + ", ".join(f"{key}: {format_value(each)}" for key, each in value.items() if each is not None) + "}"


def _to_patterns(names: Iterable[str]) -> list[str]:
    """Names with a star for the layer's number, short and each once."""
    return sorted({_IN_LAYER.sub("layers.*.", name) for name in names})


def find_weight_changes(
    model: nn.Module,
    config: Config,
    stored: Config,
    shapes: Mapping[str, tuple[int, ...]],
    off_stage_prefixes: tuple[str, ...],
) -> WeightChanges:
    """What differs between a model and a file of weights.

    Args:
        model: that takes the weights.
        config, stored: of the model and of the file.
        shapes: of the file's weights.
        off_stage_prefixes: how names begin that only other pipeline stages hold.
    """
    own, shared = list_encoding_weights(model), map_to_shared_names(model)
    sources = {name: name if name in shapes else shared.get(name, name) for name in own}
    held = {name for name in shapes if OLD_ENCODING_NAMES.fullmatch(name) and not name.startswith(off_stage_prefixes)}
    if config.position.pos_emb != stored.position.pos_emb:
        # The names of two encodings may agree (r1, r2), and the shapes too: what they mean does not.
        fresh, dropped = set(own), held
    else:
        fresh = {name for name, source in sources.items() if source in held and shapes[source] != own[name]}
        dropped = {sources[name] for name in fresh} - {sources[name] for name in own if name not in fresh}
    if config.position.score_processor != stored.position.score_processor:
        fresh |= list_dispensable_weights(model)
    return WeightChanges(frozenset(fresh), frozenset(dropped))
