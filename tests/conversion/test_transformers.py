"""Exports in transformers: generation, training, loading, and rejected uses."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.conversion.export_model import export_model
from megatron.model.gpt import GPT
from tools.export.cases import FAR, LAYERS, LENGTH, WIDTH, ExportCase, build_gpt, write_run
from tools.tolerances import assert_close_in_rounding, compute_tolerance, count_gpt_sums

VOCABULARY = 257
TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
CASE = ExportCase(
    "cdape", {"pos_emb": "kerple_log", "score_processor": "cdape", "score_processor_options": {"width": 8}}
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7], [1, 1, 2, 3, 5]]


@pytest.fixture(scope="module")
def transformers() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[GPT, Path]:
    """The project's model, and its export in shards of a few kilobytes."""
    folder = tmp_path_factory.mktemp("run")
    gpt = build_gpt(CASE, VOCABULARY)
    run = write_run(folder / "run", CASE.build_config(), gpt)
    return gpt, export_model(run, folder / "export", max_shard_size="20KB", log=lambda line: None)


@pytest.fixture(scope="module")
def model(transformers: Any, exported: tuple[GPT, Path]) -> Any:
    return load(transformers, exported[1])


def load(transformers: Any, folder: Path, **choices: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **choices)


def batch() -> dict[str, torch.Tensor]:
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[256] * (longest - len(prompt)) + prompt for prompt in PROMPTS])
    return {"input_ids": ids, "attention_mask": (torch.arange(longest) >= longest - lengths()[:, None]).long()}


def lengths() -> torch.Tensor:
    return torch.tensor([len(prompt) for prompt in PROMPTS])


