"""How long training sequences are."""

from megatron.options.data import DataOptions
from megatron.tasks.task_config import read_task_config


def list_sequence_lengths(data: DataOptions, seq_length: int) -> tuple[int, ...]:
    """Tokens of training sequences, each length as often as it stands here: seq_length, or those of the task."""
    return (seq_length,) if data.task is None else read_task_config(data).sequence_lengths
