"""The reference: the whole score map is materialised. Memory grows as T²; everything else is tested against it."""

from torch import Tensor

from megatron.model.backends.backend import Rows
from megatron.position.encoding import Encoding, Terms
from megatron.position.processor import Processor, Share
from megatron.position.scores import attend, logits, table_for


class Eager:
    """All rows at once."""

    def refuses(self, encoding: Encoding, processor: Processor | None) -> str | None:
        return None

    def __call__(self, rows: Rows) -> Tensor:
        return self.with_table(rows, table_for(rows.encoding, rows.query, rows.key, rows.q.device))

    @staticmethod
    def with_table(rows: Rows, table: Terms | None, share: Share | None = None) -> Tensor:
        """The same, with tables that were made before."""
        scores = logits(
            rows.q,
            rows.k,
            rows.query,
            rows.key,
            rows.encoding,
            rows.processor,
            table=table,
            key_mask=rows.key_mask,
            window=rows.window,
            heads=rows.heads,
            share=share,
            dense=rows.dense,
        )
        return attend(scores, rows.v, rows.dropout, rows_may_be_empty=rows.key_mask is not None)
