"""A tiny causal model whose losses a plain loop can compute, real tiny GPTs, and records made up by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megatron.evaluation.records import Record
from megatron.model.build import build_model
from megatron.model.options import ModelOptions, PositionOptions

TRAIN_LENGTH = 8
VOCABULARY = 19


class RunningMean(nn.Module):
    """Logits from the mean embedding of all tokens so far: causal, and different for every length of context."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.output = nn.Linear(6, VOCABULARY)
        self.batches: list[tuple[int, int]] = []
        self.max_length: int | None = None

    def forward(self, tokens: Tensor, labels: Tensor, last: int) -> Tensor:
        self.batches.append(tuple(tokens.shape))
        vectors = self.embedding(tokens).cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[None, :, None]
        logits = self.output(vectors[:, -last:])
        return nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, -last:], reduction="none")

    def flops_per_token(self, length: int) -> float:
        return 3.0 * length

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


def loaded(
    model: nn.Module, *, eod_mask_loss: bool = False, window: int | None = None, **position: object
) -> SimpleNamespace:
    """What `evaluate` needs of a loaded model; `window` as `load_model` takes it."""
    config = SimpleNamespace(
        model=ModelOptions(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=TRAIN_LENGTH),
        position=PositionOptions(**{"pos_emb": "rotary", **position}),
        data=SimpleNamespace(eod_mask_loss=eod_mask_loss),
        training=SimpleNamespace(seed=7),
    )
    rebuilt = config.position if window is None else config.position.model_copy(update={"attention_window": window})
    return SimpleNamespace(model=model.eval(), config=config, position=rebuilt)


def tiny_gpt(**position: object) -> nn.Module:
    """A real GPT with random weights."""
    options = ModelOptions(num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=TRAIN_LENGTH)
    return build_model(options, PositionOptions(**position), VOCABULARY, seed=3).eval()


@pytest.fixture
def running_mean() -> RunningMean:
    return RunningMean().eval()


def record(method: str, length: int, perplexity: float, seed: int = 1, **more: object) -> Record:
    """A record of a model trained at 64 tokens."""
    known = {"train_length": 64, "protocol": "last", "tokens": 4096, "run": f"runs/{method}/{seed}"}
    return Record(
        **{**known, "method": method, "length": length, "perplexity": perplexity, "seed": seed, **more},
        nll=math.log(perplexity),
    )


@pytest.fixture
def story() -> list[Record]:
    """Three methods at three lengths: one explodes, one is flat, one is flat and lower."""
    curves = {"rotary": (5.25, 12.5, 29.75), "kerple_log": (5.5, 5.45, 5.43), "cdape": (4.96, 4.9, 4.87)}
    return [
        record(method, length, perplexity, stderr=0.03)
        for method, curve in curves.items()
        for length, perplexity in zip((64, 512, 2048), curve, strict=True)
    ]
