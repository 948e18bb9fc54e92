"""Tasks of the Chomsky hierarchy, compared with independent solvers and published distributions."""

import numpy as np
import pytest
import task_solvers as solvers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.tasks import task_config
from megatron.data.tasks.task import Array, TransductionTask

NAMES = sorted(solvers.SOLVERS)


def task(name: str, **options: int) -> TransductionTask:
    found = task_config.build_task(name, options)
    assert isinstance(found, TransductionTask)
    return found


def sampled(name: str, count: int, length: int, seed: int = 0) -> tuple[Array, Array]:
    return task(name).sample_strings(np.random.default_rng([seed, length]), count, length)


def test_every_task_of_the_papers_has_a_solver() -> None:
    transductions = [
        name for name in task_config.list_tasks() if issubclass(task_config.load_task_class(name), TransductionTask)
    ]
    assert transductions == NAMES
    assert len(NAMES) == 15


@pytest.mark.parametrize("name", NAMES)
def test_outputs_match_the_solver(name: str) -> None:
    solve, kind = solvers.SOLVERS[name], task(name)
    checked = 0
    for length in [*range(1, 41), 61, 100, 257, 500]:
        inputs, outputs = sampled(name, 400 if length <= 8 else 60, length)
        assert inputs.shape[1] == kind.get_input_length(length)
        assert outputs.shape == (len(inputs), kind.get_output_length(length))
        assert inputs.min() >= 0
        assert inputs.max() < kind.num_input_symbols
        for row, wanted in zip(inputs.tolist(), outputs.tolist(), strict=True):
            assert solve(row) == wanted, row
            checked += 1
    assert checked > 5000


def _symbols(text: str, alphabet: str) -> list[int]:
    return [alphabet.index(each) for each in text]


PLAIN = "01234"
SIMPLE, BRACKETS, EQUATION = "01234+-×", "01234+-×()", "01234+-()x="
EXAMPLES = [  # from the papers' code; in four tasks its descriptions differ
    *(("even_pairs", *pair, PLAIN) for pair in (("001110", "0"), ("0101001", "1"), ("1", "0"))),
    *(("modular_arithmetic", *pair, SIMPLE) for pair in (("1+2×3", "2"), ("1-1-1", "4"), ("0×1+4×3-2", "0"))),
    *(("parity_check", *pair, PLAIN) for pair in (("1010100", "1"), ("01111", "0"), ("0", "0"))),
    *(("cycle_navigation", *pair, PLAIN) for pair in (("20100", "3"), ("2220", "2"), ("1", "0"))),
    *(("stack_manipulation", *pair, PLAIN) for pair in (("0110422", "11020000"), ("110222", "2000000"), ("1", "12"))),
    *(("reverse_string", *pair, PLAIN) for pair in (("011010", "010110"), ("1", "1"))),
    *(
        ("modular_arithmetic_brackets", *pair, BRACKETS)
        for pair in (("(3+0)", "3"), ("(-1-(4))", "0"), ("((1+2)×-3)", "1"))
    ),
    *(("solve_equation", *pair, EQUATION) for pair in (("x=4", "4"), ("-x=4", "1"), ("((1-0)--x)=4", "3"))),
    *(("duplicate_string", *pair, PLAIN) for pair in (("101", "101101"), ("0", "00"))),
    *(("missing_duplicate", *pair, PLAIN) for pair in (("01100210", "1"), ("1011213", "0"), ("1", "1"))),
    *(("odds_first", *pair, PLAIN) for pair in (("00110101", "01110100"), ("110", "110"))),
    *(
        ("binary_addition", *pair, PLAIN)
        for pair in (("001201101", "0101120000"), ("121", "0120"), ("10", "120"), ("0", "02"))
    ),
    *(("binary_multiplication", *pair, PLAIN) for pair in (("001201101", "000110120"), ("121", "120"), ("01", "02"))),
    *(("compute_sqrt", *pair, PLAIN) for pair in (("100101", "110"), ("00111", "010"), ("1", "1"))),
    *(("bucket_sort", *pair, PLAIN) for pair in (("10204112", "00111224"), ("1", "1"))),
]


@pytest.mark.parametrize(("name", "asked", "answer", "alphabet"), EXAMPLES)
def test_published_examples(name: str, asked: str, answer: str, alphabet: str) -> None:
    """The solvers use the published alphabets, and the generators agree with the solvers."""
    assert solvers.SOLVERS[name](_symbols(asked, alphabet)) == _symbols(answer, PLAIN)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compute", [0, 2])
def test_layout(name: str, compute: int) -> None:
    kind = task(name, compute_tokens=compute)
    for length in (1, 2, 7):
        drawn = kind.sample_batch(np.random.default_rng(5), 20, length)
        inputs, outputs = kind.sample_strings(np.random.default_rng(5), 20, length)
        read, asked = inputs.shape[1], outputs.shape[1]
        assert drawn.tokens.shape == (20, kind.get_sequence_length(length)) == (20, read + compute * read + asked)
        assert (drawn.tokens[:, :read] == inputs).all()
        assert (drawn.tokens[:, read : read + compute * read] == kind.num_input_symbols + 1).all()
        assert (drawn.tokens[:, -asked:] == kind.num_input_symbols).all()
        assert (drawn.labels[:, -asked:] - kind.answer_ids.start == outputs).all()
        assert drawn.loss_mask[:, -asked:].all()
        assert not drawn.loss_mask[:, :-asked].any()
    # No id is both input and answer, and all ids are used.
    assert kind.answer_ids.start == kind.num_input_symbols + 1 + (compute > 0)
    assert kind.vocab_size == kind.answer_ids.stop == kind.answer_ids.start + kind.num_output_symbols


