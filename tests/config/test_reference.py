"""The documentation of keys is complete and current."""

from pathlib import Path

from megatron.config import neox, reference
from megatron.config.schema import keys

ROOT = Path(__file__).resolve().parents[2]


def test_page_is_current():
    written = (ROOT / reference.PAGE).read_text(encoding="utf-8")
    assert written == reference.markdown(), "run: make docs"


def test_page_has_every_key_and_every_rule():
    page = reference.markdown()
    for key in keys().values():
        assert f"| `{key.name}`" in page
    for name in (*neox.RULES, *neox.POSITIONS):
        assert f"`{name}`" in page


def test_lookup():
    assert [row[0] for row in reference.lookup("rotary-pct")] == ["rotary_pct"]
    assert reference.lookup("rotary-pct")[0][3] == "is pos_emb_options.fraction of rotary here"
    found = {row[0]: row for row in reference.lookup("num_layers")}
    assert found["num_layers"][1:3] == ("required", "whole number")
    assert reference.lookup("zero-init")[0][::3] == (
        "score_processor_options.zero_init",
        "an option of cdape and dape; ./deepy.py positions tells more",
    )
    assert reference.lookup("no such thing") == []
    assert len(reference.lookup("")) == len(keys())
