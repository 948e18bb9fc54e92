"""Configuration that a record was trained with, compared with the current file of its experiment.

The folder of an experiment's run is named by a hash of the keys that decide its training, without those that have their
default (`compute_run_identity`). A record therefore proves its configuration: the current one if its hash is the same,
or else the current one without some keys, which the file has set since. They are found by trying: removing no other
keys of the current configuration gives the hash of the record.

The leaderboard's runs have no such names. Its methods are compared with their files in configs/position instead, which
define them as published.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Any

import yaml

from megatron.config.method_names import find_keys_differing_from_overlay, list_overlays
from megatron.config.schema import Config, compute_keys_digest, map_key_owners
from megatron.options.data import SPLITS
from megatron.position import registry
from megatron.reports.records import Record
from megatron.sweeps.spec import read_sweep

METHOD_SECTION = "position"
"""Section of the keys that define a method. Others are settings of its training."""
DECAY_KEY = "decay_positions"
LEADERBOARD, SECOND_TIER = "zoo", "zoo_3m"
MAX_REMOVED = 4
"""Largest number of keys that a file is assumed to have set since a record."""
RUN_FOLDER = re.compile(r".*-(?P<digest>[0-9a-f]{8})")


@dataclass(frozen=True)
class ConfigurationChange:
    """Keys that the current file of an experiment sets for a method, and its record was trained without."""

    keys: Mapping[str, Any]
    is_known: bool = True
    """False if the record does not identify its configuration, or no keys explain it."""

    @property
    def redefines_method(self) -> bool:
        """True if a key defines the method, so that the record is of another method."""
        return any(map_key_owners().get(key) == METHOD_SECTION for key in self.keys)


@cache
def list_configurations(experiment: str) -> dict[str, Config]:
    """Return the current configuration of each variant of an experiment at small size, or of a leaderboard."""
    model = "quickstart" if experiment in (LEADERBOARD, SECOND_TIER) else "small"
    return {member.variant: member.config for member in read_sweep([model, experiment]).members}


def find_configuration_change(experiment: str, record: Record) -> ConfigurationChange:
    """Find the keys that an experiment sets for a method since a record was trained.

    Keys without effect on the method are left out, and so is the text, which docs/results/small.md states.

    Args:
        experiment: name of a file in configs/experiment.
        record: record of one of its variants at small size.
    """
    if experiment == LEADERBOARD:
        return _compare_with_method_file(record.method)
    folder = "" if record.run is None else PurePath(record.run).parent.name
    corpus = None if record.dataset is None else PurePath(record.dataset).parent
    return _find_change(experiment, record.method, folder, corpus)


@cache
def _find_change(experiment: str, method: str, folder: str, corpus: PurePath | None) -> ConfigurationChange:
    """Find the change of a method from the name of its run's folder and the folder of its corpus."""
    config, found = list_configurations(experiment).get(method), RUN_FOLDER.fullmatch(folder)
    if config is None or found is None:
        return ConfigurationChange({}, is_known=False)
    keys = {key: value for key, value in config.get_training_fingerprint(defaults=False).items() if key != "seed"}
    if corpus is not None:
        paths = {f"{split}_data_paths": [str(corpus / f"{split}_text_document")] for split in SPLITS}
        keys |= {key: path for key, path in paths.items() if key in keys}
    for count in range(MAX_REMOVED + 1):
        for removed in itertools.combinations(keys, count):
            kept = {key: value for key, value in keys.items() if key not in removed}
            if compute_keys_digest(kept)[: len(found["digest"])] == found["digest"]:
                return ConfigurationChange({key: keys[key] for key in removed if _affects_method(key, config)})
    return ConfigurationChange({}, is_known=False)


@cache
def _compare_with_method_file(method: str) -> ConfigurationChange:
    """Find the keys that a method's file in configs/position sets, and the variant of the leaderboard does not."""
    config = list_configurations(LEADERBOARD).get(method)
    if config is None or method not in list_overlays():
        return ConfigurationChange({}, is_known=False)
    keys = find_keys_differing_from_overlay(config, method)
    return ConfigurationChange({key: keys[key] for key in keys if map_key_owners().get(key) == METHOD_SECTION})


def _affects_method(key: str, config: Config) -> bool:
    """Return False for the decay of a method's parameters if it has none."""
    if key != DECAY_KEY:
        return True
    position = config.position
    names = {*position.encodings, *position.processors, *position.temperatures}
    return any(method["parameters"] != "none" for method in registry.describe_methods(names)[0])


def describe_changes(changes: Mapping[str, ConfigurationChange]) -> str:
    """Describe the changes of several methods as a cell: keys of all of them once, others with the method's name.

    Args:
        changes: method → its change.
    """
    if not all(change.is_known for change in changes.values()):
        return "unknown"
    first = next(iter(changes.values())).keys
    shared = [key for key in first if all(key in change.keys for change in changes.values())]
    parts = [_format_keys(first, shared)] if shared else []
    for method, change in changes.items():
        if own := [key for key in change.keys if key not in shared]:
            parts.append(f"{method}: {_format_keys(change.keys, own)}")
    return "; ".join(parts) or "–"


def _format_keys(keys: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"`{yaml.safe_dump({name: keys[name]}, default_flow_style=True).strip()[1:-1]}`" for name in names)
