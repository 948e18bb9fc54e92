"""Document starts in samples, compared with the tokens written by the tests' own writer."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.attention.documents import check_document_starts
from megatron.data.datasets import SampleOrder, build_datasets
from megatron.data.document_starts import compute_crossing_fraction, draw_document_starts
from megatron.data.stage_order import SourceOrder, StageOrder
from megatron.data.torch_data import build_dataloader
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError

EOD = 1999
LENGTHS = [17, 1, 40, 3, 29, 64, 5, 12, 33, 8] * 3


@pytest.fixture
def words(tmp_path):
    """Write a tokenizer.json with 2,000 words, the last of which ends documents."""
    import tokenizers as hf

    path = tmp_path / "words.json"
    ids = {f"w{i}": i for i in range(EOD)} | {"</s>": EOD}
    hf.Tokenizer(hf.models.WordLevel(ids, unk_token="w0")).save(str(path))
    return {"tokenizer_type": "HFTokenizer", "vocab_file": str(path)}


def documents(lengths=LENGTHS, end=EOD):
    edges = np.cumsum([0, *lengths])
    return [[*range(a, b - 1), end] for a, b in pairwise(edges)]


def build(data, *, stage=None, apart=True, train=70, seq_length=8):
    order = SampleOrder(seed=3, train_samples=train, valid_samples=9, extend_train_to=train, stage=stage)
    return build_datasets(
        data, order, seq_length=seq_length, cache=None, groups=ProcessGroups(), separates_documents=apart
    )


def find_starts(row):
    starts = [0]
    for column in range(1, len(row)):
        starts.append(column if row[column - 1] == EOD else starts[-1])
    return starts


def test_samples_contain_document_starts(dataset, words):
    path = dataset("d", documents())
    data = DataOptions(train_data_paths=[path], valid_data_paths=[path], **words)
    apart, together = build(data), build(data, apart=False)
    blocks = StageOrder(32, {path: SourceOrder(ordered=18)})  # a stage cuts blocks into rows of its length
    staged = build(data, stage=blocks).train
    for samples in (apart.train, apart.valid, staged):
        found = [samples[i] for i in range(len(samples))]
        assert all(sample["document_starts"].tolist() == find_starts(sample["tokens"].tolist()) for sample in found)
        assert any(sample["document_starts"].any() for sample in found)
    assert all(torch.equal(value, apart.train[i][name]) for i in range(70) for name, value in together.train[i].items())
    assert "document_starts" not in together.train[0]
    # Ranks that share a row store parts of its tokens, and each knows the documents of the whole row.
    ranks = [build_dataloader(apart.train, micro_batch_size=2, mesh=Mesh(r, ParallelSizes(context=2))) for r in (0, 1)]
    for batches in zip(*ranks, strict=True):
        assert all(batch["tokens"].shape == (2, 4) for batch in batches)
        starts = [batch["document_starts"] for batch in batches]
        assert starts[0].shape == (2, 8)
        assert torch.equal(*starts)


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 7))
def test_the_share_of_rows_that_hold_several_documents_is_counted(lengths, seq_length):
    owners = np.repeat(np.arange(len(lengths)), lengths)
    rows = [owners[first : first + seq_length] for first in range(0, len(owners) - seq_length + 1, seq_length)]
    expected = np.mean([len(set(row)) > 1 for row in rows]) if rows else None
    assert compute_crossing_fraction(np.array(lengths, dtype=np.int32), seq_length) == expected


def test_the_share_is_that_of_the_samples_that_are_read(dataset, words):
    data = DataOptions(train_data_paths=[dataset("d", documents())], **words)
    built = build(data, train=79)  # one epoch, each row from shuffled documents
    crossing = [bool(built.train[i]["document_starts"].any()) for i in range(79)]
    assert built.crossing_fraction == np.mean(crossing)
    # Weighted like the datasets; documents as long as rows give one document per row.
    even = dataset("even", documents([8] * 20))
    blend = DataOptions(train_data_paths=[data.train_data_paths[0], even], train_data_weights=[1, 3], **words)
    assert build(blend, apart=False).crossing_fraction == pytest.approx(built.crossing_fraction / 4)


def test_documents_without_end_tokens_are_rejected(dataset, words):
    data = DataOptions(train_data_paths=[dataset("d", documents(end=7))], **words)
    with pytest.raises(UserError, match=r"documents of .*d do not end with the end-of-document token of .*\(1999\)"):
        build(data)
    assert build(data, apart=False).train is not None


def test_rows_are_drawn_by_the_lengths_of_documents(dataset, words):
    """Rows are drawn with realistic document lengths: as many documents start in them as in the text, and at least one
    boundary occurs.
    """
    data = DataOptions(train_data_paths=[dataset("d", documents())], **words)
    starts = draw_document_starts(data, 2000, 16)
    assert starts.dtype == np.int64
    check_document_starts(torch.from_numpy(starts), 2000, 16)
    counts = (starts == np.arange(16)).sum(1)
    assert counts[:-1].max() <= counts[-1] == counts.max()
    assert (counts.mean() - 1) / 15 == pytest.approx(len(LENGTHS) / sum(LENGTHS), rel=0.08)
    assert np.array_equal(starts, draw_document_starts(data, 2000, 16))
    long = DataOptions(train_data_paths=[dataset("long", documents([900]))], **words)
    drawn = draw_document_starts(long, 2, 16)
    assert [len(np.unique(row)) for row in drawn] == [1, 2]
