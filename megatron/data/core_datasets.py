"""Only importer of megatron-core's datasets, which take seconds to import and print warnings.

Messages about cached indices are shown only if they are errors.
"""

import logging

from megatron.utils.imports import trim_imports

logging.getLogger("megatron.core.datasets").setLevel(logging.ERROR)

with trim_imports():
    from megatron.core.datasets.blended_dataset import BlendedDataset
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.helpers import build_blending_indices
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
    from megatron.core.datasets.utils import Split, normalize

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "DType",
    "GPTDataset",
    "GPTDatasetConfig",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "Split",
    "build_blending_indices",
    "normalize",
]
