"""With every cache and decoding mode of transformers, an export writes the greedy text or rejects the cache.

The test lists the caches and decoding modes of the installed transformers, so that new ones are covered.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.generation import configuration_utils

from megatron.conversion.export_model import export_model
from tools.export.cases import END, LAYERS, WIDTH, ExportCase, build_gpt, write_run
from tools.tolerances import assert_close_in_rounding, count_gpt_sums

VOCABULARY = 257
TERMS, SUMS = count_gpt_sums(WIDTH, LAYERS)
CASES = {
    "kerple_log": ExportCase("kerple_log", {"pos_emb": "kerple_log"}),
    "fox": ExportCase("fox", {"pos_emb": "fox"}),
    "cdape": ExportCase(
        "cdape", {"pos_emb": "kerple_log", "score_processor": "cdape", "score_processor_options": {"width": 8}}
    ),
    "selective": ExportCase("selective", {"pos_emb": "kerple_log", "score_processor": "selective"}),
    "mta": ExportCase("mta", {"pos_emb": "kerple_log", "score_processor": "mta"}),
    "documents": ExportCase("documents", {"pos_emb": "kerple_log", "attention_mask": "document"}),
}
KEEPS_EXACT_NUMBERS = ("fox", "selective", "documents")
"""Methods with values beside the keys that a cache must return unchanged."""
PROMPT = torch.tensor([[7, 1, END, 1, 5, 7, 1, 5, 7, 1]])
IMPLEMENTATIONS = sorted(
    set(configuration_utils.ALL_CACHE_IMPLEMENTATIONS) if hasattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS")
    else {"dynamic", "dynamic_full", "static", "offloaded", "offloaded_static", "sliding_window", "hybrid", "quantized"}
)  # fmt: skip


class RoundingCache(DynamicCache):
    """Cache that returns rounded keys and values, as quantized caches do."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().update(*args, **kwargs)
        return k.bfloat16().to(k.dtype), v.bfloat16().to(v.dtype)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder, found = tmp_path_factory.mktemp("caches"), {}
    for name, case in CASES.items():
        run = write_run(folder / f"{name}_run", case.build_config(), build_gpt(case, VOCABULARY))
        exported: Path = export_model(run, folder / name, log=lambda line: None)
        found[name] = transformers.AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    return found


def generate(model: Any, **choices: Any) -> list[int]:
    return model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=10, do_sample=False, **choices
    )[0].tolist()


@pytest.mark.parametrize("name", CASES)
def test_decoding_that_rolls_the_cache_back_writes_greedy_text(models: dict[str, Any], name: str) -> None:
    model = models[name]
    plain = generate(model, use_cache=False)
    assert generate(model) == plain
    assert generate(model, prompt_lookup_num_tokens=3) == plain
    # Another method's model makes other suggestions, most of which are removed from the cache again.
    assert generate(model, assistant_model=models["fox" if name != "fox" else "cdape"]) == plain


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_cropping_the_cache_removes_tokens(models: dict[str, Any], name: str) -> None:
    model, cache = models[name], DynamicCache()
    tokens = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    tokens[0, [5, 22]], tokens[1, 19] = END, END
    model(tokens[:, :20], past_key_values=cache)
    model((tokens[:, :7] + 1) % 256, past_key_values=cache)
    cache.crop(-7)
    found = model(tokens[:, 20:], past_key_values=cache).logits
    expected = model(tokens, use_cache=False).logits[:, 20:]
    assert_close_in_rounding(found, expected, TERMS, SUMS)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["kerple_log", "selective", "documents"])
