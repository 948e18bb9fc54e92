"""Exports compute what this project computes, in a process that cannot import it."""

from itertools import islice
from pathlib import Path

from tools.export_cases import methods, places, shapes, tolerance
from tools.export_matrix import differences

EVERY_METHOD = list(methods())


def test_exports_equal_the_project(tmp_path: Path) -> None:
    """All in one test: who reads them imports transformers, which takes as long as ten exports."""
    cases = [*EVERY_METHOD, *islice(places(), 0, None, 5), *shapes()]
    wrong = {
        case.title: apart
        for case, apart in differences(cases, tmp_path).items()
        if not all(each <= tolerance() for each in apart.values())  # nor if it is no number
    }
    assert not wrong


def test_every_method_is_among_them() -> None:
    pairs = {(case.config().position.pos_emb, case.config().position.score_processor) for case in EVERY_METHOD}
    assert len(pairs) == len(EVERY_METHOD) == 66
    assert any(case.config().position.randomized_positions for case in places())
