"""Import and export round trips are bit for bit identical; a native export equals transformers' own files."""

import json
from itertools import cycle
from pathlib import Path

import pytest
import torch
from tokenizer_files import open_tokenizers, write_tokenizers

from megatron.checkpoint.load_model import load_model
from megatron.checkpoint.trained_run import open_run
from megatron.cli.convert import import_
from megatron.conversion.export_model import export_model
from megatron.conversion.import_model import import_model
from megatron.data.load_tokenizer import load_run_tokenizer
from megatron.data.tokenizers import load_tokenizer_from_files
from megatron.options.commands import ImportOptions
from megatron.position.registry import list_encodings, list_processors, list_temperatures
from megatron.utils.errors import RunError, UserError
from tools.export.cases import (
    LAYERS,
    LENGTH,
    WIDTH,
    ExportCase,
    build_gpt,
    list_architecture_cases,
    list_document_cases,
    list_position_cases,
    list_softmax_cases,
    list_temperature_cases,
    write_run,
)
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
TOKENS = torch.arange(3 * LENGTH).reshape(3, LENGTH) * 7 % 257
NATIVE_WIDTH = 48
PLAIN = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}
LLAMA = {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 1, **PLAIN}
GEMMA = {**LLAMA, "activation": "geglu_tanh", "embedding_multiplier": NATIVE_WIDTH**0.5}
ROUND = [
    *(
        ExportCase(f"{encoding}, {processor}", {"pos_emb": encoding, "score_processor": processor})
        for encoding, processor in zip(list_encodings(), cycle(["none", *list_processors()]), strict=False)
    ),
    *list(list_position_cases())[-6:],
    *list_temperature_cases(),
    *list_softmax_cases(),
    *list_document_cases(),
    *list_architecture_cases(),
]
NATIVE = {
    "GPTNeoXForCausalLM": {"pos_emb": "rotary", "pos_emb_options": {"fraction": 0.25}, "gpt_j_residual": True},
    "GPT2LMHeadModel": {"pos_emb": "learned", "activation": "gelu_tanh"},
    "LlamaForCausalLM": {**LLAMA, "no_weight_tying": True},
    "Qwen2ForCausalLM": {**LLAMA, "use_bias_in_qkv": True},
    "Qwen3ForCausalLM": {**LLAMA, "use_qk_layernorm": True, "head_dim": 12},
    "Olmo2ForCausalLM": {**LLAMA, "use_qk_layernorm": True, "qk_layernorm_over_heads": True, "norm_placement": "post"},
    "GemmaForCausalLM": {**GEMMA, "head_dim": 12},
    "Gemma2ForCausalLM": {
        **GEMMA,
        "norm_placement": "sandwich",
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 4.0,
        "query_pre_attn_scalar": 11.0,
        "attention_window": 9,
    },
}


def logits(run: Path) -> torch.Tensor:
    with torch.inference_mode():
        return load_model(run).model(TOKENS)


@pytest.mark.parametrize("case", ROUND, ids=lambda case: case.title)
def test_exported_and_imported(case: ExportCase, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, 257))
    import_model(export_model(run, tmp_path / "export", log=lambda line: None), tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), logits(run))
    again = open_run(tmp_path / "again")
    assert load_run_tokenizer(again.folder, again.config.data, again.tokenizer_name).name == "bytes"


def test_an_import_prints_the_whole_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {"pos_emb": "kerple_log", "score_processor": "cdape", "attention_temperature": "logn"}
    case = ExportCase("method", keys)
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, 257))
    target = export_model(run, tmp_path / "export", log=lambda line: None)
    import_(target, tmp_path / "again", **ImportOptions().model_dump())
    assert f" of width {WIDTH}, kerple_log, cdape, logn, training length " in capsys.readouterr().out


