"""What of a sweep is done already: trainings by their checkpoints, evaluations by a receipt beside their results.

A run folder whose configuration is not the one asked for is never taken for a member and never overwritten.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.checkpoint import layout as checkpoints
from megatron.checkpoint.manifest import find_latest_valid
from megatron.checkpoint.stored_config import load_checkpoint_config
from megatron.checkpoint.trainer_state import TrainerState
from megatron.config.load import read_config as read_config
from megatron.config.yaml_files import format_value
from megatron.data.parts import compute_sequence_range
from megatron.reports.failures import RunFailure
from megatron.reports.records import RESULTS_FILE, Record, read_records
from megatron.sweeps.spec import SweepMember
from megatron.training import records
from megatron.training.records import find_record
from megatron.utils.atomic_io import parse_json, write_text_atomically
from megatron.utils.errors import FarfieldError, UserError

RECEIPT_FILE = "evaluated.json"
FORMAT = 4  # 1 had no bootstrap, 2 was a receipt for the whole results.json, 3 named the options otherwise


def find_finished_step(member: SweepMember) -> int:
    """Steps of the member's newest whole checkpoint, which its training would go on from; 0 if there is none.

    Raises:
        UserError: its folder holds a run with another configuration.
        RunError: it has checkpoints, but none is whole.
    """
    checkpoint = find_latest_valid(member.folder)
    if checkpoint is None:
        return 0
    checkpoint_config = load_checkpoint_config(checkpoint).training_fingerprint()
    wanted = member.resolved_config.training_fingerprint()
    others = [k for k, v in wanted.items() if checkpoint_config.get(k) != v]
    if others:
        changes = ", ".join(
            f"{k} {format_value(checkpoint_config.get(k))} there, {format_value(wanted[k])} here" for k in others[:4]
        )
        raise UserError(
            f"{member.folder}: holds a run with another configuration ({changes}); remove the folder, or choose "
            "another sweep.output"
        )
    return TrainerState.read(checkpoint).step


def find_divergence(member: SweepMember) -> RunFailure | None:
    """How the member's training ended, if its loss stayed bad: that is its result until it is asked for again.

    A folder whose run was configured otherwise says nothing of the member.
    """
    found = records.find_divergence(member.folder)
    if found is None:
        return None
    try:
        there = read_config(member.folder / checkpoints.CONFIG).training_fingerprint()
    except FarfieldError:
        return None
    wanted = member.resolved_config.training_fingerprint()
    if any(there.get(key) != value for key, value in wanted.items()):
        return None
    return build_failure(member, found[1], found[0])


def build_failure(member: SweepMember, reason: str, step: int | None = None) -> RunFailure:
    """A member that gave no result, as reports have it."""
    config = member.config
    return RunFailure(
        member.variant, member.seed, reason, step, config.model.seq_length if config.data.task is None else None
    )


def lacks_test_data(member: SweepMember) -> bool:
    """Was a finished training killed between its last checkpoint and the end of its test?"""
    training, data = member.config.training, member.config.data
    tests = (
        data.task is not None
        or bool(data.test_data_paths)
        or (data.data_path is not None and compute_sequence_range(data.split, "test", 10**9) is not None)
    )
    if not (tests and training.eval_interval and training.eval_iters):
        return False
    return not find_record(member.folder, "test", training.train_iters)


def read_evaluated_records(member: SweepMember) -> list[Record] | None:
    """The records of a member if it was scored in its way before and all of them are still in its results."""
    results, known = member.results / RESULTS_FILE, _read_receipt(member.results / RECEIPT_FILE)
    if known.get("how") != _describe_evaluation(member) or not results.is_file():
        return None
    there = {_hash_record(record): record for record in read_records(results)}
    wanted = known.get("records") or []
    return [there[name] for name in wanted] if wanted and all(name in there for name in wanted) else None


def write_receipt(member: SweepMember, found: Sequence[Record]) -> None:
    """Remember that these are the member's records, and how they came about."""
    receipt = {"how": _describe_evaluation(member), "records": [_hash_record(record) for record in found]}
    write_text_atomically(member.results / RECEIPT_FILE, json.dumps(receipt, indent=1) + "\n")


def _describe_evaluation(member: SweepMember) -> dict[str, Any]:
    """All that an evaluation's results depend on, as far as a sweep decides it."""
    checkpoint = checkpoints.resolve_checkpoint_path(member.folder)
    weights = (checkpoint / checkpoints.WEIGHTS).stat()
    return {
        "format": FORMAT,
        "evaluate": member.evaluation.model_dump(exclude={"batch_tokens"}),
        "method": member.variant,
        "weights": [checkpoint.name, weights.st_size, weights.st_mtime_ns],
    }


def _read_receipt(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _hash_record(record: Record) -> str:
    return hashlib.sha256(json.dumps(record.to_row()).encode()).hexdigest()
