"""The one door to megatron-core's datasets: importing them takes seconds and prints warnings, so it happens here.

The warnings (optional fused kernels are missing; nothing of the datasets needs them) go to the log. So do
megatron-core's own messages about cached indices, at its level.
"""

import logging
import warnings

from megatron.uncompiled import uncompiled

_logger = logging.getLogger(__name__)
logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)

with warnings.catch_warnings(record=True) as _caught, uncompiled():
    warnings.simplefilter("always")
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split
for _warning in _caught:
    _logger.debug("%s", _warning.message)

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "DType",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Split",
]