@pytest.mark.parametrize("name", NAMES)
def test_scoring_ends_at_the_terminator(name: str) -> None:
    kind = task(name)
    drawn = kind.sample_batch(np.random.default_rng(2), 300, 12)
    terminated = name in ("binary_addition", "binary_multiplication", "stack_manipulation")
    for labels, asked, counted in zip(drawn.labels, drawn.loss_mask, drawn.accuracy_mask, strict=True):
        outputs = [symbol - kind.answer_ids.start for symbol in labels[asked]]
        counts = outputs.index(2) + 1 if terminated else len(outputs)
        assert counted[asked].tolist() == [True] * counts + [False] * (len(outputs) - counts)
    assert not (drawn.accuracy_mask & ~drawn.loss_mask).any()


def test_daggers_are_the_tasks_whose_answer_ignores_order() -> None:
    generator = np.random.default_rng(1)
    found = set()
    for name in NAMES:
        inputs, outputs = sampled(name, 200, 9)
        try:
            shuffled = [solvers.SOLVERS[name](generator.permutation(row).tolist()) for row in inputs]
        except (SyntaxError, ValueError):
            continue  # end of the input
        if shuffled == outputs.tolist():
            found.add(name)
    assert found == {"parity_check", "cycle_navigation", "bucket_sort"}
    assert found == {name for name in NAMES if task(name).permutation_invariant}


def test_levels_of_the_hierarchy() -> None:
    levels = {name: task(name).chomsky_level for name in NAMES}
    assert [sum(level == each for level in levels.values()) for each in "RDC"] == [4, 4, 7]


def _share(count: int, probability: float) -> float:
    """Return five standard errors of the frequency in `count` draws, exceeded once in about two million."""
    return 5 * (probability * (1 - probability) / count) ** 0.5


def test_which_digit_an_equation_hides() -> None:
    """Hidden digits of equations: in (a+b), a cyclic search to the right maps (, a and ) to a, and the other two
    positions to b.
    """
    inputs, _ = sampled("solve_equation", 8000, 7)
    first = (inputs[:, 1] == 9).mean()
    assert abs(first - 3 / 5) < _share(8000, 3 / 5)
    assert set(np.flatnonzero((inputs == 9).any(axis=0))) == {1, 3}


def test_lengths_in_the_grammar() -> None:
    """The left part of an expression of nine symbols has one to five of them with equal probability."""
    inputs, _ = sampled("modular_arithmetic_brackets", 10_000, 9)
    depth = np.cumsum((inputs == 8).astype(int) - (inputs == 9), axis=1)
    operators = (inputs >= 5) & (inputs <= 7) & (depth == 1)
    operators[:, 1] = False  # a sign
    lengths = operators.argmax(axis=1) - 1
    counts = np.bincount(lengths, minlength=6)[1:6] / len(inputs)
    # If the left part is a sign and a digit or is in brackets, the first operator outside is still the main one.
    assert counts.sum() == 1
    assert np.abs(counts - 1 / 5).max() < _share(10_000, 1 / 5)


def test_numbers_are_uniform_and_never_zero() -> None:
    inputs, _ = sampled("binary_addition", 14_000, 6)
    first = (inputs == 2).argmax(axis=1)
    assert np.abs(np.bincount(first, minlength=5)[1:] / len(inputs) - 1 / 4).max() < _share(14_000, 1 / 4)
    of_two = inputs[first == 2]
    values = of_two[:, 0] + 2 * of_two[:, 1]
    shares = np.bincount(values, minlength=4) / len(values)
    assert shares[0] == 0
    assert np.abs(shares[1:] - 1 / 3).max() < _share(len(values), 1 / 3)
    roots, _ = sampled("compute_sqrt", 6000, 3)
    shares = np.bincount(roots @ [4, 2, 1], minlength=8) / 6000
    assert shares[0] == 0
    assert np.abs(shares[1:] - 1 / 7).max() < _share(6000, 1 / 7)


def test_stacks_are_as_often_of_each_size() -> None:
    inputs, _ = sampled("stack_manipulation", 12_000, 5)
    sizes = (inputs >= 2).argmax(axis=1)
    assert np.abs(np.bincount(sizes, minlength=5)[1:] / len(sizes) - 1 / 4).max() < _share(12_000, 1 / 4)


@given(st.sampled_from(NAMES), st.integers(1, 64), st.integers(1, 9), st.integers(0, 2**32 - 1))
@settings(deadline=None, max_examples=60)
def test_any_shape_is_drawn_and_repeats(name: str, length: int, count: int, seed: int) -> None:
    one, other = (task(name).sample_batch(np.random.default_rng(seed), count, length) for _ in range(2))
    assert one.tokens.shape == (count, task(name).get_sequence_length(length))
    assert all((a == b).all() for a, b in zip(one[:4], other[:4], strict=True))
    assert one.position_ids is other.position_ids is None
    assert one.tokens.dtype == one.labels.dtype == np.int64
