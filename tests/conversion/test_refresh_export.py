"""`export --refresh`: an export of an earlier version gets the current code and gives the same results."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizer_files import open_tokenizers, write_tokenizers

from megatron.cli.convert import export
from megatron.conversion import modeling_code, refresh_export
from megatron.conversion.export_model import export_model
from megatron.conversion.modeling_code import add_content_digest, remove_content_digest
from megatron.utils.errors import RunError, UserError
from tools.export.cases import LENGTH, ExportCase, build_gpt, write_run

TOKENS = torch.tensor([[3, 1, 4, 256, 5, 9, 2, 6]])
COPE = {"pos_emb": ["cope", "fox"], "pos_emb_options": {"scaled": True, "positions": 5}, "attention_window": [None, 5]}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def write_export(folder: Path, keys: dict[str, Any], tokenizer: Any = None) -> Path:
    case = ExportCase("model", keys)
    size = 257 if tokenizer is None else tokenizer.vocab_size
    run = write_run(folder / "run", case.build_config(), build_gpt(case, size), tokenizer)
    return export_model(run, folder / "export", log=lambda line: None)


def change_config(folder: Path, **keys: Any) -> dict[str, Any]:
    """Set keys of config.json, or remove those set to `...`."""
    values = json.loads((folder / "config.json").read_text())
    values = {name: value for name, value in {**values, **keys}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return values


def make_older(folder: Path) -> list[str]:
    """Change the code as if an earlier version had written it, and return the file names."""
    old = sorted(folder.glob("modeling_farfield_*.py"))[0].stem[-9:]
    files = {path.name: path.read_text() for path in folder.glob(f"*{old}.py")}
    plain = remove_content_digest(files, old)
    plain["modeling_farfield.py"] += "\n# of an earlier version\n"
    plain["numerics.py"] = plain.pop("numerics.py") + "\n# of an earlier version\n"
    for name in files:
        (folder / name).unlink()
    renamed, suffix = add_content_digest(plain)
    for name, text in renamed.items():
        (folder / name).write_text(text)
    classes = {name: text.replace(old, suffix) for name, text in change_config(folder)["auto_map"].items()}
    change_config(folder, auto_map=classes)
    return sorted(renamed)


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@torch.inference_mode()
def compute_logits(folder: Path) -> torch.Tensor:
    return load(folder)(TOKENS).logits


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_digest_is_removed_again() -> None:
    files = modeling_code.bundle_modeling_code(["cope"], ["cdape"])
    assert remove_content_digest(*add_content_digest(files)) == files


def test_an_older_export_gets_the_current_code(tmp_path: Path) -> None:
    """An older export gets the current code; one of its keys has another default than today (`scaled` of cope)."""
    folder = write_export(tmp_path, COPE)
    today = read_files(folder)
    expected = compute_logits(folder)
    old_files = make_older(folder)
    values = json.loads((folder / "config.json").read_text())
    options = {**values["pos_emb_options"], "cope": {"positions": 5}}
    change_config(folder, max_position_embeddings=LENGTH)  # earlier versions wrote the training length twice
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer_config, "model_max_length": LENGTH}))
    change_config(folder, pos_emb_options=options, softmax_type=..., document_end_token_id=..., mine=[1])
    (folder / "notes.txt").write_text("mine")
    (folder / "mine.py").write_text("print('mine')\n")
    before, lines = read_files(folder), []
    refresh_export.refresh_export(folder, log=lines.append)
    after = read_files(folder)
    assert {name for name in after if name.endswith(".py")} == {n for n in today if n.endswith(".py")} | {"mine.py"}
    for name in before.keys() - {*old_files, "config.json", "tokenizer_config.json"}:
        assert after[name] == before[name]
    config = json.loads(after["config.json"])
    assert config["mine"] == [1]
    assert config["max_position_embeddings"] is None
    assert transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True).model_max_length > 1e9
    assert config["softmax_type"] == "vanilla"
    assert config["pos_emb_options"]["cope"]["scaled"] is True
    assert torch.equal(compute_logits(folder), expected)
    text = "\n".join(map(str, lines))
    assert "config.json: set max_position_embeddings, pos_emb_options, softmax_type" in text
    assert f"instead of {len(old_files)} code files ({old_files[0][-12:-3]})" in text
    assert "if it was, add document_end_token_id: 256" in text
    lines.clear()
    change_config(folder, document_end_token_id=None)
    before = read_files(folder)
    refresh_export.refresh_export(folder, log=lines.append)
    assert read_files(folder) == before
    assert lines == [f"{folder}: already has the code of this version"]


def test_code_that_was_edited_is_not_replaced_unasked(tmp_path: Path) -> None:
    folder = write_export(tmp_path, {"pos_emb": "kerple_log"})
    expected = compute_logits(folder)
    make_older(folder)
    modeling = next(folder.glob("modeling_farfield_*.py"))
    modeling.write_text(modeling.read_text() + "# mine\n")
    before = read_files(folder)
    with pytest.raises(
        UserError, match=r"export: \w+\.py and \d+ more may have been edited .*; use --overwrite to run the"
    ):
        refresh_export.refresh_export(folder)
    assert read_files(folder) == before
    lines: list[Any] = []
    refresh_export.refresh_export(folder, overwrite=True, log=lines.append)
    assert modeling.read_text().endswith("# mine\n")
    assert any("but no longer run" in line for line in lines)
    assert torch.equal(compute_logits(folder), expected)


def test_a_failure_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_export(tmp_path, {"pos_emb": "kerple_log"})
    make_older(folder)
    old, write = read_files(folder), refresh_export.write_text_atomically

    def fail(path: Path, text: str) -> Path:
        if path.name == "config.json":
            raise RunError("no space left")
        return write(path, text)

    monkeypatch.setattr(refresh_export, "write_text_atomically", fail)
    with pytest.raises(RunError):
        refresh_export.refresh_export(folder)
    assert read_files(folder).items() >= old.items()
    monkeypatch.undo()
    refresh_export.refresh_export(folder, log=lambda line: None)
    assert len(list(folder.glob("modeling_farfield_*.py"))) == 1


def test_a_model_that_was_finetuned_and_saved(tmp_path: Path) -> None:
    folder = write_export(tmp_path, {"pos_emb": "kerple_log"})
    make_older(folder)
    load(folder).save_pretrained(tmp_path / "again")
    again = tmp_path / "again"
    classes = {
        name: f"me/model--{text}" for name, text in json.loads((again / "config.json").read_text())["auto_map"].items()
    }
    change_config(again, auto_map=classes)
    refresh_export.refresh_export(again, log=lambda line: None)
    assert torch.equal(compute_logits(again), compute_logits(folder))
    assert "--" not in (again / "config.json").read_text()


def test_the_code_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = open_tokenizers(write_tokenizers(tmp_path))["SPMTokenizer"]
    folder = write_export(tmp_path, {"pos_emb": "kerple_log"}, tokenizer)
    (code,) = folder.glob("tokenization_farfield_*.py")
    text = code.read_text()
    old, suffix = add_content_digest({"tokenization_farfield.py": text + "# of an earlier version\n"})
    code.unlink()
    for name, content in old.items():
        (folder / name).write_text(content)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"]["AutoTokenizer"][0] = f"tokenization_farfield{suffix}.FarfieldTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    refresh_export.refresh_export(folder, log=lambda line: None)
    assert code.read_text() == text
    assert [path.name for path in folder.glob("tokenization_farfield_*.py")] == [code.name]
    assert transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)("a b").input_ids


def test_exports_that_cannot_be_refreshed_are_rejected(tmp_path: Path) -> None:
    folder = write_export(tmp_path, {"pos_emb": "kerple_log"})
    with pytest.raises(UserError, match="nowhere: no such folder; give the folder of an export"):
        refresh_export.refresh_export(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"run: not an export: config\.json is missing"):
        refresh_export.refresh_export(tmp_path / "run")
    values = change_config(folder, num_hidden_layers=3)
    with pytest.raises(RunError, match=r"contains no model\.layers\.2\..*, which config.json requires"):
        refresh_export.refresh_export(folder)
    change_config(folder, num_hidden_layers=2, pos_emb="mine")
    with pytest.raises(UserError, match="mine"):
        refresh_export.refresh_export(folder)
    change_config(folder, pos_emb="kerple_log", model_type="llama")
    with pytest.raises(UserError, match=r"model_type is 'llama'; --refresh updates the code of exports of this"):
        refresh_export.refresh_export(folder)
    change_config(folder, model_type="farfield", auto_map={**values["auto_map"], "AutoModel": "mine.Model"})
    with pytest.raises(UserError, match="auto_map"):
        refresh_export.refresh_export(folder)
    for arguments, message in (
        ({"folder": tmp_path / "new"}, "--refresh updates one export in place; omit .*new"),
        ({"dtype": "bfloat16"}, "dtype is bfloat16, which --refresh does not change"),
        ({"native": True}, "native is True, which --refresh does not change"),
    ):
        options = {"folder": None, "native": False, "dtype": "float32", "shard": "2GB", "license": None}
        with pytest.raises(UserError, match=message):
            export(str(folder), **{**options, "overwrite": False, "refresh": True, **arguments})
    with pytest.raises(UserError, match="missing folder"):
        export(str(folder), **options, overwrite=False, refresh=False)
