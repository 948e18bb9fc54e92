"""The reference: the whole score map is materialised. Memory grows as T²; everything else is tested against it."""

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import AttentionInputs, attend_all
from megatron.position.scores import compute_table


class EagerBackend:
    """All rows at once."""

    def unsupported_reason(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, inputs: AttentionInputs) -> Tensor:
        return attend_all(inputs, compute_table(inputs.encoding, inputs.query, inputs.key, inputs.q.device))
