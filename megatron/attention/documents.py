"""Documents of a packed row that are kept apart: each is read as if it were alone.

A row of training data holds several documents, one after another. Kept apart, a token sees its own document only, and
indices begin at 0 at its first token: so do positions, distances, windows, and the edge that a processor's convolutions
see. There are two ways to compute this, which give the same.

* Document by document: each is a segment of its row (`segments.py`). Every encoding, processor and backend is then asked
  about a document alone, so nothing can differ. Many short documents make many small calls.
* All at once: a row's queries see the keys from `AttentionInputs.first_keys` on. This is right where the answer of an
  encoding does not depend on where in the row a document begins: a bias or weight of the distance alone, contextual
  terms that look between query and key, rotations, embeddings. The latter two are told positions that begin anew.

B batch, T tokens of a row.
"""

from torch import Tensor

from megatron.attention.backends.backend import AttentionBackend, takes_first_keys
from megatron.position.encoding import Encoding


def depends_on_document_start(encoding: Encoding) -> bool:
    """Would the scores of a query and a key be others if their document began elsewhere in the row?"""
    adds_terms = any(type(encoding).overrides_hook(hook) for hook in ("dense", "contextual"))
    return adds_terms and not encoding.relative


def can_mask_documents(encoding: Encoding, backend: AttentionBackend, *, randomized: bool) -> bool:
    """Are all documents of a row computed at once? Randomized positions are drawn for each document's own length, so
    that distances in a row are not differences of columns."""
    return takes_first_keys(backend) and not randomized and not depends_on_document_start(encoding)