@torch.inference_mode()
def greedy(gpt: GPT, prompt: list[int], count: int) -> list[int]:
    """Decode greedily by whole forward passes."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(gpt(torch.tensor([tokens]))[0, -1, :VOCABULARY].argmax()))
        if tokens[-1] == VOCABULARY - 1:
            break
    return tokens[len(prompt) :]


def test_weights_are_in_shards(exported: tuple[GPT, Path]) -> None:
    assert len(list(exported[1].glob("model-*-of-*.safetensors"))) > 2


def test_greedy_generation(model: Any, exported: tuple[GPT, Path]) -> None:
    gpt, _ = exported
    given = batch()
    found = model.generate(**given, max_new_tokens=12, do_sample=False)[:, given["input_ids"].shape[1] :]
    for row, prompt in zip(found.tolist(), PROMPTS, strict=True):
        expected = greedy(gpt, prompt, 12)
        assert row[: len(expected)] == expected
        assert set(row[len(expected) :]) <= {model.config.pad_token_id}


@pytest.mark.parametrize(
    "choices",
    [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 9},
        {"do_sample": False, "prompt_lookup_num_tokens": 2},
    ],
    ids=["beams", "sampling", "prompt lookup"],
)
def test_a_cache_changes_nothing(model: Any, choices: dict[str, Any]) -> None:
    given = {key: tensor[:1] for key, tensor in batch().items()} if "prompt_lookup_num_tokens" in choices else batch()
    found = []
    for cached in (True, False):
        if not cached and "prompt_lookup_num_tokens" in choices:  # requires a cache; compare with plain greedy decoding
            choices = {"do_sample": False}
        torch.manual_seed(7)
        found.append(model.generate(**given, max_new_tokens=9, use_cache=cached, **choices))
    assert torch.equal(*found)


def test_only_tokens_of_the_vocabulary_are_drawn(model: Any) -> None:
    torch.manual_seed(3)
    found = model.generate(**batch(), max_new_tokens=40, do_sample=True, top_k=0, temperature=5.0)
    assert found.max() < VOCABULARY


def test_added_tokens_can_be_drawn(transformers: Any, exported: tuple[GPT, Path]) -> None:
    """Their rows were padding; the remaining padding is still never drawn."""
    model = load(transformers, exported[1])
    model.resize_token_embeddings(VOCABULARY + 2, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[VOCABULARY:] = model.lm_head.weight[5]  # as likely as token 5
    assert min(model.generation_config.suppress_tokens) == VOCABULARY + 2
    torch.manual_seed(3)
    found = model.generate(**batch(), max_new_tokens=200, do_sample=True, top_k=0, temperature=3.0)
    assert {VOCABULARY, VOCABULARY + 1} <= set(found.flatten().tolist())


def test_the_configuration_requests_outputs(transformers: Any, exported: tuple[GPT, Path]) -> None:
    """A request in the configuration has the effect of the argument of the same name."""
    tokens = torch.tensor([[3, 1, 4]])
    model = load(transformers, exported[1], output_hidden_states=True)
    expected = load(transformers, exported[1])(tokens, output_hidden_states=True)
    for found, wanted in zip(model(tokens).hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(found, wanted)
    assert model(tokens, output_hidden_states=False).hidden_states is None
    model.config.return_dict = False
    logits, *_ = model(tokens)
    assert torch.equal(logits, expected.logits)
    hidden, *_ = model.model(tokens)
    assert torch.equal(hidden, expected.hidden_states[-1])
    assert model(tokens, return_dict=True).logits is not None
    with pytest.raises(ValueError, match="does not support output_attentions"):
        load(transformers, exported[1], output_attentions=True)(tokens)


def test_the_loss_is_the_project_s(model: Any, exported: tuple[GPT, Path]) -> None:
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = exported[0](tokens[:, :-1], tokens[:, 1:]).mean()
        assert_close_in_rounding(model(tokens, labels=tokens).loss, expected, TERMS, SUMS)


def test_gradients_with_and_without_recomputation(transformers: Any, exported: tuple[GPT, Path]) -> None:
    tokens = torch.randint(256, (2, 20), generator=torch.Generator().manual_seed(1))
    found = []
    for recomputed in (False, True):
        model = load(transformers, exported[1]).train()
        if recomputed:
            model.gradient_checkpointing_enable()
        model(tokens, labels=tokens).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(grad is not None for grad in found[0].values())
    # Not bitwise: products may sum in another order if their inputs are aligned differently. A gradient without effect
    # (a constant added to all logits of a row) is compared with a hundredth of the model's largest gradient.
    largest = max(grad.abs().max().item() for grad in found[0].values())
    for name, grad in found[0].items():
        assert_close_in_rounding(found[1][name], grad, TERMS, 2 * SUMS, size=largest / 100)


def test_bfloat16(transformers: Any, exported: tuple[GPT, Path]) -> None:
    gpt, folder = exported
    model = load(transformers, folder, dtype=torch.bfloat16)
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        found, expected = model(tokens).logits.float(), gpt(tokens)
    difference = (found - expected).abs().max() / expected.abs().max()
    assert 0 < difference < compute_tolerance(TERMS, SUMS, torch.bfloat16)


def test_device_map_with_layers_on_disk(transformers: Any, exported: tuple[GPT, Path], tmp_path: Path) -> None:
    gpt, folder = exported
    places = {"model.embed": "cpu", "model.position": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = load(transformers, folder, device_map=places, offload_folder=tmp_path)
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert_close_in_rounding(model(tokens).logits, gpt(tokens), TERMS, SUMS)


def test_saved_and_loaded_again(transformers: Any, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "again")
    again = load(transformers, tmp_path / "again")
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("model.position.r1.value", 0.01, 2.0),
        ("model.layers.1.attention.processor.hidden.weight", -1.0, 1.0),
        ("model.layers.0.attention.qkv.bias", 0.0, 0.0),
        ("model.layers.0.mlp.up.weight", -2.0, 2.0),
        ("model.norm.weight", 1.0, 1.0),
    ],
)
def test_a_missing_weight_has_its_start_value(
    name: str, low: float, high: float, transformers: Any, exported: tuple[GPT, Path], tmp_path: Path
) -> None:
    """A missing weight gets its start value, not the contents of uninitialized memory."""
    for path in exported[1].iterdir():
        if path.suffix != ".safetensors" and "index" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights: dict[str, torch.Tensor] = {}
    for path in exported[1].glob("*.safetensors"):
        weights |= load_file(path)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = dict(load(transformers, tmp_path).named_parameters())[name]
    assert found.isfinite().all()
    assert low <= found.min() <= found.max() <= high


def test_silent_errors_are_rejected(transformers: Any, model: Any) -> None:
    tokens = torch.tensor([PROMPTS[0]])
    places = torch.arange(8)[None]
    refused: list[tuple[str, dict[str, Any]]] = [
        ("does not support output_attentions", {"output_attentions": True}),
        ("does not support block_table", {"block_table": torch.zeros(1)}),
        ("2D masks", {"attention_mask": torch.ones(1, 1, 8, 8)}),
        ("padding only at the ends", {"attention_mask": torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])}),
        ("position_ids must match", {"position_ids": places + 3}),
        ("must continue the tokens", {"cache_position": torch.arange(8) + 1}),
        ("either input_ids or inputs_embeds", {"inputs_embeds": torch.zeros(1, 8, WIDTH)}),
    ]
    with pytest.raises(ValueError, match="there are no tokens"):
        model(tokens[:, :0])
    for words, arguments in refused:
        with pytest.raises(ValueError, match=words):
            model(tokens, **arguments)
    model(tokens, position_ids=places, cache_position=places[0], output_attentions=False)


def test_sdpa_does_not_replace_our_attention(transformers: Any, exported: tuple[GPT, Path]) -> None:
    with pytest.raises(ValueError, match="does not support an attention implementation"):
        load(transformers, exported[1], attn_implementation="sdpa")


def test_exports_in_folders_of_one_name_keep_their_own_code(transformers: Any, tmp_path: Path) -> None:
    """transformers caches code by folder name, and every training may name its folder `model`."""
    tokens, models = torch.tensor([PROMPTS[0]]), {}
    for place, keys in {"a": {"pos_emb": "kerple_log"}, "b": {"pos_emb": "rotary"}, "c": {"pos_emb": "alibi"}}.items():
        case = ExportCase(place, keys)
        gpt = build_gpt(case, VOCABULARY)
        run = write_run(tmp_path / place / "run", case.build_config(), gpt)
        models[place] = gpt, load(transformers, export_model(run, tmp_path / place / "model", log=lambda line: None))
    with torch.no_grad():
        for gpt, model in models.values():
            assert_close_in_rounding(model(tokens).logits, gpt(tokens), TERMS, SUMS)
    modules = [type(model).__module__ for _, model in models.values()]
    assert len({*modules}) == 3


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows_match_single_rows_with_random_positions(transformers: Any, tmp_path: Path, side: str) -> None:
    case = ExportCase("randomized", {"pos_emb": "rotary", "randomized_positions": 64})
    gpt = build_gpt(case, VOCABULARY)
    folder = export_model(
        write_run(tmp_path / "run", case.build_config(), gpt), tmp_path / "export", log=lambda line: None
    )
    model = load(transformers, folder)
    longest = max(map(len, PROMPTS)) + 2
    before = [{"left": longest - n, "right": 0, "both": (longest - n) // 2}[side] for n in map(len, PROMPTS)]
    tokens = torch.full((len(PROMPTS), longest), 256)
    mask = torch.zeros_like(tokens)
    for row, (start, prompt) in enumerate(zip(before, PROMPTS, strict=True)):
        tokens[row, start : start + len(prompt)] = torch.tensor(prompt)
        mask[row, start : start + len(prompt)] = 1
    with torch.no_grad():
        found = model(tokens, attention_mask=mask, use_cache=False).logits
        ours = gpt(tokens, attention_mask=mask.bool())
        for row, (start, prompt) in enumerate(zip(before, PROMPTS, strict=True)):
            alone = gpt(torch.tensor([prompt]))[0]
            assert_close_in_rounding(found[row, start : start + len(prompt)], alone, TERMS, SUMS)
            assert_close_in_rounding(ours[row, start : start + len(prompt)], alone, TERMS, SUMS)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("keys", "longest"),
    [
        ({"pos_emb": "kerple_log"}, None),
        ({"pos_emb": "learned"}, FAR),
        ({"pos_emb": "rotary", "randomized_positions": 90}, 90),
    ],
)
def test_transformers_warns_only_beyond_the_last_position(
    transformers: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], longest: int | None
) -> None:
    """Inputs longer than the training length cause no warning, unless the model has no positions for them."""
    case = ExportCase("far", keys)
    run = write_run(tmp_path / "run", case.build_config(), build_gpt(case, VOCABULARY))
    folder = export_model(run, tmp_path / "export", log=lambda line: None)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = load(transformers, folder)
    assert model.config.max_position_embeddings == longest
    monitored = ["transformers.tokenization_utils_base", "transformers.generation.stopping_criteria"]
    loggers = [logging.getLogger(name) for name in monitored]
    transformers.utils.logging.warning_once.cache_clear()

    def collect_warnings(num_tokens: int) -> list[str]:
        caplog.clear()
        tokens = tokenizer("a" * num_tokens, return_tensors="pt")
        model.generate(**tokens, max_new_tokens=4, do_sample=False)
        return [record.getMessage() for record in caplog.records if record.name in monitored]

    transformers.utils.logging.set_verbosity_warning()
    for logger in loggers:
        logger.addHandler(caplog.handler)
    try:
        assert collect_warnings(2 * LENGTH) == []
        if longest is None:
            assert collect_warnings(2 * FAR) == []
        else:
            tokenizer("a" * (longest + 1))
            assert any("longer than the specified maximum" in record.getMessage() for record in caplog.records)
    finally:
        transformers.utils.logging.set_verbosity_error()
        for logger in loggers:
            logger.removeHandler(caplog.handler)
