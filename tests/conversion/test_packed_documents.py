"""With several documents in a row, separated by end tokens or by packing, an export reads each as if alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

from megatron.conversion.export_model import export_model
from megatron.evaluation.forward_passes import decode_tokens
from megatron.model.gpt import GPT
from tools.export.cases import END, LAYERS, WIDTH, ExportCase, build_gpt, write_run
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY = 257
TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
CDAPE = {"pos_emb": "kerple_log", "score_processor": "cdape", "score_processor_options": {"width": 8}}
CASES = {
    "causal": CDAPE,
    "document": {**CDAPE, "attention_mask": "document"},
    "selective": {"pos_emb": "fox", "score_processor": "selective", "attention_mask": "document"},
}
SEQUENCES = [[5, 1, END, 9, 2], [7], [3, END], [8, 8, 1, 4, END, END, 6]]
PROMPTS = [[3, 1, END, 1, 5, 9, 2, 6], [2, END], [1, 1, END, 3, 5]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[GPT, Any]]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, found = tmp_path_factory.mktemp("packed"), {}
    for name, keys in CASES.items():
        case = ExportCase(name, keys)
        gpt = build_gpt(case, VOCABULARY)
        run = write_run(folder / f"{name}_run", case.build_config(), gpt)
        exported = export_model(run, folder / name, log=lambda line: None)
        found[name] = gpt, transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    return found


def collate(**choices: Any) -> dict[str, Any]:
    collator = transformers.DataCollatorWithFlattening(return_tensors="pt", **choices)
    return dict(collator([{"input_ids": sequence} for sequence in SEQUENCES]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "choices",
    [
        {},
        {"return_position_ids": False, "return_flash_attn_kwargs": True},
        {"return_position_ids": False, "return_seq_idx": True},
        {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    ],
    ids=["position_ids", "cu_seq_lens", "seq_idx", "all"],
)
def test_packed_sequences_match_separate_ones(
    models: dict[str, tuple[GPT, Any]], name: str, choices: dict[str, Any]
) -> None:
    gpt, model = models[name]
    with torch.no_grad():
        found = model(**collate(**choices))
        expected = [gpt(torch.tensor([sequence])) for sequence in SEQUENCES]
    assert_close_in_rounding(found.logits, torch.cat(expected, dim=1), TERMS, SUMS)
    scored = [
        torch.nn.functional.cross_entropy(own[0, :-1], torch.tensor(sequence[1:], dtype=torch.int64), reduction="sum")
        for own, sequence in zip(expected, SEQUENCES, strict=True)
    ]
    loss = sum(scored) / sum(len(sequence) - 1 for sequence in SEQUENCES)
    assert_close_in_rounding(found.loss, loss, TERMS, SUMS)


@torch.inference_mode()
def test_rows_may_be_packed_otherwise_and_padded(models: dict[str, tuple[GPT, Any]]) -> None:
    gpt, model = models["causal"]
    tokens = torch.tensor([[0, 5, 1, 9, 2, 7, 4, 0], [3, 8, 8, 1, 4, 6, 2, 2]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0], [1] * 8])
    positions = torch.tensor([[0, 0, 1, 2, 0, 1, 2, 0], [0, 0, 1, 2, 3, 4, 0, 1]])
    found = model(tokens, attention_mask=mask, position_ids=positions).logits
    for row, parts in enumerate(([(1, 4), (4, 7)], [(0, 1), (1, 6), (6, 8)])):
        for first, last in parts:
            assert_close_in_rounding(found[row, first:last], gpt(tokens[row : row + 1, first:last])[0], TERMS, SUMS)


@pytest.mark.parametrize("name", ["document", "selective"])
@torch.inference_mode()
def test_tokens_do_not_attend_past_an_end_token(models: dict[str, tuple[GPT, Any]], name: str) -> None:
    """An end token limits the visibility of later tokens, in one pass, with a cache, and after removing tokens from the
    cache.

    A causal export attends across it.
    """
    _, model = models[name]
    document, before = torch.tensor([[7, 2, 9, 4, 4]]), torch.tensor([[1, 6, END]])
    row = torch.cat([before, document], dim=1)
    alone = model(document).logits
    assert_close_in_rounding(model(row).logits[:, 3:], alone, TERMS, SUMS)
    cache = DynamicCache()
    model(row[:, :2], past_key_values=cache)
    model(torch.tensor([[END, 5]]), past_key_values=cache)
    cache.crop(-1)
    assert_close_in_rounding(model(row[:, 3:5], past_key_values=cache).logits, alone[:, :2], TERMS, SUMS)
    model(torch.tensor([[END]]), past_key_values=cache)
    cache.crop(-1)
    assert_close_in_rounding(model(row[:, 5:], past_key_values=cache).logits, alone[:, 2:], TERMS, SUMS)
    causal = models["causal"][1]
    assert (causal(row).logits[:, 3:] - causal(document).logits).abs().max() > 0.1


@pytest.mark.parametrize("name", ["document", "selective"])
def test_generation_continues_the_last_document(models: dict[str, tuple[GPT, Any]], name: str) -> None:
    gpt, model = models[name]
    longest, count = max(map(len, PROMPTS)), 8
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    mask = (torch.arange(longest) >= longest - torch.tensor([[len(prompt)] for prompt in PROMPTS])).long()
    choices = {"max_new_tokens": count, "do_sample": False, "suppress_tokens": [END, *range(VOCABULARY, 320)]}

    def choose(logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :END].argmax(-1)

    expected = torch.stack(list(decode_tokens(gpt, PROMPTS, count, choose)), dim=1)
    for use_cache in (True, False):
        found = model.generate(ids, attention_mask=mask, use_cache=use_cache, **choices)
        assert torch.equal(found[:, longest:], expected)
    beams = [
        model.generate(ids, attention_mask=mask, num_beams=3, use_cache=use_cache, **choices)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


def test_unsupported_packing_is_rejected(models: dict[str, tuple[GPT, Any]]) -> None:
    tokens = torch.tensor([[5, 1, 9, 2]])
    again = torch.tensor([[0, 1, 0, 1]])
    borders = torch.tensor([0, 2, 4])
    refused: list[tuple[str, dict[str, Any]]] = [
        ("do not support a cache", {"position_ids": again, "past_key_values": DynamicCache()}),
        ("do not support a cache", {"cu_seq_lens_q": borders, "use_cache": True}),
        ("position_ids must match", {"position_ids": torch.tensor([[0, 1, 5, 6]])}),
        ("position_ids must match", {"position_ids": torch.tensor([[2, 3, 2, 3]])}),
        ("position_ids must match", {"position_ids": torch.arange(4)[None], "cu_seq_lens_q": borders}),
        (r"position_ids must be \[1, 4\]", {"position_ids": torch.zeros(3, 1, 4)}),
        ("cu_seq_lens_q must increase from 0 to the 4", {"cu_seq_lens_q": torch.tensor([0, 2, 5])}),
        ("cu_seq_lens_q must increase", {"cu_seq_lens_q": borders, "cu_seq_lens_k": torch.tensor([0, 3, 4])}),
        ("cu_seq_lens_q must increase", {"cu_seq_lens_k": borders}),
        ("must describe the same", {"cu_seq_lens_q": borders, "seq_idx": torch.tensor([[0, 0, 0, 1]])}),
        ("must be 0 for padding and 1 for tokens", {"attention_mask": torch.tensor([[1, 1, 2, 2]])}),
    ]
    for name in CASES:
        model = models[name][1]
        for words, arguments in refused:
            with pytest.raises(ValueError, match=words):
                model(tokens, **arguments)
    model = models["document"][1]
    embeddings = model.get_input_embeddings()(tokens)
    with pytest.raises(ValueError, match=r"document_end_token_id 256.*set config\.document_end_token_id = None"):
        model(inputs_embeds=embeddings)


def test_a_foreign_cache_is_rejected(models: dict[str, tuple[GPT, Any]]) -> None:
    model, cache = models["document"][1], DynamicCache()
    models["causal"][1](torch.tensor([[5, 1]]), past_key_values=cache)
    with pytest.raises(ValueError, match="does not return exactly what was stored"):
        model(torch.tensor([[9, 2]]), past_key_values=cache)


def test_an_export_states_document_masking(models: dict[str, tuple[GPT, Any]]) -> None:
    for name, end in (("causal", None), ("document", END)):
        folder = Path(models[name][1].config._name_or_path)
        assert json.loads((folder / "config.json").read_text())["document_end_token_id"] == end
        assert ("document masking" in (folder / "README.md").read_text()) == (end is not None)


def test_a_native_export_states_the_lack_of_document_masking(tmp_path: Path) -> None:
    keys = {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "no_weight_tying": True}
    keys |= {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False, "attention_mask": "document"}
    case, lines = ExportCase("llama", keys), []
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, VOCABULARY))
    folder = export_model(run, tmp_path / "native", native=True, log=lines.append)
    words = "LlamaForCausalLM treats a row as one document"
    assert any(words in line for line in lines)
    assert words in (folder / "README.md").read_text()
    assert "document_end_token_id" not in (folder / "config.json").read_text()
