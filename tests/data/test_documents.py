import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.corpus.documents import assign_documents, check_fractions, compute_split_counts
from megatron.utils.errors import UserError

whole_numbers = st.tuples(*[st.sampled_from([0, 1, 7, 30, 95, 700, 9500])] * 3).filter(lambda s: sum(s) > 0)
shares = whole_numbers | whole_numbers.map(lambda s: tuple(number / sum(s) for number in s))


@given(st.integers(3, 3000), shares)
def test_counts_add_up_and_are_within_one_of_exact_or_the_guaranteed_one(documents, given_shares):
    normal = check_fractions(given_shares)
    result = compute_split_counts(documents, normal)
    assert sum(result) == documents
    for count, share in zip(result, normal, strict=True):
        assert (count == 0) == (share == 0)
        # each of the other two splits may have taken one document from this one
        assert share * documents - 3 < count <= max(1, share * documents + 1)


@given(st.lists(st.text(max_size=8), min_size=3, max_size=60, unique=True), st.integers(0, 2**40), st.randoms())
def test_assignment_depends_on_names_and_not_on_their_order(names, seed, random):
    first = dict(zip(names, assign_documents(names, (0.6, 0.2, 0.2), seed), strict=True))
    random.shuffle(names)
    assert dict(zip(names, assign_documents(names, (0.6, 0.2, 0.2), seed), strict=True)) == first


def test_a_growing_corpus_keeps_nearly_all_documents_in_their_split():
    names = [f"file {i}" for i in range(2000)]
    before = assign_documents(names, (0.9, 0.05, 0.05), 1)
    after = assign_documents([*names, *(f"new {i}" for i in range(20))], (0.9, 0.05, 0.05), 1)[:2000]
    assert (before != after).mean() < 0.02
    assert (assign_documents(names, (0.9, 0.05, 0.05), 2) != before).mean() > 0.1  # another seed gives another split
    assert np.bincount(before).tolist() == [1800, 100, 100]


def test_impossible_splits_are_rejected():
    with pytest.raises(UserError, match=r"2 documents cannot be divided into 3 splits.*--split none"):
        compute_split_counts(2, (0.9, 0.05, 0.05))
    for wrong in [(0.5, 0.5), (0.5, -0.1, 0.6), (0.0, 0.0, 0.0), (float("nan"), 1.0, 1.0), (float("inf"), 1.0, 1.0)]:
        with pytest.raises(UserError, match="split"):
            check_fractions(wrong)
