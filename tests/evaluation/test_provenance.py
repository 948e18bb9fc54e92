"""Method names show differences from the defaults, and never hide a difference between runs."""

import pytest

from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.evaluation.provenance import distinguish_names, format_method_name, list_method_names
from megatron.options.position import PositionOptions

BASE = ["num_layers=2", "hidden_size=16", "num_attention_heads=2", "seq_length=8", "train_iters=5"]


def config(*overrides: str) -> Config:
    return load_config([], [*BASE, *overrides]).config


def name_runs(configs: list[Config], runs: list[str], **overrides: object) -> list[str]:
    return distinguish_names(list_method_names(configs, **overrides), configs, runs)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"pos_emb": "rotary"}, "rotary"),
        ({"pos_emb": "kerple_log", "score_processor": "cdape"}, "cdape+kerple_log"),
        ({"pos_emb": "none", "score_processor": "dape"}, "dape+none"),
        (
            {"pos_emb": "alibi", "score_processor": "cdape", "score_processor_options": {"width": 16}},
            "cdape(width=16)+alibi",
        ),
        (
            {"pos_emb": "t5", "pos_emb_per_layer": True, "pos_emb_options": {"num_buckets": 16}},
            "t5(num_buckets=16, per_layer)",
        ),
        ({"pos_emb": "rotary", "attention_window": 64}, "rotary(window=64)"),
        (
            {"pos_emb": "alibi", "attention_temperature": "ssmax", "attention_temperature_options": {"s": 0.5}},
            "alibi(temperature=ssmax(s=0.5))",
        ),
        (
            {"pos_emb": "alibi", "randomized_positions": 2048, "score_processor": "dape"},
            "dape+alibi(randomized=2048)",
        ),
    ],
)
def test_method_name(options: dict, name: str) -> None:
    assert format_method_name(PositionOptions(**options)) == name


def test_a_window_of_the_evaluation_alone_is_not_one_of_the_training() -> None:
    everything = PositionOptions(pos_emb="rotary")
    windowed = PositionOptions(pos_emb="rotary", attention_window=64)
    assert (
        format_method_name(everything, windowed)
        == format_method_name(PositionOptions(pos_emb="rotary", attention_window=32), windowed)
        == "rotary(window=64 at evaluation)"
    )
    assert format_method_name(windowed, windowed) == format_method_name(windowed) == "rotary(window=64)"
    assert format_method_name(windowed, everything) == "rotary(window=none at evaluation)"
    trained = [config("pos_emb=rotary"), config("pos_emb=rotary", "attention_window=64", "seed=2")]
    assert len(set(name_runs(trained, ["a", "b"], window=64))) == 2
    # Trained with different windows and scored with one, runs never share a row.
    trained = [config("pos_emb=rotary"), config("pos_emb=rotary", "attention_window=32", "seed=2")]
    names = name_runs(trained, ["a", "b"], window=4)
    assert names == [f"rotary(window=4 at evaluation) [{run}]" for run in "ab"]


def test_a_temperature_of_the_evaluation_alone_is_not_one_of_the_training() -> None:
    plain, logn = config("pos_emb=rotary"), config("pos_emb=rotary", "attention_temperature=logn", "seed=2")
    assert name_runs([plain, logn], ["a", "b"]) == ["rotary", "rotary(temperature=logn)"]
    assert name_runs([plain, logn], ["a", "b"], attention_temperature="logn") == [
        "rotary(temperature=logn at evaluation)", "rotary(temperature=logn)"
    ]  # fmt: skip
    assert name_runs([plain, logn], ["a", "b"], attention_temperature="none") == [
        "rotary", "rotary(temperature=none at evaluation)"
    ]  # fmt: skip
    assert name_runs([plain], ["a"], attention_temperature="llama4:floor_scale=16", window=3) == [
        "rotary(window=3 at evaluation, temperature=llama4(floor_scale=16) at evaluation)"
    ]


def test_overridden_frequencies_apply_to_the_evaluation_only() -> None:
    plain, hope = config("pos_emb=rotary"), config("pos_emb=rotary", "pos_emb_options={scaling: hope}", "seed=2")
    assert name_runs([plain, hope], ["a", "b"]) == ["rotary", "rotary(scaling=hope)"]
    for rope, named in {
        "pi:8": "pi:8", "linear:8": "pi:8", "ntk:2.5": "ntk:2.5", "dynamic": "dynamic", "dynamic:2": "dynamic:2",
        "yarn:factor=4": "yarn:4", "yarn:4,attention_factor=1,beta_fast=16": "yarn:4,beta_fast=16,attention_factor=1",
    }.items():  # fmt: skip
        assert name_runs([plain], ["a"], rope=rope) == [f"rotary(rope={named} at evaluation)"]
    layers = config("pos_emb=[rotary, none]")
    assert name_runs([layers], ["a"], rope="pi:4", window=3) == [
        "rotary(window=3 at evaluation, rope=pi:4 at evaluation) | none(window=3 at evaluation)"
    ]


def test_seeds_of_one_method_share_a_name() -> None:
    runs = [config("pos_emb=rotary", f"seed={seed}", f"save=runs/{seed}") for seed in (1, 2)]
    assert name_runs(runs, ["a", "b"]) == ["rotary", "rotary"]


def test_runs_that_differ_do_not_share_a_name() -> None:
    runs = [config("pos_emb=rotary"), config("pos_emb=rotary", "optimizer.params.lr=1e-2"), config("pos_emb=alibi")]
    assert name_runs(runs, ["a", "b", "c"]) == ["rotary [a]", "rotary [b]", "alibi"]


def test_a_repeated_seed_is_not_a_second_one() -> None:
    assert name_runs([config("pos_emb=t5")] * 2, ["a", "b"]) == ["t5 [a]", "t5 [b]"]
