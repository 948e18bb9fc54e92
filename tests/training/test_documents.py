"""Document masking from corpus to perplexity: each document gives the same results as alone."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_runs import losses, records, same_weights, tiny_config

from megatron.checkpoint.load_model import load_model
from megatron.data.datasets import SampleOrder, build_datasets, load_token_stream
from megatron.distributed.process_groups import ProcessGroups
from megatron.evaluation.run import evaluate_runs
from megatron.model.gpt import GPT
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.records import read_records
from megatron.training.train import train
from megatron.utils.errors import UserError
from tools.tolerances import compute_tolerance, count_gpt_sums

END = 60
"""End-of-document token of the corpus."""
ROUNDING = 4 * compute_tolerance(*count_gpt_sums(32, layers=2))  # relative, for losses of about 4 nats
FROZEN = {"optimizer": {"params": {"lr": 1e-30}}, "eval_interval": 2, "attention_mask": "document"}
"""Settings with which steps change nothing, so that the model of every step equals the saved one."""
CASES: dict[str, dict[str, Any]] = {
    "cdape on kerple_log in row blocks, in a window, recomputed": {
        "pos_emb": "kerple_log", "score_processor": "cdape", "attention_backend": "chunked", "attention_window": 9,
        "checkpoint_activations": True,
    },
    "dape on fire, one by one": {"pos_emb": "fire", "score_processor": "dape"},
    "learned": {"pos_emb": "learned", "max_position_embeddings": 32},
}  # fmt: skip


def score_alone(gpt: GPT, tokens: np.ndarray) -> list[float]:
    """Return losses of all tokens except the first, each from the earlier tokens of its own document in the row."""
    found: list[float] = []
    start = 0
    for place, token in enumerate(tokens[:-1].tolist()):
        if token == END or place == len(tokens) - 2:
            row = torch.tensor(tokens[start : place + 2].astype(np.int64))[None]
            with torch.inference_mode():
                found += gpt(row[:, :-1], labels=row[:, 1:])[0].tolist()
            start = place + 1
    return found


@pytest.mark.parametrize("method", CASES.values(), ids=CASES)
def test_losses_match_separate_documents(corpus: Path, tmp_path: Path, method: dict[str, Any]) -> None:
    config = tiny_config(corpus, tmp_path, **FROZEN, **method, test_data_paths=[str(corpus / "test_text_document")])
    out = io.StringIO()
    train(config, Console(file=out, width=200))
    loaded = load_model(tmp_path)
    gpt = loaded.model.double()
    assert gpt.end_of_document == END
    gpt.end_of_document = None
    order = SampleOrder(seed=config.training.seed, train_samples=16, valid_samples=8)
    data = build_datasets(config.data, order, seq_length=16, cache=None, groups=ProcessGroups())
    share = np.mean([bool((data.train[number]["tokens"][:-1] == END).any()) for number in range(16)])
    assert 0.1 < share < 0.9

    def mean_of(split: Any, first: int, last: int) -> float:
        rows = [split[number] for number in range(first, last)]
        return float(np.mean([score_alone(gpt, np.append(row["tokens"], row["labels"][-1])) for row in rows]))

    expected = [mean_of(data.train, 4 * step, 4 * step + 4) for step in range(4)]
    assert losses(tmp_path) == pytest.approx(expected, rel=ROUNDING)
    assert records(tmp_path, "valid")[4]["loss"] == pytest.approx(mean_of(data.valid, 0, 8), rel=ROUNDING)

    asked = EvaluationOptions(lengths=[8, 24], targets=[8], windows=6)
    found = evaluate_runs([tmp_path], asked, console=Console(file=out, width=200))
    stream = load_token_stream(config.data, "test")
    assert found[0].method.endswith("attention_mask=document)")
    for record in found:
        ends = [24 + (len(stream) - 1 - 24) * number // 5 for number in range(6)]
        scored = [score_alone(gpt, np.asarray(stream[end - record.length : end + 1]))[-8:] for end in ends]
        assert record.nll == pytest.approx(np.mean(scored), rel=ROUNDING)
    seen = []  # on the last eight tokens of windows of 24
    for end in ends:
        for place in range(end - 8, end):
            row = np.asarray(stream[end - 24 : place + 1]).tolist()
            seen.append(len(row) if END not in row[:-1] else row[:-1][::-1].index(END) + 1)
    assert f"length 24 a scored token sees {np.mean(seen):,.0f} tokens of its own" in out.getvalue()
    across = asked.replace(attention_mask="causal")
    for record in evaluate_runs([tmp_path], across, console=Console(file=out, width=200)):
        windows = torch.tensor(np.stack([stream[end - record.length : end + 1] for end in ends]).astype(np.int64))
        with torch.inference_mode():
            expected = gpt(windows[:, :-1], labels=windows[:, 1:], num_logits=8)
        assert record.nll == pytest.approx(float(expected.mean()), rel=ROUNDING)
        assert record.position.endswith("attention_mask=causal at evaluation)")
    assert "attention crosses documents, unlike in training" in out.getvalue()
    assert len(read_records(tmp_path / "results.json")) == 4, "neither replaces the other"
    share = data.crossing_fraction
    assert (
        f"attention_mask document: {share:.0%} of rows contain several documents; each attends only to itself"
        in out.getvalue()
    )


def test_a_run_with_masked_documents_resumes_and_evaluates_with_any_mask(corpus: Path, tmp_path: Path) -> None:
    keys = {"attention_mask": "document", "score_processor": "cdape", "lr_decay_iters": 4}
    train(tiny_config(corpus, tmp_path / "whole", **keys))
    train(tiny_config(corpus, tmp_path / "parts", **keys, train_iters=2))
    train(tiny_config(corpus, tmp_path / "parts", **keys, load=str(tmp_path / "parts")))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert same_weights(tmp_path / "parts", tmp_path / "whole")
    test_data = {"test_data_paths": [str(corpus / "test_text_document")]}
    config = tiny_config(corpus, tmp_path / "across", **{**keys, "attention_mask": "causal", **test_data})
    train(config)
    assert losses(tmp_path / "across") != losses(tmp_path / "whole")
    gpt, stream = load_model(tmp_path / "across").model.double(), load_token_stream(config.data, "test")
    assert gpt.end_of_document is None
    asked = EvaluationOptions(lengths=[24], targets=[8], windows=3, attention_mask="document")
    (apart,) = evaluate_runs([tmp_path / "across"], asked)
    ends = [24 + (len(stream) - 1 - 24) * number // 2 for number in range(3)]
    expected = [score_alone(gpt, np.asarray(stream[end - 24 : end + 1]))[-8:] for end in ends]
    assert apart.nll == pytest.approx(np.mean(expected), rel=ROUNDING)
    assert apart.position == "cdape+kerple_log(attention_mask=document at evaluation)"


def test_zero_3_rejects_methods_computed_per_document(corpus: Path) -> None:
    """ZeRO 3 rejects methods computed document by document, because ranks would gather parameters different numbers of
    times.
    """
    keys = {"attention_mask": "document", "zero_optimization": {"stage": 3}, "pos_emb": "fire"}
    with pytest.raises(UserError, match=r"attention_mask: document: pos_emb fire .*stage 3 does not support"):
        train(tiny_config(corpus, **keys))


def test_steps_and_texts_without_a_scored_token_have_no_loss(tmp_path: Path) -> None:
    """Steps and texts without a scored token have no loss: a text of end tokens only, whose loss is masked."""
    from megatron.data.core_datasets import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path / 'ends'}.bin", dtype=np.int32)
    for _ in range(20):
        builder.add_document(np.full(20, 256, np.int32), [20])
    builder.finalize(f"{tmp_path / 'ends'}.idx")
    text = {f"{split}_data_paths": [str(tmp_path / "ends")] for split in ("train", "valid", "test")}
    config = tiny_config(
        tmp_path, tmp_path / "run", tokenizer_type="bytes", eod_mask_loss=True, eval_interval=2, **text
    )
    out = io.StringIO()
    result = train(config, Console(file=out, width=200))
    output = out.getvalue()
    assert (result.step, result.loss, result.valid_loss, result.test_loss) == (4, None, None, None)
    assert "step 1: no token of its batch is scored, so it has no loss, and its gradient is zero" in output
    assert "step 2: no token of valid is scored, so it has no loss" in output
    assert "step 4: no token of test is scored, so it has no loss" in output
    assert "0.0000" not in output
