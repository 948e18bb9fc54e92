"""Exports give this project's results in a process that cannot import it."""

import math
from itertools import islice
from pathlib import Path

from megatron.position.registry import list_encodings, list_processors
from tools.export.cases import (
    ExportCase,
    list_architecture_cases,
    list_document_cases,
    list_method_cases,
    list_position_cases,
    list_softmax_cases,
    list_temperature_cases,
)
from tools.export.compare import measure_differences, select_beyond_rounding

EVERY_METHOD = list(list_method_cases())
_NAMES = [*list_encodings(), "none", *list_processors()]


def _is_chosen(case: ExportCase) -> bool:
    position = case.build_config().position
    return (_NAMES.index(position.pos_emb) + _NAMES[::-1].index(position.score_processor)) % 2 == 0


CHOSEN = [case for case in EVERY_METHOD if _is_chosen(case)]
"""Every second pair of an encoding and a processor (or none); `tools/export/compare.py` covers all."""


def test_exports_equal_the_project(tmp_path: Path) -> None:
    """A single test, because the reading process takes seconds to import transformers."""
    cases = [
        *CHOSEN,
        *islice(list_position_cases(), 0, None, 5),
        *list_temperature_cases(),
        *list_softmax_cases(),
        *list_document_cases(),
        *list_architecture_cases(),
    ]
    assert not select_beyond_rounding(measure_differences(cases, tmp_path))


def test_nan_exceeds_rounding() -> None:
    fine, none, *_ = EVERY_METHOD
    found = {fine: {"1x whole": 0.0}, none: {"1x whole": 0.0, "4x whole": math.nan}}
    assert list(select_beyond_rounding(found)) == [none.title]


def test_every_method_is_among_them() -> None:
    for cases in (EVERY_METHOD, CHOSEN):
        pairs = {(case.build_config().position.pos_emb, case.build_config().position.score_processor) for case in cases}
        assert len(pairs) == len(cases)
        assert {encoding for encoding, _ in pairs} == set(list_encodings())
        assert {processor for _, processor in pairs} == {"none", *list_processors()}
    assert any(case.build_config().position.randomized_positions for case in list_position_cases())
