"""The reference: the whole score map is materialised. Memory grows as T²; everything else is tested against it."""

from torch import Tensor

from megatron.position.encoding import Encoding
from megatron.position.processor import Processor
from megatron.position.rows import Rows, attention
from megatron.position.scores import table_for


class Eager:
    """All rows at once."""

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        return attention(rows, table_for(rows.encoding, rows.query, rows.key, rows.q.device))
