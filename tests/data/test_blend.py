"""Weights of named corpora: GPT-NeoX's formula in exact arithmetic, and the resulting training data."""

import itertools
import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from corpora import prepare, validate
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from megatron.config.schema import parse_section
from megatron.data.blend import (
    compute_document_weights,
    describe_document_weights,
    list_all_prefixes,
    list_corpora,
    list_dataset_slices,
    list_split_prefixes,
)
from megatron.data.datasets import SampleOrder, build_datasets
from megatron.data.stage_order import begin_order, continue_order
from megatron.distributed.process_groups import ProcessGroups
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError

Dataset = Callable[..., str]
COUNTS = st.lists(st.integers(1, 10**9), min_size=2, max_size=8)
ALPHAS = st.floats(0, 4)


def published_weights(counts: list[int], alpha: int) -> list[Fraction]:
    """Compute p^α normalized, times 1 − p, normalized: the steps of `weights_by_num_docs` in rational numbers."""
    shares = [Fraction(count, sum(counts)) for count in counts]
    tempered = [share**alpha / sum(other**alpha for other in shares) for share in shares]
    products = [one * (1 - share) for one, share in zip(tempered, shares, strict=True)]
    return [product / sum(products) for product in products]


@given(COUNTS, st.integers(0, 5))
def test_weights_are_the_published_formula(counts: list[int], alpha: int) -> None:
    expected = [float(weight) for weight in published_weights(counts, alpha)]
    assert compute_document_weights(counts, alpha) == pytest.approx(expected, rel=1e-12)


@given(COUNTS, ALPHAS, st.integers(2, 50), st.randoms())
def test_weights_depend_on_shares_alone_and_go_with_their_corpora(counts, alpha, factor, random) -> None:
    weights = compute_document_weights(counts, alpha)
    assert sum(weights) == pytest.approx(1)
    assert compute_document_weights([factor * count for count in counts], alpha) == pytest.approx(weights)
    order = list(range(len(counts)))
    random.shuffle(order)
    moved = compute_document_weights([counts[i] for i in order], alpha)
    assert moved == pytest.approx([weights[i] for i in order])


@given(COUNTS, ALPHAS, st.floats(0.01, 2))
def test_a_larger_alpha_favours_larger_corpora(counts: list[int], alpha: float, step: float) -> None:
    low, high = compute_document_weights(counts, alpha), compute_document_weights(counts, alpha + step)
    for i, j in itertools.combinations(range(len(counts)), 2):
        assume(min(*low, *high) > 0)
        gain = (high[i] / high[j]) / (low[i] / low[j])
        assert gain == pytest.approx((counts[i] / counts[j]) ** step, rel=1e-6)


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_of_two_corpora_with_alpha_one_each_is_half(one: int, other: int) -> None:
    """With two corpora and alpha 1, each gets half, because the factor 1 − p of one is the fraction of the other
    (docs/data.md).
    """
    assert compute_document_weights([one, other], 1.0) == pytest.approx([0.5, 0.5])
    assert compute_document_weights([one], 0.3) == [1.0]
    assert compute_document_weights([], 0.3) == []  # for a split without data
    assert compute_document_weights([one, 10**15], 1e6) == [0.0, 1.0]  # no overflow


def test_an_invalid_name_is_reported_in_one_line() -> None:
    for keys, message in (
        ({"train_data_paths": ["a", 3]}, "item 2 of train_data_paths is 3; it must be a string or a list of strings"),
        ({"train_data_paths": [["a", 3]]}, r"item 1 of train_data_paths is \['a', 3\]; it must be a string"),
        ({"data_path": 3}, "data_path is 3; it must be a string or a list of strings"),
    ):
        with pytest.raises(UserError, match=message):
            parse_section(DataOptions, keys)


def documents(count: int, length: int, first: int = 0) -> list[list[int]]:
    return [list(range(first + i * length, first + (i + 1) * length)) for i in range(count)]


def blended(data: DataOptions, samples: int, **order: object) -> np.ndarray:
    """Return the first token of each training sample of length 8."""
    built = build_datasets(
        data, SampleOrder(seed=3, train_samples=samples, **order), seq_length=8, cache=None, groups=ProcessGroups()
    )
    return np.array([int(built.train[i]["tokens"][0]) for i in range(samples)])


