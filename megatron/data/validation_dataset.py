"""Held-out text for validation during training: each token is scored once, in a fixed order.

A text is cut into windows of T tokens; the last window is padded with positions that are not scored. Every token except
a text's first is therefore a target exactly once, for any T. Losses at different lengths cover the same tokens, which
depend on neither the seed, nor the batch size, nor the number of ranks.

A limit keeps a subset of the blocks of the longest T, evenly spread over the text: those whose index i has the smallest
fractional part of i · φ, with φ the golden ratio. A smaller limit keeps a subset of the blocks of a larger one.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from megatron.data.load_tokenizer import Vocabulary

Sample = dict[str, torch.Tensor]

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def choose_blocks(num_blocks: int, limit: int | None) -> np.ndarray:
    """Return the indices of the scored blocks, int64 [blocks], ascending: all blocks, or `limit` of them."""
    if limit is None or limit >= num_blocks:
        return np.arange(num_blocks)
    fractions = np.arange(num_blocks) * GOLDEN_RATIO % 1.0
    return np.sort(np.argsort(fractions, kind="stable")[:limit])


class ValidationDataset(torch.utils.data.Dataset):
    """Windows of held-out texts as dictionaries of `tokens` and `labels`, int64 [T], and `loss_mask`, float32 [T].

    The mask weights texts: its sum over all windows is proportional to the blend weights. It is 1 for a single text.

    Args:
        streams: tokens of each text, [N] integers with N > 1; may be memory-mapped.
        weights: blend weight of each text.
        length: window length T.
        vocabulary: vocabulary of the tokens, which were already checked against it.
        eod_mask_loss: if True, do not score the token that follows the end of a document.
        block_length: size of the blocks that a limit keeps or drops, in tokens; a multiple of T.
        max_blocks: maximum number of blocks; None scores all.
    """

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        weights: Sequence[float],
        length: int,
        vocabulary: Vocabulary,
        *,
        eod_mask_loss: bool = False,
        block_length: int | None = None,
        max_blocks: int | None = None,
    ) -> None:
        self.streams, self.length, self.vocabulary, self.eod_mask_loss = streams, length, vocabulary, eod_mask_loss
        self.block_length = block_length or length
        targets = np.array([len(stream) - 1 for stream in streams])
        self.token_weights = np.array(weights) / sum(weights) * (targets.sum() / targets)
        self.num_targets = int(targets.sum())
        self.block_ends = np.cumsum(-(-targets // self.block_length))
        self.blocks = choose_blocks(int(self.block_ends[-1]), max_blocks)

    @property
    def is_whole(self) -> bool:
        """True if every block is scored."""
        return len(self.blocks) == self.block_ends[-1]

    def __len__(self) -> int:
        return len(self.blocks) * (self.block_length // self.length)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number, piece = divmod(int(index), self.block_length // self.length)
        block = int(self.blocks[number])
        text = int(np.searchsorted(self.block_ends, block, side="right"))
        first_block = int(self.block_ends[text - 1]) if text else 0
        start = (block - first_block) * self.block_length + piece * self.length
        window = torch.from_numpy(self.streams[text][start : start + self.length + 1].astype(np.int64))
        num_scored = max(0, len(window) - 1)
        tokens, labels = torch.zeros(2, self.length, dtype=torch.int64)
        loss_mask = torch.zeros(self.length)
        tokens[:num_scored], labels[:num_scored] = window[:-1], window[1:]
        loss_mask[:num_scored] = float(self.token_weights[text])
        if self.eod_mask_loss and self.vocabulary.eod is not None:
            loss_mask[tokens == self.vocabulary.eod] = 0.0
        return {"tokens": tokens, "labels": labels, "loss_mask": loss_mask}


class PaddedDataset(torch.utils.data.Dataset):
    """Dataset padded with samples that are not scored, up to a whole number of batches."""

    def __init__(self, dataset: torch.utils.data.Dataset, batch_size: int) -> None:
        self.dataset, self.num_samples = dataset, len(dataset)  # type: ignore[arg-type]
        self.total = -(-self.num_samples // batch_size) * batch_size

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> Sample:
        if index < self.num_samples:
            return self.dataset[index]
        sample: Sample = self.dataset[self.num_samples - 1]
        return {**sample, "loss_mask": torch.zeros_like(sample["loss_mask"])}
