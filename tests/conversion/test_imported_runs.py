"""Imported runs support evaluation and finetuning; unsupported operations raise clear errors."""

import json
from pathlib import Path

import pytest
import torch
from published import MODELS, logits_of, written
from tiny_runs import records, tiny_config

from megatron.checkpoint.load_model import load_model
from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.conversion.import_model import import_model
from megatron.distributed.hardware import LocalHardware
from megatron.evaluation.run import evaluate_runs
from megatron.options.evaluation import EvaluationOptions
from megatron.training.resolve_run import resolve_run
from megatron.training.train import train
from megatron.utils.errors import UserError


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Imported Llama with the corpus's tokens."""
    folder = tmp_path_factory.mktemp("imported")
    written("llama", folder / "source")
    options = {"tokenizer": "HFTokenizer", "vocab_file": corpus / "tokenizer.json"}
    return import_model(folder / "source", folder / "run", **options)[0].run


def config_of(run: Path, corpus: Path, save: Path, **keys: object) -> Config:
    """Return its own keys together with those of a training run."""
    own = load_config([run / "config.yml"]).config
    sections = {**own.model.model_dump(exclude_unset=True), **own.position.model_dump(exclude_unset=True)}
    chosen = {"train_iters": 2, "load": str(run), "finetune": True, "eval_interval": 1, **keys}
    return tiny_config(corpus, save, **{**sections, "pos_emb_options": {}, **chosen})


def test_an_imported_configuration_lacks_training_keys(run: Path) -> None:
    config = load_config([run / "config.yml"]).config
    assert config.training.train_iters == 0
    with pytest.raises(UserError, match="no data to train on"):
        resolve_run(config, LocalHardware(0, 2))
    with pytest.raises(
        UserError, match=r"train_iters, the number of optimizer steps, is missing; it must be at least 1"
    ):
        resolve_run(config.replace(train_data_paths=["x"]), LocalHardware(0, 2))


def test_it_is_evaluated(run: Path, corpus: Path) -> None:
    options = EvaluationOptions(data=str(corpus), lengths=[16, 48], device="cpu")
    found = evaluate_runs([run], options)
    assert [record.length for record in found] == [16, 48]
    assert all(record.value > 1 for record in found)


@pytest.mark.parametrize("processor", ["none", "cdape"])
def test_finetuning_starts_from_the_imported_model(processor: str, run: Path, corpus: Path, tmp_path: Path) -> None:
    """Finetuning starts with the imported model's loss, also with CDAPE at zero effect and at another length."""
    keys = {"score_processor": processor, "score_processor_options": {"zero_init": True}} if processor != "none" else {}
    config = config_of(run, corpus, tmp_path / "tuned", seq_length=24, **keys)
    train(config)
    first = records(tmp_path / "tuned")[1]["loss"]
    plain = tmp_path / "plain"
    train(config_of(run, corpus, plain, seq_length=24, train_iters=1))
    assert first == pytest.approx(records(plain)[1]["loss"], rel=1e-6)
    tuned, source = (load_model(path).model for path in (tmp_path / "tuned", run))
    tokens = torch.randint(60, (1, 16))
    with torch.no_grad():
        assert not torch.equal(tuned(tokens), source(tokens))


def test_an_imported_model_has_no_training_to_resume(run: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"contains only weights \(an imported model\).*finetune=true"):
        train(config_of(run, corpus, tmp_path / "tuned", finetune=False))


def test_the_first_loss_is_the_source_s(corpus: Path, tmp_path: Path) -> None:
    """The first validation loss equals the cross entropy of transformers' logits on the same sequences."""
    from megatron.data.datasets import load_token_stream

    assert "pythia" in MODELS
    source = written("pythia", tmp_path / "source")
    options = {"tokenizer": "HFTokenizer", "vocab_file": corpus / "tokenizer.json"}
    run = import_model(tmp_path / "source", tmp_path / "run", **options)[0].run
    found = evaluate_runs(
        [run], EvaluationOptions(data=str(corpus), lengths=[32], protocol="nonoverlapping", device="cpu"), output=None
    )
    own = tiny_config(corpus, None, test_data_paths=[str(corpus / "test_text_document")])
    stream = torch.as_tensor(load_token_stream(own.data, "test").astype("int64"))
    windows = stream[: (len(stream) - 1) // 32 * 32 + 1]
    inputs, labels = windows[:-1].view(-1, 32), windows[1:].view(-1, 32)
    loss = torch.nn.functional.cross_entropy(logits_of(source, inputs).double().flatten(0, 1), labels.flatten())
    (record,) = found
    assert record.value == pytest.approx(float(loss.exp()), rel=1e-5), json.dumps(str(record))
