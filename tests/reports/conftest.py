"""Handmade records."""

import math

import pytest

from megatron.reports.records import Record


def record(method: str, length: int, perplexity: float, seed: int = 1, **more: object) -> Record:
    """Build a record of a model trained at 64 tokens."""
    known = {"train_length": 64, "protocol": "last", "tokens": 4096, "run": f"runs/{method}/{seed}"}
    known |= {"metric": "perplexity", "nll": math.log(perplexity)}
    return Record(**{**known, "method": method, "length": length, "seed": seed, **more}, value=perplexity)


@pytest.fixture
def story() -> list[Record]:
    """Records of three methods at three lengths: one diverges, one is flat, one is flat and lower."""
    curves = {"rotary": (5.25, 12.5, 29.75), "kerple_log": (5.5, 5.45, 5.43), "cdape": (4.96, 4.9, 4.87)}
    return [
        record(method, length, perplexity, stderr=0.03)
        for method, curve in curves.items()
        for length, perplexity in zip((64, 512, 2048), curve, strict=True)
    ]
