"""Tiny causal model with losses computable by a plain loop, and tiny real GPTs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models import build_model
from torch import Tensor, nn

from megatron.data.load_tokenizer import Vocabulary
from megatron.evaluation.eval_target import ScoringContext
from megatron.evaluation.perplexity import evaluate_perplexity
from megatron.evaluation.protocols import plan_from_options
from megatron.evaluation.texts import EvalText
from megatron.options.evaluation import EvaluationOptions
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.reports.records import Record

TRAIN_LENGTH = 8
VOCABULARY = 19
BYTES = Vocabulary(VOCABULARY, "bytes", eod=3)


class RunningMean(nn.Module):
    """Causal model with logits from the mean embedding of all tokens so far, which depend on the context length."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.output = nn.Linear(6, VOCABULARY)
        self.batches: list[tuple[int, int]] = []
        self.max_length: int | None = None

    def forward(self, tokens: Tensor, labels: Tensor, num_logits: int) -> Tensor:
        self.batches.append(tuple(tokens.shape))
        vectors = self.embedding(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[None, :, None]
        logits = self.output(vectors[:, -num_logits:])
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, -num_logits:], reduction="none")

    def count_flops_per_token(self, length: int) -> float:
        return 3.0 * length

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def loaded(
    model: nn.Module, *, eod_mask_loss: bool = False, window: int | None = None, **position: object
) -> SimpleNamespace:
    """Return the attributes of a loaded model that `evaluate` needs; `window` as for `load_model`."""
    config = SimpleNamespace(
        model=ModelOptions(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=TRAIN_LENGTH),
        position=PositionOptions(**{"pos_emb": "rotary", **position}),
        data=SimpleNamespace(eod_mask_loss=eod_mask_loss),
        training=SimpleNamespace(seed=7),
    )
    rebuilt = config.position if window is None else config.position.replace(attention_window=window)
    return SimpleNamespace(model=model.eval(), run=SimpleNamespace(config=config), position=rebuilt)


def tiny_gpt(**position: object) -> nn.Module:
    """Build a real GPT with random weights."""
    options = ModelOptions(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=TRAIN_LENGTH)
    return build_model(options, PositionOptions(**position), VOCABULARY, seed=3).eval()


@pytest.fixture
def running_mean() -> RunningMean:
    return RunningMean().eval()


def scored(
    loaded: SimpleNamespace,
    stream: np.ndarray,
    options: EvaluationOptions,
    vocabulary: Vocabulary = BYTES,
    **scoring: Any,
) -> list[Record]:
    """Return a model's records for the plan of the given options."""
    plan = plan_from_options(options, [TRAIN_LENGTH], len(stream))
    text = EvalText(stream, "a text", vocabulary)
    measures, smoothing = options.measures or ("perplexity",), options.smoothing
    return evaluate_perplexity(loaded, text, plan, ScoringContext(**scoring), measures, smoothing=smoothing)  # type: ignore[arg-type]