def test_changed_weights_are_rejected(tmp_path: Path) -> None:
    """A flipped bit in a weight is detected by its checksum."""
    case = next(iter(list_architecture_cases()))
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, 257))
    target = export_model(run, tmp_path / "export", max_shard_size="30KB", log=lambda line: None)
    weights = sorted(target.glob("*.safetensors"))[-1]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(
        RunError, match=rf"export: {weights.name} changed since it was written: .* delete checksums.json"
    ):
        import_model(target, tmp_path / "again")
    assert not (tmp_path / "again").exists()
    (target / "checksums.json").write_text('{"files": {"../run/config.yml": {"bytes": 1, "crc32": "0"}}}')
    with pytest.raises(RunError, match=r"checksums.json: cannot be read"):
        import_model(target, tmp_path / "again")
    (target / "checksums.json").unlink()
    import_model(target, tmp_path / "again")


@pytest.mark.parametrize("architecture", NATIVE)
def test_native(architecture: str, tmp_path: Path) -> None:
    case = ExportCase(architecture, {**NATIVE[architecture], "hidden_size": NATIVE_WIDTH, "score_processor": "none"})
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, 257))
    lines: list[str] = []
    target = export_model(run, tmp_path / "native", native=True, max_shard_size="30KB", log=lines.append)
    assert json.loads((target / "config.json").read_text())["architectures"] == [architecture]
    assert not list(target.glob("*.py"))
    assert lines[0].endswith(f", as {architecture} of transformers")
    assert any("drift" in line for line in lines) == (architecture != "GPT2LMHeadModel")
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert type(model).__name__ == architecture
    with torch.inference_mode():
        assert_close_in_rounding(model(TOKENS).logits, logits(run), *count_gpt_sums(48, LAYERS))
    import_model(target, tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again"), logits(run))


def test_no_native_model(tmp_path: Path) -> None:
    case = ExportCase("cdape", {"pos_emb": "rotary", "score_processor": "cdape"})
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, 257))
    with pytest.raises(
        UserError,
        match=r"--native: no native transformers model .*/run .* rotary: score_processor is cdape; omit --native",
    ):
        export_model(run, tmp_path / "native", native=True)
    case = ExportCase("rmsnorm", {"pos_emb": "rotary", "norm": "rmsnorm"})
    run = write_run(tmp_path / "other", case.build_config(), build_gpt(case, 257))
    with pytest.raises(UserError, match=r"gpt_neox: norm is rmsnorm; .*, llama: activation is gelu"):
        export_model(run, tmp_path / "native", native=True)
    for title, keys in {"neox": NATIVE["GPTNeoXForCausalLM"], "llama": LLAMA}.items():
        case = ExportCase(title, {**keys, "pos_emb_options": {"scaling": "hope"}})
        run = write_run(tmp_path / title, case.build_config(), build_gpt(case, 257))
        with pytest.raises(UserError, match=r"pos_emb_options\.scaling is hope"):
            export_model(run, tmp_path / "native", native=True)
    case = ExportCase("dynamic", {"pos_emb": "rotary", "pos_emb_options": {"scaling": "dynamic", "factor": 1.0}})
    run = write_run(tmp_path / "dynamic", case.build_config(), build_gpt(case, 257))
    with pytest.raises(UserError, match=r"dynamic: cannot be exported: .* does not know the final length of a text"):
        export_model(run, tmp_path / "native")
    keys = {**NATIVE["GPT2LMHeadModel"], "use_mup": True, "mup_base_hidden_size": 12, "mup_base_num_attention_heads": 3}
    case = ExportCase("muP", keys)
    run = write_run(tmp_path / "mup", case.build_config(), build_gpt(case, 257))
    with pytest.raises(
        UserError, match=r"gpt2: use_mup is true and multiplies by 0\.7071 \(query\); not supported by GPT2LMHeadModel"
    ):
        export_model(run, tmp_path / "native", native=True)
    assert not (tmp_path / "native").exists()


