"""Samples of a task depend only on the seed and the global index."""

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.datasets import SampleOrder, build_datasets
from megatron.data.load_tokenizer import read_vocabulary
from megatron.data.tasks.task_config import read_task_config
from megatron.data.torch_data import TaskDataset, build_dataloader
from megatron.distributed.mesh import Mesh, ParallelSizes
from megatron.distributed.process_groups import build_single_process_groups
from megatron.options.data import DataOptions
from megatron.utils.errors import UserError

REVERSE = DataOptions(task="reverse_string", task_length=9)


def samples(total: int = 96, *, batch: int = 12, start: int = 0, seed: int = 3, data: DataOptions = REVERSE):
    return TaskDataset(read_task_config(data), "train", total, seed=seed, batch_size=batch, start=start)


def rows(found: list[dict[str, torch.Tensor]]) -> list[list[list[float]]]:
    return [[values.tolist() for values in sample.values()] for sample in found]


@given(
    st.sampled_from([(1, 4, 3), (2, 2, 3), (4, 1, 3), (2, 6, 1), (12, 1, 1), (1, 12, 1), (3, 1, 4)]), st.integers(0, 5)
)
@settings(deadline=None, max_examples=40)
def test_any_layout_and_any_resumption_reads_the_same(shape: tuple[int, int, int], done: int) -> None:
    world, micro_batch, accumulate = shape  # 12 samples per optimizer step
    whole = samples()
    expected = rows([whole[index] for index in range(12 * done, 96)])
    steps: list[list[torch.Tensor]] = [[] for _ in range(8 - done)]
    for rank in range(world):
        mesh = Mesh(rank, ParallelSizes(data=world))
        found = build_dataloader(samples(start=12 * done), micro_batch_size=micro_batch, mesh=mesh, start=12 * done)
        for i, batch in enumerate(found):
            steps[i // accumulate] += rows(
                [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
            )
    for i, step in enumerate(steps):
        assert sorted(step) == sorted(expected[12 * i : 12 * i + 12])


def test_lengths_come_as_often_as_the_task_weighs_them() -> None:
    """Lengths follow the task's weights. In SCAN, 6, 88 and 398 commands have 1, 2 and 3 actions."""
    found = samples(12 * 3000, data=DataOptions(task="scan", task_length=3))
    lengths = [len(found[first]["tokens"]) - 11 for first in range(0, len(found), 12)]
    for length, commands in ((1, 6), (2, 88), (3, 398)):
        share = commands / 492
        assert abs(lengths.count(length) / 3000 - share) < 5 * (share * (1 - share) / 3000) ** 0.5


def test_position_ids_travel_with_their_tokens() -> None:
    options = {"positions": "coupled", "max_digits": 9}
    data = samples(data=DataOptions(task="addition", task_length=4, task_options=options))
    mesh = Mesh(0, ParallelSizes(data=1))
    for number, batch in enumerate(build_dataloader(data, micro_batch_size=4, mesh=mesh)):
        assert batch["position_ids"].shape == batch["tokens"].shape
        for row, ids in enumerate(batch["position_ids"]):
            assert torch.equal(ids, data[4 * number + row]["position_ids"])
            assert ids[0] == 0
    assert "position_ids" not in samples()[0]


def test_a_step_has_one_length_and_lengths_are_uniform() -> None:
    found = samples(12 * 3000)
    lengths = []
    for first in range(0, len(found), 12):
        step = {len(found[index]["tokens"]) for index in (first, first + 5, first + 11)}
        lengths.append(step.pop())
        assert not step
    shares = np.bincount(np.array(lengths) // 2, minlength=10)[1:] / 3000
    assert len(shares) == 9
    assert np.abs(shares - 1 / 9).max() < 5 * (8 / 81 / 3000) ** 0.5


def test_nothing_is_read_twice() -> None:
    data = DataOptions(task="parity_check", task_length=64, task_shortest_length=64)
    train = samples(600, data=data)
    others = [samples(600, data=data, seed=4), TaskDataset(train.task_config, "valid", 600, seed=3, batch_size=12)]
    inputs = [tuple(each[index]["tokens"].tolist()) for each in (train, *others) for index in range(600)]
    assert len(set(inputs)) == 1800  # 2^64 inputs, so two equal ones would not be chance


def test_another_batch_size_resumes_at_the_same_sample() -> None:
    """With another batch size, reading continues without repetition, and all samples of a step have one length."""
    first, second = samples(1000), samples(1000, batch=8, start=36)
    assert rows([first[35]]) != rows([second[36]])
    for step in range(36, 76, 8):
        assert len({len(second[index]["tokens"]) for index in range(step, step + 8)}) == 1
    assert len(second[30]["tokens"]) > 0  # indices before the start can be read


def test_samples_match_the_task() -> None:
    sample = samples()[5]
    task = read_task_config(REVERSE).task
    half = len(sample["tokens"]) // 2
    assert sample["tokens"].dtype == sample["labels"].dtype == torch.int64
    assert sample["loss_mask"].dtype == torch.float32
    assert sample["loss_mask"].tolist() == [0.0] * half + [1.0] * half
    assert (sample["labels"][half:] - task.answer_ids.start).tolist() == sample["tokens"][:half].tolist()[::-1]
    assert read_vocabulary(REVERSE).size == task.vocab_size == 5


def test_datasets_of_a_task() -> None:
    order = SampleOrder(seed=1, train_samples=24, valid_samples=12, batch_size=12)
    found = build_datasets(REVERSE, order, seq_length=18, cache=None, groups=build_single_process_groups())
    assert found.lengths == tuple(range(2, 20, 2))
    assert (len(found.train), len(found.valid), found.test) == (24, 12, None)
    assert rows(list(islice(found.train, 12))) != rows(list(islice(found.valid, 12)))


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"task": "revers_string", "task_length": 9},
            "unknown task revers_string; did you mean reverse_string",
        ),
        ({"task": "mqar", "task_length": 33}, "task_length is 33: 8 pairs and their queries need an even length"),
        ({"task": "mqar", "task_length": 64, "task_shortest_length": 20}, "task_shortest_length is 20: 8 pairs"),
        ({"task": "mqar", "task_length": 64, "task_options": {"pair": 2}}, "no option 'pair'; did you mean pairs"),
        ({"task": "mqar"}, "task_length is missing"),
    ],
)
def test_unlearnable_options_are_rejected(keys: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        read_vocabulary(DataOptions(**keys))
