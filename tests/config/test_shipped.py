"""Every shipped configuration loads, alone or on top of a model; model files have the sizes in their names."""

from collections import Counter
from pathlib import Path

import pytest
from models import build_model

from megatron.config import method_names
from megatron.config.execution import resolve_batch_sizes
from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.position import catalog
from megatron.utils.errors import UserError
from megatron.utils.project import SHIPPED_CONFIGS

MODELS = sorted((SHIPPED_CONFIGS / "model").glob("*.yml"))
OVERLAYS = sorted([*(SHIPPED_CONFIGS / "position").glob("*.yml"), *(SHIPPED_CONFIGS / "cluster").glob("*.yml")])
GPT2_VOCABULARY = 50257
# With GPT-2's vocabulary padded to 50,304: 12 L h² + 13 L h + 2 h + 2·50,304·h, computed by hand.
PARAMETERS = {
    "125M": 162_322_944,
    "162M": 162_322_944,
    "350M": 405_334_016,
    "1-3B": 1_414_647_808,
    "2-7B": 2_775_208_960,
    "6-7B": 6_856_253_440,
}
# Layers, width, heads, length, batch, steps, learning rate and precision from the papers' tables.
PAPERS = {
    "125M": (12, 768, 12, 512, 256, 50_000, 6e-4, "fp16"),
    "350M": (24, 1024, 16, 512, 256, 50_000, 3e-4, "fp16"),
    "162M": (12, 12 * 64, 12, 512, 32, 50_000, 6e-4, "bf16"),
    "1-3B": (24, 16 * 128, 16, 512, 32, 150_000, 2e-4, "fp16"),
}


def by_shapes(config: Config) -> int:
    """Count the parameters of a GPT-NeoX model, weight by weight."""
    model = config.model
    h, ff = model.hidden_size, model.intermediate_size or 4 * model.hidden_size
    multiple = model.make_vocab_size_divisible_by
    vocabulary = (GPT2_VOCABULARY + multiple - 1) // multiple * multiple
    layer = [
        *(h, h),  # layer norm before attention: weight, bias
        *(3 * h * h, 3 * h),  # query, key and value
        *(h * h, h),  # attention output
        *(h, h),  # layer norm before the feed-forward layer
        *(h * ff, ff, ff * h, h),  # feed-forward
    ]
    return model.num_layers * sum(layer) + 2 * h + vocabulary * h * (2 if model.no_weight_tying else 1)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_model_alone(path: Path):
    loaded = load_config([path])
    assert loaded.notes == ()


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_batch_fits_machines_of_eight_gpus(path: Path):
    config = load_config([path]).config
    for gpus in (1, 2, 4, 8):
        sizes = resolve_batch_sizes(config, gpus)
        assert config.training.train_batch_size in (None, sizes["train_batch_size"])


@pytest.mark.parametrize("path", sorted((SHIPPED_CONFIGS / "finetune").glob("*.yml")), ids=lambda path: path.stem)
def test_finetuning_of_a_model(path: Path):
    config = load_config(["125M", "rotary", path], ["load=runs/source"]).config
    assert config.checkpoint.finetune
    assert config.position.score_processor_options["zero_init"]
    with pytest.raises(UserError, match="finetune: true needs load"):
        load_config(["125M", "rotary", path])


@pytest.mark.parametrize("path", OVERLAYS, ids=lambda path: path.stem)
def test_overlay_on_a_model(path: Path):
    length = ["a100_2k"] if path.stem.startswith("slurm_") else []  # sets the batch of each GPU
    for model in ("125M", "162M"):
        load_config([model, *length, path])


@pytest.mark.parametrize("path", sorted((SHIPPED_CONFIGS / "position").glob("*.yml")), ids=lambda path: path.stem)
def test_processors_compose_with_every_encoding(path: Path):
    position = load_config(["125M", path]).config.position
    if position.score_processor == "none":
        for processor in ("dape", "cdape"):
            both = load_config(["125M", path, processor]).config.position
            assert (both.pos_emb, both.score_processor) == (position.pos_emb, processor)


def test_every_method_has_an_overlay():
    stems = {path.stem for path in (SHIPPED_CONFIGS / "position").glob("*.yml")}
    assert stems >= set(catalog.list_encodings()) | set(method_names.list_processor_values())
    for name in catalog.list_encodings():
        assert load_config(["125M", f"position/{name}"]).config.position.pos_emb == name
    for name in catalog.list_processors():
        assert load_config(["125M", f"position/{name}"]).config.position.score_processor == name
    for name in catalog.list_temperatures():
        assert load_config(["125M", "cdape_kerple_log", name]).config.position.attention_temperature == name


def test_names_do_not_collide_across_folders():
    counts = Counter(path.stem for path in SHIPPED_CONFIGS.rglob("*.y*ml"))
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize(("name", "facts"), PAPERS.items())
def test_papers_tables(name, facts):
    config = load_config([name]).config
    model, training = config.model, config.training
    found = (model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length)
    found += (training.train_batch_size, training.train_iters, config.optimizer.optimizer.params.lr, training.precision)
    assert found == facts


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_counts(name):
    assert by_shapes(load_config([name]).config) == PARAMETERS[name]


def test_parameter_counts_match_the_models():
    """The formula matches every model file, built on torch's meta device."""
    assert {path.stem for path in MODELS} == set(PARAMETERS)
    for name in PARAMETERS:
        config = load_config([name, "none"]).config
        model = build_model(config.model, config.position, GPT2_VOCABULARY, device="meta")
        assert model.num_parameters() == PARAMETERS[name], name