@pytest.mark.parametrize("kind", ["HFTokenizer", "GPT2BPETokenizer", "SPMTokenizer"])
def test_the_tokenizer_comes_back(kind: str, tmp_path: Path) -> None:
    tokenizer = open_tokenizers(write_tokenizers(tmp_path))[kind]
    case = ExportCase("alibi", {"pos_emb": "alibi"})
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, tokenizer.vocab_size), tokenizer)
    import_model(export_model(run, tmp_path / "export", log=lambda line: None), tmp_path / "again")
    again = open_run(tmp_path / "again")
    assert again.tokenizer_name == tokenizer.name
    assert load_run_tokenizer(again.folder, again.config.data, again.tokenizer_name).name == tokenizer.name


@pytest.mark.parametrize(
    ("kind", "end_token"), [("HFTokenizer", "the"), ("GPT2BPETokenizer", "the"), ("SPMTokenizer", "▁the")]
)
def test_the_end_token_comes_back(kind: str, end_token: str, tmp_path: Path) -> None:
    """An end token without one of the common names also ends documents in the imported model's attention."""
    files = open_tokenizers(write_tokenizers(tmp_path))[kind].files.values()
    tokenizer = load_tokenizer_from_files(kind, *files, end_token=end_token)
    case = ExportCase("document", {"pos_emb": "alibi", "attention_mask": "document"})
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, tokenizer.vocab_size), tokenizer)
    import_model(export_model(run, tmp_path / "export", log=lambda line: None), tmp_path / "again")
    again = open_run(tmp_path / "again")
    assert load_run_tokenizer(again.folder, again.config.data, again.tokenizer_name).eod == tokenizer.eod
    tokens = torch.arange(3 * LENGTH).reshape(3, LENGTH) * 7 % tokenizer.vocab_size
    tokens[:, LENGTH // 2] = tokenizer.eod
    with torch.inference_mode():
        first, second = (load_model(folder).model(tokens) for folder in (run, tmp_path / "again"))
    assert torch.equal(first, second)


def test_a_model_that_was_finetuned_and_saved(tmp_path: Path) -> None:
    """transformers keeps only the classes that it used, under the name of the repository they came from."""
    import transformers

    tokenizer = open_tokenizers(write_tokenizers(tmp_path))["GPT2BPETokenizer"]
    case = ExportCase("document", {"pos_emb": "alibi", "attention_mask": "document"})
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, tokenizer.vocab_size), tokenizer)
    target, saved = export_model(run, tmp_path / "export", log=lambda line: None), tmp_path / "saved"
    model = transformers.AutoModelForCausalLM.from_pretrained(target, trust_remote_code=True)
    own = transformers.AutoTokenizer.from_pretrained(target)
    model.save_pretrained(saved)
    own.eos_token = own.convert_ids_to_tokens(5)  # a turn of a chat, for example; not where documents end
    own.save_pretrained(saved)
    values = json.loads((saved / "config.json").read_text())
    values["auto_map"] = {
        name: f"me/model--{values['auto_map'][name]}" for name in ("AutoConfig", "AutoModelForCausalLM")
    }
    (saved / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"saved: vocab\.json and merges\.txt of tokenizer GPT2BPETokenizer not found"):
        import_model(saved, tmp_path / "again")
    tokenizer.copy_files(saved)
    import_model(saved, tmp_path / "again")
    tokens = torch.arange(3 * LENGTH).reshape(3, LENGTH) * 7 % tokenizer.vocab_size
    tokens[:, LENGTH // 2], tokens[:, LENGTH // 4] = tokenizer.eod, 5
    with torch.inference_mode():
        assert torch.equal(load_model(tmp_path / "again").model(tokens), load_model(run).model(tokens))
    values["auto_map"]["AutoModelForCausalLM"] = "me/model--modeling_other.Other"
    (saved / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"auto_map is .*: the model needs custom code, which is not run"):
        import_model(saved, tmp_path / "third")


def test_every_encoding_and_processor_is_among_them() -> None:
    sections = [case.build_config().position for case in ROUND]
    assert {name for each in sections for name in each.encodings} == set(list_encodings())
    assert {name for each in sections for name in each.processors} >= {"none", *list_processors()}
    assert {name for each in sections for name in each.temperatures} == {"none", *list_temperatures()}
