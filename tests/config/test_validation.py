"""Checks across sections, and batch arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.execution import resolve_config, resolve_mesh_shape
from megatron.config.load import load_config
from megatron.distributed.mesh import ParallelSizes
from megatron.utils.errors import UserError

SMALL = ["num_layers=2", "hidden_size=24", "num_attention_heads=3", "seq_length=17", "train_iters=5"]


def problem(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config([], [*SMALL, *overrides])
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["hidden_size=25"], "hidden_size 25 is not divisible by num_attention_heads 3"),
        (["gpt_j_tied=true"], "needs gpt_j_residual"),
        (["checkpoint_num_layers=3"], "checkpoint_num_layers 3 is more than num_layers 2"),
        (["pos_emb=rotory"], "pos_emb rotory is not available; did you mean rotary?"),
        (["score_processor=cdap"], "did you mean cdape?"),
        (["pos_emb=alibi", "pos_emb_options.slope=1"], "pos_emb alibi has no option 'slope'; it takes no options"),
        (["pos_emb=t5", "pos_emb_options.buckets=1"], "did you mean num_buckets?"),
        (["score_processor=dape", "score_processor_options.kernel_size=3"], "dape has no option 'kernel_size'"),
        (
            ["pos_emb=alibi", "attention_backend=sdpa"],
            "'sdpa': it cannot add a position bias to the scores",
        ),
        (["pos_emb=none", "score_processor=cdape", "attention_backend=sdpa"], "'sdpa': it cannot process scores"),
        (["pos_emb=fire", "attention_backend=flex"], "'flex': it cannot compute a bias that is not a function of"),
        (
            ["pos_emb=learned", "attention_backend=native"],
            "it needs a score processor (pos_emb learned); use auto, sdpa, eager or chunked",
        ),
        (
            ["pos_emb=[none, alibi]", "attention_backend=native"],
            "it needs a score processor (pos_emb none); use auto, eager or chunked",
        ),
        (["pos_emb=cope", "attention_backend=triton"], "contextual terms (pos_emb cope); use auto, eager"),
        (["score_processor_options.width=3"], "score_processor none has no option 'width'"),
        (["pos_emb=learned", "max_position_embeddings=16"], "seq_length 17 is longer than the learned table"),
        (["min_lr=1e-3", "lr=1e-4"], "min_lr 0.001 is greater than optimizer.params.lr 0.0001"),
        (["optimizer.params.betas=[0.9, 1.0]"], "each must be in [0, 1)"),
        (["data_path=a", "train_data_paths=[b]"], "train_data_paths and data_path exclude each other"),
        (["data_path=a", "test_data_paths=[b]"], "test_data_paths and data_path exclude each other"),
        (["train_data_paths=[a, b, a]"], "names a more than once"),
        (["train_data_paths=[a, b]", "train_data_weights=[1]"], "1 value for 2 paths"),
        (["valid_data_paths=[a, b]", "valid_data_weights=[1, -1]"], "each must be greater than 0"),
        (["valid_data_paths=[a]", "valid_data_weights=[0]"], "each must be greater than 0"),
        (["train_data_paths=[a, b]", "train_data_weights=[1, 0]"], "[1.0, 0.0]; each must be greater than 0"),
        (["split='969,x'"], "split is '969,x'"),
        (["split='0,1,1'"], "split is '0,1,1', which leaves nothing to train on"),
        (["split='1,2,3,4'"], "split is"),
        (["split='nan,1'"], "split is"),
        (["vocab_file=v"], "vocab_file is given without tokenizer_type"),
        (["merge_file=m"], "merge_file is given without tokenizer_type"),
        (["pos_emb=alibi", "randomized_positions=16"], "randomized_positions 16 is less than seq_length 17"),
        (["pos_emb=learned", "pos_emb_per_layer=true"], "learned adds to the token embeddings, which are not per"),
        (
            ["stages=[{until: 3}, {until: 4}]", "train_iters=5"],
            "command line: stages: the last stage ends at step 4, but train_iters is 5; remove one",
        ),
        (["finetune=true"], "finetune: true needs load"),
        (["rollback=true"], "command line: rollback: true needs load"),
        (["rollback=true", "finetune=true", "load=runs/a"], "finetune: true starts a new one; remove one of them"),
        (["train_batch_size=10", "train_micro_batch_size_per_gpu=4"], "train_batch_size 10 is not divisible by"),
        (
            ["train_batch_size=12", "train_micro_batch_size_per_gpu=4", "num_gpus=2"],
            "train_batch_size 12 is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 1 × 2 ranks = 8",
        ),
        (
            ["train_batch_size=8", "train_micro_batch_size_per_gpu=4", "gradient_accumulation_steps=3", "device=cpu"],
            "train_batch_size 8 is not train_micro_batch_size_per_gpu 4 × gradient_accumulation_steps 3 × 1 rank = 12",
        ),
    ],
)
def test_rejected(overrides, message):
    line = problem(*overrides)
    assert message in line
    assert line.startswith("command line: ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["pos_emb=rotary", "max_position_embeddings=3"],  # no table, no limit
        ["pos_emb=learned", "max_position_embeddings=17"],
        ["score_processor=cdape", "score_processor_options.kernel_size=1"],
        ["split='1'"],
        ["split='969, 30, 1'"],
        ["precision=fp16"],  # a GPU is only required when the run starts
        ["tokenizer_type=HFTokenizer"],  # the data may define the tokenizer
        ["split='969/30/1'"],
        ["train_data_paths=[a, b]", "train_data_weights=[1, 0.001]"],
        ["distributed_backend=nccl", "device=cpu"],  # stock files say nccl; the launcher uses gloo and reports it
    ],
)
def test_accepted(overrides):
    load_config([], [*SMALL, *overrides])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["micro", "steps", "batch"]))
def test_two_batch_sizes_determine_the_third(micro, steps, ranks, hidden):
    given = {
        "micro": f"train_micro_batch_size_per_gpu={micro}",
        "steps": f"gradient_accumulation_steps={steps}",
        "batch": f"train_batch_size={micro * steps * ranks}",
    }
    config = load_config([], [*SMALL, *(text for name, text in given.items() if name != hidden)]).config
    training = resolve_config(config, ranks).config.training
    assert training.train_micro_batch_size_per_gpu == micro
    assert training.gradient_accumulation_steps == steps
    assert training.train_batch_size == micro * steps * ranks


@given(st.integers(1, 40), st.integers(1, 4))
def test_a_batch_alone_is_one_micro_batch_per_rank(batch, ranks):
    config = load_config([], [*SMALL, f"train_batch_size={batch}"]).config
    if batch % ranks:
        with pytest.raises(UserError, match=f"train_batch_size {batch} is not"):
            resolve_config(config, ranks)
        return
    training = resolve_config(config, ranks).config.training
    assert (training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps) == (batch // ranks, 1)


def test_resolved_batch_is_stable_and_another_number_of_ranks_is_rejected():
    config = resolve_config(load_config([], [*SMALL, "train_batch_size=8"]).config, 2).config
    assert resolve_config(config, 2).config == config
    with pytest.raises(UserError, match="× 3 ranks = 12"):
        resolve_config(config, 3)


def test_a_conflict_in_a_stage_blames_the_stages(tmp_path):
    lines = [line.replace("=", ": ") for line in SMALL]
    text = [*lines, "pos_emb: learned", "max_position_embeddings: 32", "stages: [{until: 2}, {seq_length: 64}]"]
    (tmp_path / "run.yml").write_text("\n".join(text))
    with pytest.raises(UserError, match=r"run.yml:8: stages: stage 2: seq_length 64 is longer than"):
        load_config(["run"], ["seq_length=32"], search=[tmp_path])


@pytest.mark.parametrize(
    ("files", "overrides", "message"),
    [
        (("small", "wide"), [], "wide.yml:1: hidden_size 25 is not divisible by num_attention_heads 3"),
        (("wide", "small"), ["hidden_size=26"], "line: hidden_size 26 is not divisible by num_attention_heads 3"),
        (("small",), ["num_attention_heads=5"], "line: hidden_size 24 is not divisible by num_attention_heads 5"),
    ],
)
def test_a_conflict_blames_the_key_set_last(tmp_path, files, overrides, message):
    (tmp_path / "small.yml").write_text("\n".join(SMALL).replace("=", ": "))
    (tmp_path / "wide.yml").write_text("hidden_size: 25\n")
    with pytest.raises(UserError, match=message):
        load_config(files, overrides, search=[tmp_path])


def test_a_product_of_batch_sizes_that_is_too_large():
    overrides = ["train_micro_batch_size_per_gpu=10000", "gradient_accumulation_steps=1000", "device=cpu"]
    assert problem(*overrides) == (
        "command line: train_micro_batch_size_per_gpu 10000 × gradient_accumulation_steps 1000 × 1 rank = 10000000; "
        "train_batch_size must be at most 1000000"
    )


def test_the_mesh_of_a_configuration():
    config = load_config([], [*SMALL, "pipe_parallel_size=0"]).config
    assert resolve_mesh_shape(config, 6) == ParallelSizes(data=6)
    shared = config.replace(model_parallel_size=2, context_parallel_size=2)
    assert resolve_mesh_shape(shared, 12) == ParallelSizes(tensor=2, context=2, data=3)
    with pytest.raises(UserError) as caught:
        resolve_mesh_shape(shared, 6)
    assert str(caught.value) == (
        "model_parallel_size 2 × context_parallel_size 2 × pipe_parallel_size 1 = 4 does not divide the 6 processes "
        "(num_gpus); use 4 or 8"
    )


FOUR_LAYERS = ("num_layers=4", "hidden_size=48", "num_attention_heads=6", "seq_length=48", "device=cpu")
EIGHT = "gradient_accumulation_steps=8"
OFFLOADED = ("zero_optimization.stage=1", "zero_optimization.offload_optimizer.device=cpu")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model_parallel_size=4",), "num_attention_heads 6 is not divisible by model_parallel_size 4; use 2"),
        (("model_parallel_size=2", "mlp_multiple_of=3", "intermediate_size=7"), "intermediate_size 9 is not divisible"),
        (("context_parallel_size=5",), "seq_length 48 is not divisible by 2 × context_parallel_size 5; use 4"),
        (("context_parallel_size=2", "seq_length=47"), "; an odd length cannot be divided"),
        (("pipe_parallel_size=6", EIGHT), "pipe_parallel_size 6 is more than num_layers 4; use at most 4"),
        (("pipe_parallel_size=2", EIGHT, "zero_optimization.stage=2"), "use 0 or 1"),
        (("pipe_parallel_size=2", EIGHT, *OFFLOADED), "with pipe_parallel_size 2 gradients would leave the device"),
        (("pipe_parallel_size=2", EIGHT, "hidden_dropout=0.1"), "hidden_dropout 0.1: with pipe_parallel_size 2"),
        (("context_parallel_size=2", "attention_dropout=0.1"), "attention_dropout 0.1: with context_parallel_size 2"),
        (("model_parallel_size=2", "attention_dropout=0.1"), "attention_dropout 0.1: with model_parallel_size 2"),
        (("pipe_parallel_size=4", "gradient_accumulation_steps=3"), "gradient_accumulation_steps 3 is less than pipe_"),
        (("pipe_parallel_size=4", "train_batch_size=3"), "is less than pipe_parallel_size 4"),
        (("model_parallel_size=2", "num_gpus=3"), "does not divide the 3 processes (num_gpus); use 2 or 4"),
    ],
)
def test_indivisible_layouts_are_rejected_with_the_nearest_valid_one(overrides: tuple[str, ...], message: str):
    assert message in problem(*FOUR_LAYERS, *overrides)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (("train_batch_size=24",), (12, 1, 24)),
        (("train_batch_size=24", "pipe_parallel_size=4"), (3, 4, 24)),
        (("gradient_accumulation_steps=6", "pipe_parallel_size=4"), (4, 6, 48)),
    ],
)
def test_micro_batches_are_at_least_as_many_as_stages(overrides: tuple[str, ...], found: tuple[int, int, int]):
    config = load_config([], [*SMALL, "num_layers=4", *overrides]).config
    training = resolve_config(config, 2 * config.launch.ranks_per_replica).config.training
    sizes = (training.train_micro_batch_size_per_gpu, training.gradient_accumulation_steps, training.train_batch_size)
    assert sizes == found


def test_ranks_from_the_configuration_alone():
    assert load_config([], SMALL).config.launch.known_world_size is None
    assert load_config([], [*SMALL, "device=cpu"]).config.launch.known_world_size == 1
    assert load_config([], [*SMALL, "device=cpu", "num_gpus=3"]).config.launch.known_world_size == 3
