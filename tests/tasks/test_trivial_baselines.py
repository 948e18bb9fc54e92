"""Scores of trivial predictors: published accuracies, and handmade sequences."""

import numpy as np
import pytest

from megatron.data.tasks import task_config
from megatron.data.tasks.task import TaskBatch
from megatron.evaluation.task_eval import CONSTANT, POSITION, measure_baseline_correctness


def mean_accuracies(name: str, lengths: list[int], count: int = 2000) -> dict[str, float]:
    """Return each predictor's accuracy in percent, averaged over lengths."""
    task = task_config.build_task(name)
    scores: dict[str, list[float]] = {CONSTANT: [], POSITION: []}
    for length in lengths:
        fitted, scored = (task.sample_batch(np.random.default_rng([part, length]), count, length) for part in range(2))
        for predictor, rights in measure_baseline_correctness(task, fitted, scored).items():
            scores[predictor].append(rights.sum() / scored.accuracy_mask.sum())
    return {predictor: 100 * float(np.mean(found)) for predictor, found in scores.items()}


FROM_41_TO_500 = [41, 80, 140, 200, 270, 340, 420, 500]


def test_brackets_have_more_zeros_than_chance() -> None:
    """Multiplication makes zeros frequent: 31.0% over lengths 41 … 500, 29.2% at 41 and 31.6% at 500, within five
    standard errors.
    """
    for lengths, expected in (([41], 29.2), ([500], 31.6), (FROM_41_TO_500, 31.0)):
        spread = 500 * (0.31 * 0.69 / (2000 * len(lengths))) ** 0.5
        accuracy = mean_accuracies("modular_arithmetic_brackets", lengths)[CONSTANT]
        assert accuracy == pytest.approx(expected, abs=spread + 0.1)


def test_sorted_symbols_are_determined_by_position() -> None:
    """Sorted symbols depend on their position: 78% at 41, 94% at 500 and 90% over all lengths between."""
    assert mean_accuracies("bucket_sort", [41], 500)[POSITION] == pytest.approx(78, abs=1)
    assert mean_accuracies("bucket_sort", [500], 500)[POSITION] == pytest.approx(94, abs=1)
    assert mean_accuracies("bucket_sort", FROM_41_TO_500, 300)[POSITION] == pytest.approx(90, abs=1.5)


@pytest.mark.parametrize(
    ("name", "chance"),
    [
        ("even_pairs", 50),
        ("modular_arithmetic", 20),
        ("parity_check", 50),
        ("cycle_navigation", 20),
        ("reverse_string", 50),
        ("solve_equation", 20),
        ("duplicate_string", 50),
        ("missing_duplicate", 50),
        ("odds_first", 50),
        ("compute_sqrt", 50),
        ("binary_addition", 50),
        ("stack_manipulation", 50),
    ],
)
def test_other_baselines_are_chance(name: str, chance: float) -> None:
    """Within 2 points, as published, and the noise of one answer for each of 4 × 2,000 sequences."""
    for found in mean_accuracies(name, [41, 120, 250, 400]).values():
        assert found == pytest.approx(chance, abs=2 + 2.8)


def test_predictors_of_a_hand_made_batch() -> None:
    """Predictors fitted on 0 1 / 0 0 / 1 1: the constant is either; the positions give 0 and 1."""
    task = task_config.build_task("reverse_string")
    first = task.answer_ids.start
    everywhere = np.ones((3, 2), dtype=bool)

    def of(labels: list[list[int]], counted: np.ndarray) -> TaskBatch:
        array = np.array(labels) + first
        return TaskBatch(np.zeros_like(array), array, everywhere, counted)

    fitted = of([[0, 1], [0, 1], [1, 1]], everywhere)
    scored = of([[0, 0], [0, 1], [1, 1]], np.array([[True, True], [True, True], [True, False]]))
    found = measure_baseline_correctness(task, fitted, scored)
    assert found[CONSTANT].tolist() == [[False, False], [False, True], [True, False]]
    assert found[POSITION].tolist() == [[True, False], [True, True], [False, False]]
