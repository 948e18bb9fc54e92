"""A synthetic corpus is read like any other corpus."""

import numpy as np

from megatron.data.blend import list_dataset_slices
from megatron.data.datasets import check_dataset_slice, load_token_stream
from megatron.data.load_tokenizer import read_vocabulary
from megatron.options.data import SPLITS, DataOptions
from megatron.rehearsal.rehearsed_run import write_synthetic_corpus


def test_a_synthetic_corpus_has_the_vocabulary_and_several_sequences(tmp_path):
    prefixes = write_synthetic_corpus(tmp_path / "corpus", vocab_size=70_001, seq_length=400_000)
    data = DataOptions(**{f"{split}_data_paths": [str(prefixes[split])] for split in SPLITS})
    vocabulary = read_vocabulary(data)
    assert (vocabulary.size, vocabulary.eod) == (70_001, 0)
    for split in SPLITS:
        (dataset_slice,) = list_dataset_slices(data, split)
        check_dataset_slice(dataset_slice, split, 400_000, vocabulary)
        tokens = load_token_stream(data, split, vocabulary)
        assert len(tokens) >= 3 * 400_001
        assert tokens.max() < 70_001
        assert len(np.unique(tokens)) > 60_000
    documents = write_synthetic_corpus(tmp_path / "documents", vocab_size=50, seq_length=10, document_length=4)
    tokens = np.fromfile(f"{documents['train']}.bin", "<i4")
    assert (tokens[3::4] == 0).all()
