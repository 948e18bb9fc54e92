"""How far values at greater lengths are from those at the shortest, where each length was asked something of its own.

Nothing is paired then, and no interval is said here: `accuracy.py` has one of unpaired draws. Where all lengths score
the same tokens, `measures` says both.
"""

from collections.abc import Sequence

from megatron.reports.records import Record


def add_relative_changes(records: Sequence[Record]) -> list[Record]:
    """Records of one predictor, each with the change from that at the shortest length by its metric and protocol."""
    shortest: dict[tuple[str, str], Record] = {}
    for record in records:
        base = shortest.setdefault(_record_kind(record), record)
        if record.length < base.length:
            shortest[_record_kind(record)] = record
    return [_add_change(record, shortest[_record_kind(record)]) for record in records]


def _record_kind(record: Record) -> tuple[str, str]:
    return record.metric, record.protocol


def _add_change(record: Record, base: Record) -> Record:
    if record is base:
        return record
    return record.replace(change=record.metric_info.compute_change(record.value, base.value), change_from=base.length)
