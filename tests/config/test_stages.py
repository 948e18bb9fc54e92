"""List of stages: its meaning under each key name, and one-line errors that name stage and key."""

import pytest

from megatron.config.execution import build_stages
from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import UserError

SMALL = [
    "num_layers=1", "hidden_size=8", "num_attention_heads=2", "seq_length=16", "pos_emb=rotary", "device=cpu",
    "train_data_paths=[a, b]", "train_batch_size=32", "train_iters=100", "save=run",
]  # fmt: skip


def problem(*overrides: str) -> str:
    try:
        config = load_config([], [*SMALL, *overrides]).config
    except UserError as error:
        return str(error)
    with pytest.raises(UserError) as caught:
        resolve_run(config, LocalHardware.detect())
    return str(caught.value)


def test_other_names_mean_the_same_in_a_stage() -> None:
    ours = "stages=[{until: 9}, {seq_length: 32, pos_emb_options.base: 5e5, optimizer: {params: {lr: 1e-4}}}]"
    theirs = "stages=[{until: 9}, {seq-length: 32, rotary_emb_base: 5e5, lr: 1e-4}]"
    one, other = (load_config([], [*SMALL, text]) for text in (ours, theirs))
    assert one.config == other.config
    assert "command line, stage 2: lr is optimizer.params.lr here" in other.notes
    _, second = build_stages(resolve_run(other.config, LocalHardware.detect()).config)
    assert (second.config.model.seq_length, second.config.training.train_batch_size) == (32, 16)
    assert second.config.position.pos_emb_options == {"base": 5e5}
    assert load_config([], [*SMALL, ours, f"stages={one.config.training.stages}"]).config == one.config


def test_a_stage_can_set_its_batch_size() -> None:
    batch = "{until: 20, seq_length: 64, train_batch_size: 24}"
    micro = "{seq_length: 32, train_micro_batch_size_per_gpu: 2}"
    text = f"stages=[{{until: 9}}, {batch}, {micro}]"
    stages = build_stages(resolve_run(load_config([], [*SMALL, text]).config, LocalHardware.detect()).config)
    sizes = [
        (t.train_batch_size, t.train_micro_batch_size_per_gpu, t.gradient_accumulation_steps)
        for t in (stage.config.training for stage in stages)
    ]
    assert sizes == [(32, 32, 1), (24, 8, 3), (48, 2, 24)]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ("3", "command line: stages is 3; it must be a list of mappings"),
        ("[{until: 9, seq_length: 32}]", "there is only one stage"),
        ("[{}, {seq_length: 32}]", "stage 1: its end is missing; set until (a step) or until_tokens"),
        ("[{until: 9, until_tokens: 9}, {}]", "stage 1: until and until_tokens exclude each other"),
        ("[{until: 2.5}, {}]", "stage 1: until is 2.5; it must be an integer, at least 1"),
        ("[{until: 9}, {until: 9}, {}]", "stage 2: until 9 is not after the end of an earlier stage, 9"),
        ("[{until: 9}, {num_layers: 2}]", "stage 2: num_layers: a stage cannot change it; it can change seq_length, "),
        ("[{until: 9}, {context_parallel_size: 2}]", "stage 2: context_parallel_size: a stage cannot change it"),
        ("[{until: 9}, {seed: 2}]", "stage 2: seed: decides the order of the data"),
        ("[{until: 9}, {precision: bf16}]", "stage 2: precision: belongs to the run"),
        ("[{until:9}]", "unknown key 'until:9'; YAML needs a space after the colon: {until: 9}"),
        ("[{until: 9}, {seq_len: 32}]", "command line, stage 2: unknown key 'seq_len'; did you mean seq_length?"),
        ("[{until: 9}, {lr: fast}]", "stage 2: optimizer.params.lr is 'fast'; it must be a number"),
        ("[{until: 9}, {min_lr: 3}]", "stage 2: min_lr 3.0 is greater than optimizer.params.lr"),
        ("[{until: 9}, {train_data_weights: [1]}]", "stage 2: train_data_weights has 1 value for 2 paths"),
        ("[{until: 9}, {seq_length: 24}]", "seq_length 16 does not divide 24, the longest of the stages"),
        ("[{until: 9}, {seq_length: 1024}]", "stage 2: seq_length 1024: a batch of 32 × 16 = 512 tokens is not a"),
        ("[{until: 9}, {lr_decay_style: infinite}]", "stage 2: lr_decay_style infinite needs constant_lr"),
        ("[{until: 9}, {attention_backend: triton, pos_emb_options.bass: 1}]", "has no option 'bass'"),
    ],
)  # fmt: skip
def test_rejected(stages: str, message: str) -> None:
    assert message in problem(f"stages={stages}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pos_emb=learned"], "stage 2: seq_length 32 is longer than the learned table, 16, the first stage's"),
        (["pos_emb=learned", "max_position_embeddings=16"], "seq_length 32 is longer than the learned table"),
        (["save=null"], "stages need save"),
        (
            ["context_parallel_size=4", "seq_length=24"],
            "stage 2: seq_length 12 is not divisible by 2 × context",
        ),
    ],
)
def test_rejected_with_other_keys(overrides: list[str], message: str) -> None:
    length = 12 if "seq_length=24" in overrides else 32
    assert message in problem(f"stages=[{{until: 9}}, {{seq_length: {length}}}]", *overrides)


def test_options_of_encodings_with_parameters_cannot_change() -> None:
    text = problem("pos_emb=kerple_log", "stages=[{until: 9}, {pos_emb_options.r1_start: 3.0}]")
    assert "stage 2: pos_emb_options: kerple_log has parameters that depend on its options" in text
    load_config([], [*SMALL, "pos_emb=learned", "max_position_embeddings=32", "stages=[{until: 9}, {seq_length: 32}]"])
