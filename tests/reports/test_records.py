"""Records survive a round trip through files; files without records give a one-line error."""

import csv
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.reports import records
from megatron.reports.records import Record
from megatron.utils.errors import RunError, UserError

MINIMAL = {
    "method": "rotary",
    "train_length": 64,
    "length": 128,
    "protocol": "last",
    "perplexity": 5.5,
    "tokens": 4096,
    "seed": 1234,
}
"""Record as stored in a file."""


def made(**more: object) -> Record:
    return records.record_from_row({**MINIMAL, **more})


numbers = st.floats(min_value=1e-3, max_value=1e305)
counts = st.integers(min_value=1, max_value=2**53)
text = st.text(min_size=1, max_size=20)
any_record = st.builds(
    Record,
    method=text,
    train_length=counts,
    length=counts,
    protocol=text,
    metric=st.just("perplexity"),
    value=numbers,
    tokens=counts,
    seed=st.integers(min_value=0, max_value=2**32),
    nll=st.none() | st.floats(allow_nan=False, allow_infinity=False),
    stderr=st.none() | numbers,
    dataset=st.none() | st.text(),
    windows=st.none() | counts,
)


@given(found=st.lists(any_record, max_size=4))
def test_written_files_are_read_back(tmp_path_factory: pytest.TempPathFactory, found: list[Record]) -> None:
    path = tmp_path_factory.mktemp("records") / "deep" / "results.json"
    records.write_records(path, found)
    assert records.read_records(path) == found
    assert isinstance(json.loads(path.read_text(encoding="utf-8")), list)


def test_reading_a_record_costs_little_more_than_its_validation() -> None:
    """Result folders have tens of thousands of records, so that fields are named once per metric, not per record."""
    fields = made().model_dump(exclude_unset=True)

    def measure_seconds(build: Callable[[], Record]) -> float:
        """Return the CPU time of 500 records, the least of five trials."""
        trials = []
        for _ in range(5):
            start = time.process_time()
            for _ in range(500):
                build()
            trials.append(time.process_time() - start)
        return min(trials)

    validation = measure_seconds(lambda: Record.model_validate(fields))
    assert measure_seconds(lambda: records.record_from_row(MINIMAL)) < 4 * validation


def test_the_file_has_the_promised_fields(tmp_path: Path) -> None:
    path = records.write_records(tmp_path / "results.json", [made()])
    assert json.loads(path.read_text()) == [MINIMAL]


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    records.write_records(path, [made()] * 3)
    records.write_records(path, [made()])
    assert len(records.read_records(path)) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_csv_has_a_column_per_field(tmp_path: Path) -> None:
    path = records.write_records_csv(tmp_path / "results.csv", [made(), made(nll=1.5, dataset="a,b")])
    rows = list(csv.DictReader(path.open(encoding="utf-8")))
    assert [row["nll"] for row in rows] == ["", "1.5"]
    assert rows[1]["dataset"] == "a,b"
    known = set(Record.model_fields) - {"metric", "value", "low", "high", "block_sums", "block_tokens", "remark"}
    assert set(rows[0]) == known | {"perplexity", "perplexity_low", "perplexity_high"}


def test_interval_is_symmetric_in_nats() -> None:
    low, high = made(perplexity=math.e, stderr=0.5).interval
    assert (math.log(low), math.log(high)) == pytest.approx((1 - 0.98, 1 + 0.98))
    assert made().interval is None


def test_tokens_of_blocks() -> None:
    assert made().tokens_per_block is None
    assert made(block_sums=[]).tokens_per_block is None
    assert made(block_sums=[5.0, 6.0], tokens=8).tokens_per_block == [4, 4]
    assert made(block_sums=[5.0, 6.0], block_tokens=[3, 5], tokens=8).tokens_per_block == [3, 5]


def test_the_bootstrap_interval_comes_first() -> None:
    both = made(stderr=0.5, perplexity_low=5.0, perplexity_high=6.5)
    assert both.interval == both.bootstrap_interval == (5.0, 6.5)
    assert made(stderr=0.5).bootstrap_interval is None


@pytest.mark.parametrize(
    ("change", "ends", "verdict"),
    [
        (1.1, (1.01, 1.2), "rises"),
        (0.9, (0.8, 0.99), "falls"),
        (1.0, (0.9, 1.1), "holds"),
        (1.1, (1.0, 1.2), "holds"),
        (1.004, (1.003, 1.005), "holds"),  # significant, but negligible
        (0.996, (0.995, 0.997), "holds"),
        (1.5, (None, 2.0), None),
    ],
)
def test_a_change_is_judged_by_its_interval(change: float, ends: tuple[float, float], verdict: str | None) -> None:
    known = {"change": change, "change_low": ends[0], "change_high": ends[1], "change_from": 64}
    assert made(**known).verdict == verdict


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "it must contain a list of records, not an object"),
        ("[1]", "record 1: it must be an object, not a number"),
        ("\n", "the file is empty; it must contain a list of records"),
        ("[{]", "; correct or restore the file, or move it away and repeat the evaluation"),
        ("[" * 100_000, "not JSON"),
        (json.dumps([MINIMAL, {**MINIMAL, "lenght": 1}]), "record 2: unknown field lenght; did you mean length?"),
        (json.dumps([{k: v for k, v in MINIMAL.items() if k != "seed"}]), "record 1: seed is missing"),
        (json.dumps([{**MINIMAL, "perplexity": "5"}]), "record 1: perplexity is '5'; it must be a number"),
        (json.dumps([{**MINIMAL, "length": 0}]), "record 1: length is 0; it must be at least 1"),
        (
            json.dumps([{**MINIMAL, "length": 10**30}]),
            f"record 1: length is {10**30}; it must be at most ",
        ),
        (json.dumps([{**MINIMAL, "step": 10**30}]), f"record 1: step is {10**30}; it must be at most "),
        (json.dumps([{**MINIMAL, "seed": 2**64}]), f"record 1: seed is {2**64}; it must be at most "),
        (json.dumps([{**MINIMAL, "seconds": 1e308}]), "record 1: seconds is 1e+308; it must be at most "),
        (json.dumps([{**MINIMAL, "perplexity": 1e308}]), "perplexity must be at least 0.001 and at most 1e+305"),
        (json.dumps([{**MINIMAL, "block_sums": [1.0], "block_tokens": [10**30]}]), "block_tokens"),
        (json.dumps([MINIMAL]).replace("5.5", "NaN"), "record 1: perplexity is nan; it must be a finite number"),
        (json.dumps([{**MINIMAL, "block_sums": [1.0, 2.0], "block_tokens": [9]}]), "block_tokens must be as many as"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(UserError) as caught:
        records.read_records(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["README.md", "results.csv", "results.md"])
@pytest.mark.parametrize("content", [b"# A page\n", b"\n", b"{}", b"\xff"])
def test_a_file_of_another_kind_is_not_called_damaged(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"; name a file of results, such as RUN/results\.json$"):
        records.read_records(tmp_path / name)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        records.read_records(tmp_path / "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        records.read_records(tmp_path / "binary")
    with pytest.raises(UserError, match="is a folder"):
        records.write_records(tmp_path, [])
    with pytest.raises(UserError, match="cannot be written"):
        records.write_records(tmp_path / "binary" / "results.json", [])


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = records.write_records(tmp_path / "results.json", [made()])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match="No space left"):
        records.write_records(path, [])
    assert len(records.read_records(path)) == 1
    assert list(tmp_path.iterdir()) == [path]