def test_each_cache_of_transformers_is_correct_or_rejected(
    models: dict[str, Any], name: str, implementation: str
) -> None:
    plain = generate(models[name], use_cache=False)
    try:
        found = generate(models[name], cache_implementation=implementation)
    except (ValueError, ImportError):  # rejected by the model, or by transformers because of a missing package
        assert not implementation.startswith("dynamic")
        return
    except (AssertionError, RuntimeError):  # without a GPU, CUDA builds of torch have no streams
        if "offloaded" in implementation and not torch.cuda.is_available():
            pytest.skip("this cache needs a GPU")
        raise
    assert found == plain


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_a_quantized_cache_is_rejected_by_exact_methods(models: dict[str, Any], name: str) -> None:
    model, cache = models[name], RoundingCache()
    if name in KEEPS_EXACT_NUMBERS:
        with pytest.raises(ValueError, match="RoundingCache does not return exactly what was stored"):
            model(PROMPT, past_key_values=cache)
    else:
        found = model(PROMPT, past_key_values=cache).logits
        # Keys and values have relative errors of up to 2^-9, and logits are of order 1.
        torch.testing.assert_close(found, model(PROMPT, use_cache=False).logits, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", CASES)
def test_keys_of_other_trainers_are_read_or_rejected(models: dict[str, Any], name: str) -> None:
    """Keys in the cache before the first token, as in peft's prefix tuning, are read or rejected."""
    model, cache = models[name], DynamicCache()
    prefix = torch.randn(1, 3, 4, WIDTH // 3, generator=torch.Generator().manual_seed(2), requires_grad=True)
    for layer in range(LAYERS):
        cache.update(prefix, prefix, layer)
    mask = torch.ones(1, 4 + PROMPT.shape[1], dtype=torch.int64)
    if name in ("kerple_log", "cdape"):  # methods without values beside the keys
        model(PROMPT, attention_mask=mask, past_key_values=cache, labels=PROMPT).loss.backward()
        assert prefix.grad is not None
        assert prefix.grad.any()
        mask[0, 4:6] = 0
        with pytest.raises(ValueError, match="whose tokens precede the padding, pad on the right for training"):
            model(PROMPT, attention_mask=mask[:, : PROMPT.shape[1]])
    else:
        with pytest.raises(ValueError, match="peft's prefix tuning"):
            model(PROMPT, attention_mask=mask, past_key_values=cache)


def test_static_caches_are_rejected_at_once(models: dict[str, Any]) -> None:
    """Static caches are rejected twice in a row, because transformers reuses them in the next call."""
    model = models["cdape"]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cache_implementation is 'static': .* use 'dynamic'"):
            generate(model, cache_implementation="static")
    cache = transformers.StaticCache(config=model.config, max_cache_len=30)
    for call in (model, lambda tokens, **choices: model.generate(tokens, max_new_tokens=2, **choices)):
        with pytest.raises(ValueError, match="is a StaticCache, whose size is fixed; use a DynamicCache"):
            call(PROMPT, past_key_values=cache)


@torch.inference_mode()
def test_caches_are_identified_by_type(models: dict[str, Any]) -> None:
    """The cache is identified by its type: transformers 5.24 names it cache, 5.23 past_key_values."""
    model = models["cdape"]
    expected = model(PROMPT, use_cache=False).logits
    for name in ("past_key_values", "cache", "kv_cache"):
        cache = DynamicCache()
        model(PROMPT[:, :6], **{name: cache})
        assert cache.get_seq_length() == 6
        assert_close_in_rounding(model(PROMPT[:, 6:], **{name: cache}).logits, expected[:, 6:], TERMS, SUMS)
    with pytest.raises(ValueError, match="pass only one cache"):
        model(PROMPT, past_key_values=DynamicCache(), cache=DynamicCache())


def test_stop_strings_end_the_text(models: dict[str, Any]) -> None:
    model = models["kerple_log"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.config._name_or_path, trust_remote_code=True)
    ascii_only = {"suppress_tokens": list(range(128, VOCABULARY))}
    plain = generate(model, **ascii_only)[PROMPT.shape[1] :]
    stop = tokenizer.decode(plain[:1])
    found = generate(model, stop_strings=[stop], tokenizer=tokenizer, **ascii_only)
    assert found[PROMPT.shape[1] :] == plain[:1]


def test_arguments_that_change_the_result_are_rejected(models: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="this model does not support output_attentions"):
        models["cdape"](PROMPT, output_attentions=True)
