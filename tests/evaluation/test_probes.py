"""Probes: positions checked by plain loops, losses of a known model, and one-line errors."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron.data.load_tokenizer import Vocabulary
from megatron.data.tokenizers import ByteTokenizer
from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.passkey import DEPTHS, QUESTION, Passkey
from megatron.evaluation.probe import Probe, RepeatedTokens
from megatron.evaluation.run import PROBES, build_probe
from megatron.options import evaluation
from megatron.options.evaluation import EvaluationOptions as Options
from megatron.reports.comparison_table import build_comparison_tables
from megatron.utils.errors import UserError

from .conftest import VOCABULARY, RunningMean, loaded, tiny_gpt
from .test_perplexity import ROUNDING, one_loss

SMALL = Vocabulary(VOCABULARY, "small", 3)
BYTES = ByteTokenizer()


class Copier(nn.Module):
    """Model that predicts the successor of the last equal token within `reach` tokens, and otherwise a uniform
    distribution.
    """

    def __init__(self, vocabulary: int, reach: int) -> None:
        super().__init__()
        self.vocabulary, self.reach = vocabulary, reach
        self.none = nn.Parameter(torch.zeros(1))
        self.max_length: int | None = None

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, num_logits: int) -> torch.Tensor:
        losses = torch.full((len(tokens), num_logits), math.log(self.vocabulary))
        for row, line in enumerate(tokens.tolist()):
            for number in range(num_logits):
                at = len(line) - num_logits + number
                before = [i for i in range(max(0, at - self.reach), at) if line[i] == line[at]]
                if before and line[before[-1] + 1] == int(labels[row, at]):
                    losses[row, number] = 0.01
        return losses

    def count_flops_per_token(self, length: int) -> float:
        return 3.0

    def num_parameters(self) -> int:
        return 0


@given(st.integers(1, 6), st.integers(14, 60), st.integers(2, 5))
def test_the_copy_is_at_the_right_position(copied: int, length: int, count: int) -> None:
    probe = RepeatedTokens([length], count, Vocabulary(50, "x", 7), copied)
    distances = probe.list_axis_values(length)
    assert distances[0] == copied + 1
    assert distances[-1] == length - copied
    targets = []
    for distance in map(int, distances):
        made = probe.build_sequences(length, distance)
        assert made.shape == (count, length + 1)
        assert made.min() >= 0
        assert made.max() < 50
        assert not (made == 7).any(), "the end of documents is no token of a text"
        for row in made.tolist():
            assert row[length - copied :] == row[length - copied - distance : length + 1 - distance]
        targets.append(made[:, -copied:].tolist())
    assert all(tokens == targets[0] for tokens in targets), "every distance asks for the same tokens"


def test_the_reach_of_a_copying_model_is_measured() -> None:
    probe = RepeatedTokens([40, 80], 6, Vocabulary(4000, "x", None), 4)
    found = probe.score(loaded(Copier(4000, reach=20)), ScoringContext())  # type: ignore[arg-type]
    assert {record.metric for record in found} == {"loss"}
    for record in found:
        near = record.place <= 20
        assert record.value == pytest.approx(0.01 if near else math.log(4000), rel=1e-6)
        assert (record.axis, record.tokens, record.windows) == ("distance", 24, 6)
    tables = build_comparison_tables(found)
    assert [(table.axis.name, table.records[0].length) for table in tables] == [("distance", 40), ("distance", 80)]
    assert "at least 8.29" in tables[0].notes[-1]


@pytest.mark.parametrize("encoding", [None, "kerple_log"], ids=["running mean", "kerple_log"])
def test_losses_equal_a_plain_loop(encoding: str | None) -> None:
    probe = RepeatedTokens([16], 3, SMALL, 4)
    model = RunningMean().eval() if encoding is None else tiny_gpt(pos_emb=encoding)
    for record in probe.score(loaded(model), ScoringContext()):  # type: ignore[arg-type]
        rows = probe.build_sequences(16, record.place)
        losses = [one_loss(model, row[:at], int(row[at])) for row in rows for at in range(13, 17)]
        assert record.value == pytest.approx(sum(losses) / 12, abs=ROUNDING)
        assert record.low <= record.value <= record.high


def test_the_key_is_at_its_depth_and_requested_at_the_end() -> None:
    probe = Passkey([300], 5, BYTES)
    keys = list(probe.answers)
    assert probe.list_axis_values(300) == DEPTHS
    assert probe.list_axis_values(100) == ()
    places = []
    for depth in DEPTHS:
        texts = [BYTES.decode(row.tolist()) for row in probe.build_sequences(300, depth)]
        for key, text in zip(keys, texts, strict=True):
            assert len(text) == 301
            assert text.endswith(f"What is the pass key? The pass key is {key}")
            assert text.count(f"The pass key is {key}. Remember it. {key} is the pass key. ") == 1
        places.append(texts[0].index("The pass key is"))
    room = (
        301
        - len(f"The pass key is {keys[0]}. Remember it. {keys[0]} is the pass key. ")
        - len(f"What is the pass key? The pass key is {keys[0]}")
    )
    assert places == [round(depth * room) for depth in DEPTHS]
    assert probe.num_scored_tokens == 6  # a space and five digits
    assert len(set(keys)) == 5


class Joining(ByteTokenizer):
    """Model that reads the question's last letter together with its successor, unless the key has only digits
    `apart`.
    """

    def __init__(self, apart: str = "") -> None:
        super().__init__()
        self.apart = apart

    def encode(self, text: str) -> Sequence[int]:
        digits = text.removeprefix(QUESTION)
        tokens = list(super().encode(text))
        if digits in ("", text) or set(digits) <= set(self.apart):
            return tokens
        at = len(QUESTION.rstrip()) - 1
        return [*tokens[:at], 255, *tokens[at + 2 :]]


def test_keys_without_own_tokens_are_skipped() -> None:
    with pytest.raises(UserError, match="merges the end of the question with the key"):
        Passkey([300], 2, Joining())
    some = Passkey([300], 2, Joining(apart="0123456"))
    assert len(some.answers) == 2
    assert all(set(key) <= set("0123456") for key in some.answers)
    assert some.num_scored_tokens == 6
    assert some.build_sequences(300, 0.5).shape == (2, 301)
    with pytest.raises(UserError, match="too few keys with equal numbers of tokens"):
        Passkey([300], 3, Joining(apart="0124"))


def test_options_of_probes() -> None:
    assert tuple(PROBES) == evaluation.PROBE_PROTOCOLS

    def probe(**choices: object) -> Probe:
        return build_probe(Options(**choices), [64, 128], BYTES)

    assert (probe(protocol="repeated").num_scored_tokens, probe(protocol="repeated", targets=8).num_scored_tokens) == (
        16,
        8,
    )
    assert probe(protocol="repeated", windows=7).num_sequences == 7
    for choices, message in (
        ({"protocol": "passkey"}, "windows of 64 tokens are too short"),
        ({"protocol": "repeated", "targets": 40}, "windows of 64 tokens are too short"),
        ({"protocol": "repeated", "targets": [4, 8]}, "copies one number of tokens"),
        ({"protocol": "repeated", "data": "x.txt"}, "data applies to texts only"),
        ({"protocol": "repeated", "measures": ["position"]}, "measures applies to texts only"),
        ({"protocol": "repeated", "attention_mask": "document"}, "attention_mask applies to texts only"),
        ({"protocol": "passkey", "targets": 4}, "scores the key's digits"),
    ):
        with pytest.raises(UserError, match=message):
            probe(**choices)
    assert np.array_equal(*(probe(protocol="repeated", windows=2).build_sequences(128, 40) for _ in range(2)))
