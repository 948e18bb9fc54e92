"""Which document goes to which split.

Whole documents are dealt out, never parts, so no text of a file is in training and in test. Each document gets a
pseudo-random number from its name and the seed alone; in the order of these numbers the first share is for training,
the next for validation, the rest for test. So the shares are exact even for a few documents (drawing a split for each
document by itself would often leave a small corpus without a test split), the order in which files are listed does
not matter, and when a corpus grows a little, nearly all documents stay where they were.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np

from megatron.utils.errors import UserError


def check_fractions(fractions: Sequence[float]) -> tuple[float, ...]:
    """Three shares divided by their sum. UserError unless they are three numbers, none negative, not all zero."""
    if len(fractions) != 3 or not all(np.isfinite(share) and share >= 0 for share in fractions) or sum(fractions) <= 0:
        raise UserError(f"split: {list(fractions)} are not three shares (train, valid, test) such as 0.9, 0.05, 0.05")
    return tuple(share / sum(fractions) for share in fractions)


def compute_split_counts(documents: int, fractions: Sequence[float]) -> list[int]:
    """Documents per split, by largest remainder; a split whose share is not zero gets at least one."""
    wanted = sum(share > 0 for share in fractions)
    if documents < wanted:
        raise UserError(
            f"split: {documents} document{'s' * (documents != 1)} cannot be divided into {wanted} splits; prepare each "
            "split by itself without dividing it (--split none)"
        )
    exact = [share * documents for share in fractions]
    result = [int(share) for share in exact]
    for i in sorted(range(len(fractions)), key=lambda i: result[i] - exact[i])[: documents - sum(result)]:
        result[i] += 1
    for i, share in enumerate(fractions):
        if share > 0 and result[i] == 0:
            result[i] += 1
            result[max(range(len(fractions)), key=result.__getitem__)] -= 1
    return result


def assign_documents(names: Iterable[str], fractions: Sequence[float], seed: int) -> np.ndarray:
    """The split of each document, uint8 [documents]: 0, 1, 2 are the positions in `fractions`."""
    key = f"{seed}:".encode()
    # surrogateescape: file names need not be UTF-8
    digests = (blake2b(key + name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names)
    drawn = np.fromiter((int.from_bytes(digest) for digest in digests), dtype=np.uint64)
    result = np.empty(len(drawn), dtype=np.uint8)
    result[np.argsort(drawn, kind="stable")] = np.repeat(
        np.arange(3, dtype=np.uint8), compute_split_counts(len(drawn), fractions)
    )
    return result
