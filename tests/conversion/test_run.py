"""`export` is complete or has no effect; errors are one line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from full_disk import full_disk
from published import written
from safetensors.torch import load_file
from tiny_runs import write_corpora

from megatron.checkpoint import layout, manifest
from megatron.checkpoint.manifest import load_checkpoint_config
from megatron.checkpoint.run_folder import RunLock
from megatron.conversion import export_model as export_model_module
from megatron.conversion import import_model as import_model_module
from megatron.conversion.export_model import export_model
from megatron.conversion.families.farfield import FARFIELD
from megatron.conversion.import_model import read_source
from megatron.reports.records import RESULTS_FILE
from megatron.utils.errors import RunError, UserError
from tools.export.cases import ExportCase, build_gpt, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = ExportCase("fire", {"pos_emb": "fire", "pos_emb_per_layer": True, "no_weight_tying": True})
    return write_run(tmp_path_factory.mktemp("runs") / "fire", case.build_config(), build_gpt(case, 257))


def test_weights_are_the_same_bytes_under_other_names(run: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    target = export_model(run, tmp_path / "fire", log=lines.append)
    ours = load_file(layout.resolve_checkpoint_path(run) / layout.WEIGHTS)
    theirs = load_file(target / "model.safetensors")
    names = {
        weight.megatron_name: weight.hf_names[0]
        for weight in FARFIELD.weight_mappings(load_checkpoint_config(layout.resolve_checkpoint_path(run)))
    }
    assert {names[name] for name in ours} == set(theirs)
    assert all(torch.equal(theirs[names[name]], tensor) for name, tensor in ours.items())
    count = sum(tensor.numel() for tensor in ours.values())
    assert lines[0].startswith(f"{target}: {count:,} parameters in float32")
    assert (target / "model.safetensors").stat().st_mode & 0o044 == (target / "config.json").stat().st_mode & 0o044


def test_half_precision(run: Path, tmp_path: Path) -> None:
    target = export_model(run, tmp_path / "half", dtype="bfloat16", log=lambda line: None)
    assert {tensor.dtype for tensor in load_file(target / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((target / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_the_card(run: Path, tmp_path: Path) -> None:
    page = (export_model(run, tmp_path / "plain", log=lambda line: None) / "README.md").read_text()
    assert yaml.safe_load(page.split("---")[1])["tags"] == ["farfield", "length-extrapolation", "fire"]
    assert "license: other" in page
    assert "license was not specified" in page
    assert "`fire` positions" in page
    assert "Measured" not in page
    assert "\n\n\n" not in page
    page = (export_model(run, tmp_path / "free", license="apache-2.0", log=lambda line: None) / "README.md").read_text()
    assert "license: apache-2.0" in page
    assert "not stated" not in page
    assert RESULTS_FILE not in page
    case = ExportCase("processor", {"pos_emb": "kerple_log", "score_processor": ["cdape", "none"]})
    run = write_run(tmp_path / "processor", case.build_config(), build_gpt(case, 257))
    page = (export_model(run, tmp_path / "exported processor", log=lambda line: None) / "README.md").read_text()
    assert "`kerple_log` positions and the `cdape` score processor, `score_processor` by layers cdape, none," in page
    case = ExportCase("pattern", {"pos_emb": ["rotary", "none"], "attention_window": [9, None]})
    run = write_run(tmp_path / "pattern", case.build_config(), build_gpt(case, 257))
    target = export_model(run, tmp_path / "exported pattern", log=lambda line: None)
    page = (target / "README.md").read_text()
    assert yaml.safe_load(page.split("---")[1])["tags"][2:] == ["rotary", "none"]
    assert (
        "`rotary` and `none` positions, `pos_emb` by layers rotary, none; `attention_window` by layers 9, all," in page
    )
    keys = read_source(target).config_keys
    assert (keys["pos_emb"], keys["attention_window"]) == (["rotary", "none"], [9, None])
    with pytest.raises(UserError, match=re.escape("attention_window is [9, null]")):
        export_model(run, tmp_path / "native", native=True, log=lambda line: None)


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"dtype": "float61"}, "--dtype: unknown value 'float61'; did you mean float16?"),
        ({"max_shard_size": "big"}, "--shard is 'big'; it must be a size with its unit, such as 500MB or 2GB"),
        ({"max_shard_size": "3"}, "--shard is '3'; it must be a size with its unit"),
        ({"max_shard_size": "0GB"}, "--shard is '0GB'"),
    ],
)
def test_invalid_options_are_rejected(run: Path, tmp_path: Path, choices: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        export_model(run, tmp_path / "no", **choices)
    assert not (tmp_path / "no").exists()


def test_foreign_targets_are_rejected(run: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years")
    with pytest.raises(UserError, match="is not empty; choose another folder"):
        export_model(run, tmp_path / "thesis")
    with pytest.raises(UserError, match="not an export; --overwrite replaces only exports"):
        export_model(run, tmp_path / "thesis", overwrite=True)
    (tmp_path / "thesis" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not an export; --overwrite replaces only exports"):
        export_model(run, tmp_path / "thesis", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        export_model(run, tmp_path / "file")
    with pytest.raises(UserError, match="no such folder"):
        export_model(tmp_path / "nowhere", tmp_path / "out")
    target = export_model(run, tmp_path / "out", log=lambda line: None)
    (target / "stale.py").write_text("")
    (target / "thesis.tex").write_text("years")
    with pytest.raises(UserError, match=r"contains thesis.tex in addition to an export"):
        export_model(run, target, overwrite=True)
    (target / "thesis.tex").unlink()
    export_model(run, target, overwrite=True, log=lambda line: None)
    assert not (target / "stale.py").exists()
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years"


def test_a_damaged_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    case = ExportCase("alibi", {"pos_emb": "alibi"})
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, 257))
    checkpoint = layout.resolve_checkpoint_path(run)
    manifest.write_manifest(
        checkpoint, manifest.compute_checksums(checkpoint, [checkpoint / name for name in manifest.MODEL_FILES])
    )
    weights = checkpoint / layout.WEIGHTS
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    with pytest.raises(RunError, match=r"damaged: .*model\.safetensors"):
        export_model(run, tmp_path / "out")
    weights.write_bytes(content[:100])
    (checkpoint / manifest.MANIFEST).unlink()
    with pytest.raises(RunError, match="cannot be read as safetensors"):
        export_model(run, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("there", [False, True])
def test_a_full_disk_changes_no_file(there: bool, run: Path, tmp_path: Path) -> None:
    """A full disk leaves the existing files unchanged; safetensors reports it in its own way while writing weights."""
    target = tmp_path / "fire"
    if there:
        export_model(run, target, log=lambda line: None)
    before = {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    kept = "the existing folder is unchanged" if there else "nothing was saved"
    with full_disk(100_000), pytest.raises(RunError, match=rf"fire: cannot be written: the disk is full; {kept}$"):
        export_model(run, target, overwrite=there)
    assert {path.name: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("there", [False, True])
def test_two_exports_into_one_folder_are_both_kept(
    there: bool, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "fire"
    if there:
        export_model(run, target, log=lambda line: None)
    write = export_model_module.write_shards

    def export_meanwhile(*arguments: Any) -> None:
        monkeypatch.setattr(export_model_module, "write_shards", write)
        export_model(run, target, dtype="bfloat16", overwrite=there, log=lambda line: None)
        write(*arguments)

    monkeypatch.setattr(export_model_module, "write_shards", export_meanwhile)
    with pytest.raises(RunError, match=f"{target}: another command wrote it at the same time.* is in {target}-2$"):
        export_model(run, target, overwrite=there, log=lambda line: None)
    dtypes = [
        json.loads((folder / "config.json").read_text())["torch_dtype"] for folder in (target, tmp_path / "fire-2")
    ]
    assert dtypes == ["bfloat16", "float32"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fire", "fire-2"]


def test_an_import_replaces_no_run_that_began_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("llama", tmp_path / "source")
    write = import_model_module._write_run_files

    def begin_meanwhile(*arguments: Any) -> int:
        RunLock(tmp_path / "run").release()
        return write(*arguments)

    monkeypatch.setattr(import_model_module, "_write_run_files", begin_meanwhile)
    options = {"tokenizer": "HFTokenizer", "vocab_file": write_corpora(tmp_path / "corpus") / "tokenizer.json"}
    with pytest.raises(RunError, match="run: another command wrote it at the same time"):
        import_model_module.import_model(tmp_path / "source", tmp_path / "run", **options)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    assert (tmp_path / "run-2" / "config.yml").is_file()
