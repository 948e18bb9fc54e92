"""Rotary positions in a config.json: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4."""

import math
from collections.abc import Mapping
from typing import Any

from megatron.formats.keys import Keys

THEIRS = {"default": "none", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
"""Their `rope_type`, and our `scaling`."""
NAMES = {
    "factor": "factor", "original_max_position_embeddings": "original_length", "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
}  # fmt: skip
"""Their parameters, and our options."""
DRIFTS = (
    "transformers computes rotary angles in float32, and in bfloat16 rounds their sines: the logits are those of this "
    "project at the training length, and drift away beyond it"
)
TAKEN = {
    "none": (), "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
}  # fmt: skip


def read(keys: Keys, *, base: str, fraction: str | None, whole: float) -> dict[str, Any]:
    """`pos_emb_options` of rotary.

    Args:
        keys: of config.json.
        base: the key of transformers 4 that holds the base of the angles.
        fraction: the one that holds the share of a head that is turned; None if the family turns all of it.
        whole: that share where nothing says it.

    Raises:
        UserError: a scaling that is not offered, or a parameter of it.
    """
    named = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"  # the order of transformers
    keys.get("rope_parameters")
    part = keys.get(named, {})
    if not isinstance(part, Mapping):
        raise keys.refuse(named, "it must be a mapping")
    given: dict[str, Any] = {name: value for name, value in part.items() if value is not None}
    for name, value in given.items():
        wanted = {"rope_type": str, "type": str, "truncate": bool}.get(name)
        right = isinstance(value, wanted) if wanted else isinstance(value, int | float) and not isinstance(value, bool)
        if not right or (name == "rope_theta" and not value > 1) or (name == "partial_rotary_factor" and not value > 0):
            raise keys.refuse(named, f"its {name} cannot be {value!r}")
    theta, share = keys.real(base, 10000.0), keys.real(fraction, whole) if fraction else whole
    theta, share = given.pop("rope_theta", theta), given.pop("partial_rotary_factor", share)
    kinds = {str(given.pop(name)) for name in ("rope_type", "type") if name in given} or {"default"}
    if len(kinds) > 1 or not kinds <= THEIRS.keys():
        raise keys.refuse(named, f"rotary scaling {' or '.join(sorted(kinds))} is not offered; {', '.join(THEIRS)} are")
    scaling = THEIRS[kinds.pop()]
    if fraction is None and share != 1:
        raise keys.refuse(named, "this family turns whole heads")
    options: dict[str, Any] = {}
    if share != 1:
        options["fraction"] = float(share)
    if theta != 10000:
        options["base"] = float(theta)
    if scaling == "none":
        return options if not given else _unknown(keys, named, given)
    options["scaling"] = scaling
    if scaling == "yarn":
        _settle_yarn(keys, named, given)
    if scaling in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", keys.number("max_position_embeddings"))
    for name in TAKEN[scaling]:
        if name in given:
            options[NAMES[name]] = given.pop(name)
    return options if not given else _unknown(keys, named, given)


def _unknown(keys: Keys, named: str, rest: Mapping[str, Any]) -> dict[str, Any]:
    raise keys.refuse(named, f"its {next(iter(rest))} means nothing here")


def _settle_yarn(keys: Keys, named: str, given: dict[str, Any]) -> None:
    """DeepSeek's way to say the factor of cosines and sines, and the rounding, which is always done here."""
    if given.pop("truncate", True) is not True:
        raise keys.refuse(named, "its truncate must be true")
    mscale, everywhere = given.pop("mscale", None), given.pop("mscale_all_dim", None)
    if mscale and everywhere and "attention_factor" not in given:
        grown = [0.1 * each * math.log(given.get("factor", 1.0)) + 1.0 for each in (mscale, everywhere)]
        given["attention_factor"] = grown[0] / grown[1]


def written(options: Mapping[str, Any], *, fraction: bool) -> dict[str, Any]:
    """The keys of config.json, in the words of transformers 4 and 5 both, of our options.

    Args:
        options: `pos_emb_options` of rotary.
        fraction: whether the family can turn a part of each head.
    """
    scaling = options.get("scaling", "none")
    theirs = {ours: name for name, ours in NAMES.items()}
    parameters: dict[str, Any] = {
        "rope_type": next(name for name, ours in THEIRS.items() if ours == scaling),
        **{theirs[name]: value for name, value in options.items() if name in theirs and value is not None},
    }
    keys: dict[str, Any] = {"rope_scaling": parameters if scaling != "none" else None}
    if scaling != "none":
        # Older versions call the kind `type`.
        keys["rope_scaling"] = {**parameters, "type": parameters["rope_type"]}
        if scaling == "llama3":
            defaults = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
            keys["rope_scaling"] = {**defaults, **keys["rope_scaling"]}
            parameters = {**defaults, **parameters}
    share = {"partial_rotary_factor": options.get("fraction", 1.0)} if fraction else {}
    keys["rope_parameters"] = {**parameters, "rope_theta": options.get("base", 10000.0), **share}
    return keys
