"""Forward passes over more rows than the memory holds at once: as many together as fit, fewer where they do not."""

from collections.abc import Callable

import torch

from megatron.utils.errors import RunError, is_out_of_memory

DEFAULT_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Input tokens per forward pass unless said otherwise: beyond these a batch only takes more memory."""


def choose_batch_tokens(device: torch.device, batch_tokens: int | None) -> int:
    """Input tokens of a forward pass on a device; what is usual there if None."""
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
    """Compute all rows, consecutive ones together; a batch that the memory refuses is halved, as are those after it.

    Args:
        num_rows: how many there are.
        length: tokens of each.
        device: where they are computed.
        forward: computes the rows of a slice, and stores their results.
        too_large: the message where a single row does not fit.
        batch_tokens: of a batch; at least one row is always taken.
        after: called with the number of rows of each finished batch.

    Raises:
        RunError: the device's memory is too small for a single row.
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
