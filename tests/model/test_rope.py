"""Rotary scalings in the model, as set by `--rope`, compared with transformers and at all positions."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models import SUMS, TERMS, VOCABULARY, build_model
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.config.position_overrides import format_rope, override_position, parse_rope
from megatron.evaluation.forward_passes import decode_tokens
from megatron.model.gpt import GPT
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.position.encodings.rotary import Rotary
from megatron.position.facts import AttentionDims
from megatron.utils.errors import UserError
from tools.tolerances import assert_close_in_rounding

TRAINED, LENGTH = 10, 26
ROPES = ["pi:4", "ntk:4", "dynamic", "dynamic:3", "yarn:4", "yarn:8,beta_fast=16,beta_slow=2,attention_factor=1.2"]
ROPES += ["selfextend:3,5", "rerope:4"]
SHAPE = ModelOptions(
    num_layers=2, hidden_size=24, num_attention_heads=3, seq_length=TRAINED, init_method_std=0.3,
    attention_chunk_rows=8, make_vocab_size_divisible_by=8,
)  # fmt: skip


def rotary_gpt(rope: str | None, **keys: Any) -> GPT:
    position = override_position(SHAPE, PositionOptions(**{"pos_emb": "rotary", **keys}), rope=rope)
    return build_model(SHAPE, position, VOCABULARY, seed=5).eval()


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        ("pi:8", {"rope_type": "linear", "factor": 8.0}),
        ("dynamic", {"rope_type": "dynamic", "factor": 1.0}),
        ("dynamic:2.5", {"rope_type": "dynamic", "factor": 2.5}),
        ("yarn:8", {"rope_type": "yarn", "factor": 8.0}),
        (
            "yarn:3,beta_fast=20,beta_slow=3,attention_factor=1.5",
            {"rope_type": "yarn", "factor": 3.0, "beta_fast": 20.0, "beta_slow": 3.0, "attention_factor": 1.5},
        ),
        ({"scaling": "p_rope", "share": 0.75}, {"rope_type": "proportional", "partial_rotary_factor": 0.75}),
        ({"scaling": "p_rope", "share": 0.3}, {"rope_type": "proportional", "partial_rotary_factor": 0.3}),
    ],
)
def test_frequencies_match_transformers(rope: str | dict[str, Any], parameters: dict[str, Any]) -> None:
    trained, base = 512, 20000.0
    parameters = {"rope_theta": base, **parameters}
    if parameters["rope_type"] == "yarn":
        parameters["original_max_position_embeddings"] = trained
    theirs = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=trained, rope_parameters=parameters
    )
    model, position = (
        SHAPE.replace(seq_length=trained),
        PositionOptions(pos_emb="rotary", pos_emb_options={"base": base}),
    )
    options = rope if isinstance(rope, dict) else override_position(model, position, rope=rope).pos_emb_options
    ours = Rotary(AttentionDims(4, 64, 256, trained, trained), **{"base": base, **options})
    for length in (100, trained, 2048, 5000):
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](theirs, "cpu", seq_len=length)
        # Exponent, power, inverse and scaling, each rounded in float32; an exponent has the size of ln base.
        rtol = 2**-24 * (4 + 2 * math.log(base * 8))
        torch.testing.assert_close(ours.compute_frequencies(length=length).float(), frequencies, rtol=rtol, atol=0)
        assert ours.scaling.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("kind", ["attention_factor", "config.json"])
def test_longrope_reads_the_factors_of_transformers(kind: str, tmp_path: Path) -> None:
    """Factors come from a file of factors, or from a model's config.json, whose two lengths determine the attention
    factor.
    """
    lists = {f"{name}_factor": [1 + step * m for m in range(16)] for name, step in (("short", 0.02), ("long", 1.5))}
    trained, longest, base = 512, 4096, 20000.0
    keys = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": longest}
    parameters = {"rope_type": "longrope", "rope_theta": base, "original_max_position_embeddings": trained, **lists}
    file = tmp_path / "factors.yml"
    if kind == "config.json":
        file = tmp_path / "config.json"
        written = {**keys, "rope_scaling": parameters}
    else:
        parameters["attention_factor"] = 1.3
        written = {**lists, "attention_factor": 1.3}
    file.write_text(json.dumps(written))
    model = SHAPE.replace(seq_length=trained)
    position = PositionOptions(pos_emb="rotary", pos_emb_options={"base": base})
    changed = override_position(model, position, rope=f"longrope:{file}")
    ours = Rotary(AttentionDims(4, 32, 128, trained, trained), **changed.pos_emb_options)
    theirs = LlamaConfig(**keys, rope_parameters=parameters)
    for length in (100, trained, trained + 1, 5000):
        frequencies, amplitude = ROPE_INIT_FUNCTIONS["longrope"](theirs, "cpu", seq_len=length)
        torch.testing.assert_close(ours.compute_frequencies(length=length).float(), frequencies, rtol=2e-6, atol=0)
        assert ours.scaling.amplitude == pytest.approx(amplitude, rel=1e-12)
    assert re.fullmatch("longrope:[0-9a-f]{8}", format_rope(changed.pos_emb_options))


def assert_documents_are_refused(gpt: GPT) -> None:
    """Assert that rows with several documents are rejected, and rows with one document work.

    The results of a document would depend on the row that contains it.
    """
    x, starts = tokens(1, 6), torch.tensor([[0, 0, 2, 2, 2, 2]])
    with pytest.raises(UserError, match=r"documents cannot be masked: .* depends on the length of the whole row"):
        gpt(x, document_starts=starts)
    gpt(x, document_starts=torch.zeros_like(starts))
    gpt.end_of_document = int(x[0, 1])
    with pytest.raises(UserError, match="documents cannot be masked"):
        gpt(x)
    gpt.end_of_document = None


def test_documents_are_rejected_if_frequencies_depend_on_the_length() -> None:
    assert_documents_are_refused(rotary_gpt("dynamic"))


@torch.no_grad()
def test_longrope_decodes_as_it_reads(tmp_path: Path) -> None:
    file = tmp_path / "factors.json"
    file.write_text(json.dumps({"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1, 2, 4, 8], "factor": 4}))
    gpt, x = rotary_gpt(f"longrope:{file}"), tokens()
    whole, cache, parts = gpt(x), gpt.create_kv_cache(LENGTH), []
    for size in (7, 1, 18):
        parts.append(gpt(x[:, cache.length : cache.length + size], kv_cache=cache))
    assert_close_in_rounding(torch.cat(parts, dim=1), whole, TERMS, SUMS)
    assert (gpt(x[:, :TRAINED]) - whole[:, :TRAINED]).abs().max() > 1e-3, "short sequences have their own factors"
    assert_documents_are_refused(gpt)
    file.write_text(json.dumps({"short_factor": [1.0, 1.1], "long_factor": [1, 2, 4, 8], "factor": 4}))
    with pytest.raises(UserError, match="option short_factor of rotary has 2 numbers; expected 4, one per"):
        rotary_gpt(f"longrope:{file}")
    for text, problem in (
        ("{long_factor: [1]}", "short_factor is None; it must be a list of numbers"),
        ("{short_factor: [1], long_factor: [x]}", "long_factor of .* is 'x'; it must be a positive number"),
        ("{short_factor: [1], long_factor: [1]}", "factor or attention_factor is missing"),
        ("{rope_type: yarn}", "rope_type is 'yarn'; it must be longrope"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=problem):
            rotary_gpt(f"longrope:{file}")


@torch.no_grad()
def test_far_keys_are_for_backends_that_can() -> None:
    """`auto` chooses a backend that supports far keys; row blocks equal the whole, and each error is one line."""
    whole = rotary_gpt("selfextend:3,5")(tokens())
    for backend in ("eager", "chunked"):
        position = override_position(SHAPE, PositionOptions(pos_emb="rotary"), rope="selfextend:3,5")
        gpt = build_model(SHAPE, position, VOCABULARY, seed=5, backend=backend).eval()
        assert_close_in_rounding(gpt(tokens()), whole, TERMS, SUMS)
    with pytest.raises(UserError, match="'sdpa': it cannot rotate far keys differently from near ones; choose"):
        build_model(SHAPE, position, VOCABULARY, seed=5, backend="sdpa")


@pytest.mark.parametrize("rope", ROPES)
@torch.no_grad()
def test_decoding_padding_and_the_last_tokens_are_the_whole(rope: str) -> None:
    gpt, x = rotary_gpt(rope), tokens()
    whole = gpt(x)
    assert (whole - rotary_gpt(None)(x)).abs().max() > 1e-3
    cache, parts = gpt.create_kv_cache(LENGTH), []
    for size in (7, 1, 6, 1, 1, 10):
        parts.append(gpt(x[:, cache.length : cache.length + size], kv_cache=cache))
    assert_close_in_rounding(torch.cat(parts, dim=1), whole, TERMS, SUMS)
    assert_close_in_rounding(gpt(x, num_logits=9), whole[:, -9:], TERMS, SUMS)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0, :6] = False
    assert_close_in_rounding(gpt(x, attention_mask=mask)[:1, 6:], gpt(x[:1, 6:]), TERMS, SUMS)
    changed = x.clone()
    changed[:, 15:] = (changed[:, 15:] + 1) % VOCABULARY
    assert torch.equal(gpt(changed)[:, :15], whole[:, :15]), "a later token is seen"


@torch.no_grad()
def test_dynamic_reads_a_text_that_grows_by_the_length_that_it_may_reach() -> None:
    """Dynamic scaling uses the maximum length of a growing text; within the training length nothing is scaled.

    A prompt uses the frequencies of the longest text; prompts in a batch use their own.
    """
    gpt, plain, x = rotary_gpt("dynamic"), rotary_gpt(None), tokens()
    assert torch.equal(gpt(x[:, :TRAINED]), plain(x[:, :TRAINED]))
    cache = gpt.create_kv_cache(20)
    assert_close_in_rounding(gpt(x[:, :8], kv_cache=cache), rotary_gpt("ntk:2")(x[:, :8]), TERMS, SUMS)
    prompts = [x[0, :14].tolist(), x[1, :9].tolist()]

    def decode(model: GPT, prompts: list[list[int]]) -> tuple[list[torch.Tensor], torch.Tensor]:
        logits: list[torch.Tensor] = []

        def choose(found: torch.Tensor) -> torch.Tensor:
            logits.append(found)
            return found[:, :VOCABULARY].argmax(-1)

        chosen = torch.stack(list(decode_tokens(model, prompts, 7, choose)), dim=1)
        return logits, chosen

    together, chosen = decode(gpt, prompts)
    for row, prompt in enumerate(prompts):
        alone, own = decode(gpt, [prompt])
        assert torch.equal(own[0], chosen[row])
        # The last token is written and never read.
        reached = len(prompt) + 6
        stretched = rotary_gpt(f"ntk:{reached / TRAINED!r}")
        final = stretched(torch.tensor([prompt + own[0, :-1].tolist()]))[:, -1]
        for found in (together[-1][row : row + 1], alone[-1]):
            assert_close_in_rounding(found, final, TERMS, SUMS)


@pytest.mark.parametrize("rope", ["selfextend:8,256", "rerope:64", "yarn:8,beta_fast=16", "dynamic:2", "pi:4"])
def test_a_name_describes_the_overrides(rope: str) -> None:
    assert format_rope(parse_rope(rope)) == rope
    assert parse_rope(rope.replace("selfextend:8,256", "selfextend:neighbors=256,group=8")) == parse_rope(rope)


def test_only_rotary_layers_of_a_pattern_are_scaled() -> None:
    gpt = rotary_gpt("pi:4", pos_emb=["rotary", "none"])
    plain = rotary_gpt(None, pos_emb=["rotary", "none"])
    turning = [model.local_layers[0].self_attention.core_attention.encoding for model in (gpt, plain)]
    assert torch.equal(turning[0].compute_frequencies() * 4, turning[1].compute_frequencies())


@pytest.mark.parametrize(
    ("keys", "rope", "problem"),
    [
        ({"pos_emb": "alibi"}, "pi:8", r"rope pi:8: the run's pos_emb is alibi; scaling needs rotary"),
        (
            {"pos_emb_options": {"scaling": "hope"}},
            "yarn:2",
            "the run was trained with scaling hope, which cannot be replaced",
        ),
        ({"randomized_positions": 64}, "pi:2", "the run's positions are drawn from 64"),
        ({"attention_mask": "document"}, "dynamic", r"attention_mask: document, but the encoding \(scaling dynamic\)"),
        (
            {},
            "xpos:8",
            r"unknown scaling 'xpos'; choose from pi:FACTOR, ntk:FACTOR, dynamic, yarn:FACTOR, longrope:FILE",
        ),
        ({}, "longrope", "rope longrope: the file of factors is missing, as in longrope:factors.json"),
        ({}, "longrope:nowhere.json", "nowhere.json"),
        ({}, "selfextend:4", "rope selfextend:4: neighbors is missing, as in selfextend:8,256"),
        ({}, "selfextend:9,4", "option group of rotary is 9; it must be at most neighbors 4"),
        ({}, "rerope:2.5", "rope rerope:2.5: neighbors is 2.5; it must be an integer"),
        ({}, "rerope:4,5", "rope rerope:4,5: '5' must be OPTION=VALUE"),
        ({}, "pi", "rope pi: the factor is missing; it must be at least 1, as in pi:8"),
        ({}, "ntk:0.5", "rope ntk:0.5: factor is 0.5; it must be at least 1"),
        ({}, "pi:x", "rope pi:x: factor is 'x'; it must be a positive number"),
        ({}, "pi:8,beta_fast=2", "rope pi:8,beta_fast=2: pi has no option 'beta_fast'; it takes factor"),
        ({}, "yarn:8,2", "rope yarn:8,2: '2' must be OPTION=VALUE"),
        ({}, "yarn:8,beta_fast=1", "option beta_slow of rotary is 1; it must be less than beta_fast 1"),
    ],
)
def test_invalid_values_are_rejected_in_one_line(keys: dict[str, Any], rope: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        rotary_gpt(rope, **keys)
    assert "\n" not in str(refused.value)
