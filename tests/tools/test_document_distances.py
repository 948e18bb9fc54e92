"""Distances in rows of documents, compared with an enumeration of all query-key pairs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.bench.document_distances import measure_distances


@given(st.lists(st.integers(0, 9), min_size=3, max_size=9).filter(lambda lengths: sum(lengths) >= 8))
def test_every_pair_is_counted(lengths: list[int]) -> None:
    length, owners = 8, np.repeat(np.arange(len(lengths)), lengths)
    rows = [owners[first : first + length] for first in range(0, len(owners) - length + 1, length)]
    pairs = {"causal": [], "document": []}
    for row in rows:
        for i in range(length):
            pairs["causal"] += [i - j for j in range(i + 1)]
            pairs["document"] += [i - j for j in range(i + 1) if row[i] == row[j]]
    found = measure_distances(np.array(lengths, dtype=np.int32), length)
    assert found.crossing_share == pytest.approx(np.mean([len(set(row)) > 1 for row in rows]))
    assert found.lost_pairs == pytest.approx(1 - len(pairs["document"]) / len(pairs["causal"]))
    for mask, distances in pairs.items():
        assert found.context[mask] == pytest.approx(len(distances) / (length * len(rows)))
        for quantile, distance in found.quantiles[mask].items():
            assert distance == sorted(distances)[int(np.ceil(float(quantile) * len(distances))) - 1]
    for fraction, share in found.remaining.items():
        both = [distances.count(int(float(fraction) * length)) for distances in (pairs["document"], pairs["causal"])]
        assert share == pytest.approx(both[0] / both[1])
