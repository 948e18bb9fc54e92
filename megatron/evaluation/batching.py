"""Run forward passes over many rows in batches, and halve a batch that does not fit in memory."""

from collections.abc import Callable

import torch

from megatron.utils.errors import RunError, is_out_of_memory

DEFAULT_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Default number of input tokens per forward pass. Larger batches only use more memory."""


def choose_batch_tokens(device: torch.device, batch_tokens: int | None) -> int:
    """Return the input tokens per forward pass; the default of the device if `batch_tokens` is None."""
    return batch_tokens or DEFAULT_BATCH_TOKENS.get(device.type, DEFAULT_BATCH_TOKENS["cuda"])


def run_batched(
    num_rows: int,
    length: int,
    device: torch.device,
    forward: Callable[[slice], None],
    *,
    too_large: str,
    batch_tokens: int | None = None,
    after: Callable[[int], None] | None = None,
) -> None:
    """Compute all rows in batches of consecutive rows.

    If a batch runs out of memory, halve the batch size from there on.

    Args:
        num_rows: number of rows.
        length: tokens per row.
        device: device of the computation.
        forward: computes the rows of a slice and stores their results.
        too_large: error message if a single row does not fit.
        batch_tokens: input tokens per batch; a batch has at least one row.
        after: called with the number of rows of each finished batch.

    Raises:
        RunError: a single row does not fit in device memory.
    """
    batch_size = max(1, choose_batch_tokens(device, batch_tokens) // length)
    start = 0
    while start < num_rows:
        rows = slice(start, min(start + batch_size, num_rows))
        try:
            forward(rows)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if batch_size == 1:
                raise RunError(too_large) from None
            batch_size = (rows.stop - rows.start + 1) // 2
            if device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        start = rows.stop
        if after is not None:
            after(rows.stop - rows.start)
