"""Documentation of the keys is complete and current."""

import ast
import importlib.util
import re
from pathlib import Path

from megatron.config import reference
from megatron.config.schema import list_config_keys

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("neox_files", Path(__file__).with_name("neox_files.py"))
neox_files = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(neox_files)


def test_page_is_current():
    written = (ROOT / reference.REFERENCE_PAGE).read_text(encoding="utf-8")
    assert written == reference.build_reference(), "run: make docs"


def declared() -> dict[str, str]:
    """Return name → description of every `name: type = key(default, "doc", …)` in megatron/options, parsed from the
    sources.
    """
    found = {}
    for path in (ROOT / "megatron/options").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call) and len(node.value.args) == 2:
                found[node.target.id] = ast.literal_eval(node.value.args[1])
    return found


def rows(section: str | None = None) -> dict[str, list[str]]:
    """Return the rows of the page's tables by the code in the first cell; a later row replaces an earlier one."""
    return dict(list_rows(section))


def list_rows(section: str | None = None) -> list[tuple[str, list[str]]]:
    """List the code in the first cell of each table row, with the row's cells."""
    text = (ROOT / reference.REFERENCE_PAGE).read_text(encoding="utf-8")
    if section is not None:
        text = text.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line.strip("| ").replace("\\|", "¦").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return [(name, cells) for cells in lines for name in re.findall(r"`([^`]+)`", cells[0])]


def test_page_matches_the_sources():
    found = declared()
    assert len(found) > 90  # guards against an empty comparison
    written = {(name.split(".")[-1], cells[-1].replace("¦", "|")) for name, cells in list_rows()}
    assert set(found.items()) - written == set()


def test_page_has_every_key_of_the_stock_configurations():
    """The page contains every key of GPT-NeoX's, KERPLE's and DAPE's stock files: our own, or one with a rule."""
    files = [value for name, value in vars(neox_files).items() if name.isupper() and isinstance(value, dict)]
    while inner := [file for file in files if all(isinstance(value, dict) for value in file.values())]:
        files = [file for file in files if file not in inner] + [value for file in inner for value in file.values()]
    flat = {key.replace("-", "_") for file in files for key in file}
    assert {"num_layers", "pos_emb", "train_iters"} <= flat
    known = {name.split(".")[-1] for name in rows()}
    assert flat - known == set()


def test_page_has_notes_on_some_keys():
    """The page states essential facts about some keys. They are written here by hand, independently of the tables."""
    assert rows("model")["num_layers"][:3] == ["`num_layers`", "required", "integer"]
    assert rows("model")["num_layers"][3] == "architecture"
    assert rows("model")["seq_length"][3] == "context"
    assert rows("data")["data_cache"][3] == "machine"
    assert rows("data")["split"][:3] == ["`split`", "969,30,1", "string"]
    assert rows("data")["num_workers"][:3] == ["`num_workers`", "0", "integer"]
    assert rows("launch")["num_gpus"][2] == "integer or null"
    assert rows("optimizer")["optimizer.params.lr"][2] == "number"
    assert rows()["rotary_pct"][1].startswith("sets `pos_emb_options.fraction` of rotary")
    assert rows()["kerple_capev2"][1] == (
        "`pos_emb: kerple_log`, `score_processor: cdape`, `pos_emb_per_layer: true`, `decay_positions: true`"
    )
    assert rows()["rope"][1] == "`pos_emb: rotary`"
    assert rows("model")["num_kv_heads"][:3] == ["`num_kv_heads`", "null", "integer or null"]
    assert rows()["bias_gelu_fusion"][1] == "true: `activation: gelu_tanh` instead of `activation: gelu`"
    assert "flash" not in rows()


def test_lookup():
    assert [row[0] for row in reference.find_keys("rotary-pct")] == ["rotary_pct"]
    assert reference.find_keys("rotary-pct")[0][3] == "sets pos_emb_options.fraction of rotary"
    found = {row[0]: row for row in reference.find_keys("num_layers")}
    assert found["num_layers"][1:3] == ("required", "integer")
    assert reference.find_keys("zero-init")[0][::3] == (
        "score_processor_options.zero_init",
        "an option of cdape and dape; see ./deepy.py positions",
    )
    assert reference.find_keys("no such thing") == []
    assert len(reference.find_keys("")) == len(list_config_keys())