def test_a_run_reads_by_documents_and_folders_by_tokens(dataset: Dataset, tmp_path: Path) -> None:
    """A run reads corpora by document counts, and folders by token counts.

    The corpora have 10, 20 and 70 documents; the last is a folder of three datasets, read together.
    """
    paths = [dataset("a", documents(10, 100), "uint16"), dataset("b", documents(20, 20, 2000), "uint16")]
    for number, count in enumerate((50, 5, 15)):
        dataset(f"shards/{number // 2}/s{number}", documents(count, 40, 4000 + 4000 * number), "uint16")
    paths.append(str(tmp_path / "shards"))
    keys = {"weight_by_num_documents": True, "weighted_sampler_alpha": 0.3}
    files = {"tokenizer_type": "HFTokenizer", "vocab_file": str(vocabulary(tmp_path, 20_000))}
    data = DataOptions(train_data_paths=paths, **keys, **files)
    slices = list_dataset_slices(data, "train")
    # GPT-NeoX's weights_by_num_docs([10, 20, 70], alpha=0.3), at ea7aefd
    expected = np.array([0.37147830526698344, 0.4065275024073636, 0.22199419232565293])
    found = [slices[0].weight, slices[1].weight, sum(s.weight for s in slices[2:])]
    assert found == pytest.approx(expected)
    assert [s.weight / found[2] for s in slices[2:]] == pytest.approx([50 / 70, 5 / 70, 15 / 70])
    read = blended(data, 4000)
    shares = [np.mean(read < 2000), np.mean((read >= 2000) & (read < 4000)), np.mean(read >= 4000)]
    assert shares == pytest.approx(expected, abs=2e-3)
    assert [np.mean(read[read >= 4000] // 4000 == i + 1) for i in range(3)] == pytest.approx(
        [50 / 70, 5 / 70, 15 / 70], abs=4e-3
    )
    assert read.tolist() == blended(data, 4000).tolist()
    given_weights = data.replace(weight_by_num_documents=False, train_data_weights=found)
    assert read.tolist() == blended(given_weights, 4000).tolist()  # equals the run with explicit weights
    (line,) = describe_document_weights(data, slices)
    assert line.startswith("train_data_paths by documents, weighted_sampler_alpha 0.3: 0.371 of ")
    assert f"{paths[0]} (10), 0.407 of {paths[1]} (20), 0.159 of " in line


def vocabulary(folder: Path, size: int) -> Path:
    import tokenizers as hf

    path = folder / "words.json"
    hf.Tokenizer(hf.models.WordLevel({f"w{i}": i for i in range(size - 1)} | {"</s>": size - 1})).save(str(path))
    return path


@given(st.sampled_from([[4, 30], [7, 2, 30]]), st.floats(0, 1.5), st.floats(0, 1.5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stages_of_other_alphas_read_on(dataset: Dataset, counts: list[int], one: float, other: float) -> None:
    """A stage with another temperature starts a new blend; one with the same or with an unused alpha does not."""
    paths = [dataset(f"d{i}", documents(n, 16), "uint16") for i, n in enumerate(counts)]
    data = DataOptions(train_data_paths=paths, weight_by_num_documents=True, weighted_sampler_alpha=one)
    order = begin_order(data, 8, 100)
    later = data.replace(weighted_sampler_alpha=other)
    moved, left_out = continue_order(order, 40, before=(data, 8), now=(later, 8), num_blocks=100)
    assert left_out == 0
    consumed = [moved.sources[path].consumed for path in paths]
    assert sum(consumed) == (0 if one == other else 40)
    if one != other:
        weights = np.array(compute_document_weights(counts, one))
        assert np.abs(np.array(consumed) - 40 * weights).max() <= len(counts)
    unread = [d.replace(weight_by_num_documents=False) for d in (data, later)]
    same, _ = continue_order(
        begin_order(unread[0], 8, 100), 40, before=(unread[0], 8), now=(unread[1], 8), num_blocks=100
    )
    assert same.start == 40


def test_folders_and_lists_expand_to_datasets(dataset: Dataset, texts: Path, tmp_path: Path) -> None:
    corpus = prepare([str(texts)], tmp_path / "all/divided", split=(0.6, 0.2, 0.2))
    whole = prepare([str(texts)], tmp_path / "all/whole", split=None)
    for folder in (".hidden", "all/.hidden"):
        dataset(f"{folder}/no", documents(1, 9))
    divided = str(corpus.folder)
    everything = DataOptions(**{f"{split}_data_paths": [str(tmp_path / "all")] for split in ("train", "valid", "test")})
    for split in ("train", "valid", "test"):
        assert list_split_prefixes(everything, split) == [
            corpus.get_dataset_prefix(split),
            whole.get_dataset_prefix("all"),
        ]
        one = DataOptions(**{f"{split}_data_paths": [divided]})
        assert list_split_prefixes(one, split) == [corpus.get_dataset_prefix(split)]
    assert list_split_prefixes(DataOptions(data_path=str(whole.folder)), "valid") == [whole.get_dataset_prefix("all")]
    shards = [dataset(f"shards/{name}", documents(20, 5)) for name in ("b", "a")]
    first, second = (Path(shard) for shard in shards)
    assert list_corpora(DataOptions(train_data_paths=[shards, divided]), "train") == [
        [first, second], [corpus.get_dataset_prefix("train")],
    ]  # fmt: skip
    for data_path in (str(tmp_path / "shards"), shards[::-1]):
        data = DataOptions(data_path=data_path, split="8,1,1")
        for split, expected in (("train", (0, 16)), ("valid", (16, 18)), ("test", (18, 20))):
            slices = list_dataset_slices(data, split)
            assert [(s.dataset.prefix, s.first, s.last, s.weight) for s in slices] == [
                (second, *expected, 0.5), (first, *expected, 0.5),
            ]  # fmt: skip


def test_paths_without_a_corpus_are_rejected(dataset: Dataset, texts: Path, tmp_path: Path) -> None:
    corpus = prepare([str(texts)], tmp_path / "corpus", split=(0.6, 0.2, 0.2))
    path, empty = dataset("shards/train_0", documents(3, 9)), dataset("none", [])
    dataset("mixed/pile_train", documents(3, 9))
    dataset("mixed/pile_val", documents(3, 9))
    (tmp_path / "bare").mkdir()
    (tmp_path / "saved").mkdir()
    for name in ("state.json", "dataset_info.json"):
        (tmp_path / "saved" / name).write_text(json.dumps({"_data_files": []}))
    folder, weighed = str(tmp_path / "shards"), {"weight_by_num_documents": True}
    for keys, message in [
        ({"train_data_paths": [path, folder]}, "train_0 is listed more than once, possibly through its folder"),
        ({"train_data_paths": [[path], path]}, "names .*train_0 more than once; give it a greater weight"),
        ({"train_data_paths": [[]]}, r"train_data_paths has an empty entry, \[\]; name a dataset, a folder, or a list"),
        ({"data_path": []}, "data_path has an empty entry"),
        ({"train_data_paths": [str(tmp_path / "bare")]}, "the folder .*bare contains no dataset"),
        (
            {"train_data_paths": [str(tmp_path / "saved")]},
            "reads tokens; convert it once with `./deepy.py prepare .*saved --output",
        ),
        ({"data_path": str(corpus.folder)}, "divided into splits; it has data for train_data_paths, valid_data_paths,"),
        (
            {"train_data_paths": [str(tmp_path / "mixed")]},
            "mixed contains .*pile_val, named for another split; list",
        ),
        (
            {"train_data_paths": ["s3://bucket/a"]},
            "train_data_paths names s3://bucket/a; .* not streamed from an object",
        ),
        ({"data_path": ["gs://bucket/a", path]}, "data_path names gs://bucket/a; ranks read shuffled samples"),
        ({"train_data_paths": [path, empty], **weighed}, "weight_by_num_documents: .*none has no documents"),
        ({"train_data_paths": [path], "train_data_weights": [1.0], **weighed}, "exclude each other"),
        (
            {"train_data_paths": [path, dataset("many", documents(30, 2))], "weighted_sampler_alpha": 5e3, **weighed},
            "weighted_sampler_alpha: 5000 gives .*train_0 a weight of 0",
        ),
    ]:
        with pytest.raises(UserError, match=message) as error:
            list_dataset_slices(validate(DataOptions(**keys)), "train")
        assert "\n" not in str(error.value)
    only_train = prepare([str(texts)], tmp_path / "train", split=(1, 0, 0))
    with pytest.raises(UserError, match=r"valid_data_paths: the corpus .* it has data for train_data_paths"):
        list_split_prefixes(DataOptions(valid_data_paths=[str(only_train.folder)]), "valid")
    sets = DataOptions(train_data_paths=[path], valid_data_sets={"a": str(tmp_path / "nowhere")})
    with pytest.raises(UserError, match=r"^valid_data_sets\.a: no dataset") as error:
        list_all_prefixes(sets)
    assert error.value.key == "valid_data_sets.a"
