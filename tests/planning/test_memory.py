"""Estimated states equal those of real engines; effects of layouts on memory."""

import json
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from tiny_runs import VOCABULARY, tiny_config

from megatron.config.execution import resolve_batch_sizes
from megatron.config.load import load_config
from megatron.config.schema import Config
from megatron.distributed.hardware import get_gpu_spec
from megatron.distributed.mesh import ParallelSizes
from megatron.options.model import MAX_LOGITS
from megatron.planning import memory_estimate, step_time
from megatron.planning.memory_estimate import COMPONENTS, MemoryEstimate, estimate_memory
from megatron.planning.model_costs import count_parameters, list_distinct_pipeline_stages, plan_model
from megatron.planning.step_time import Cluster, estimate_step_time
from megatron.utils.errors import UserError

SCRIPT = Path(__file__).parents[1] / "support/planning_rank.py"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Bytes per parameter in the engines of two ranks."""
    folder = tmp_path_factory.mktemp("engines")
    ranks = [Forked(SCRIPT, str(folder), str(rank), output=folder / f"{rank}.txt") for rank in range(2)]
    assert [rank.wait(300) for rank in ranks] == [0, 0], "\n".join(rank.printed() for rank in ranks)
    return json.loads((folder / "0.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("precision", "stage", "steps", "algorithm"),
    [
        *((p, stage, steps, "AdamW") for p in ("fp32", "bf16") for stage in range(4) for steps in (1, 2)),
        *((p, stage, 1, "Muon") for p in ("fp32", "bf16") for stage in range(3)),
        *(("bf16", stage, 1, "Lion") for stage in (0, 3)),
    ],
)
def test_states_match_the_engine(
    precision: str, stage: int, steps: int, algorithm: str, engines: dict[str, dict[str, float]]
) -> None:
    config = tiny_config(
        Path(), pos_emb="rotary", hidden_size=128, precision=precision, gradient_accumulation_steps=steps,
        train_batch_size=None, zero_optimization={"stage": stage}, optimizer={"type": algorithm},
    )  # fmt: skip
    estimate, found = (
        estimate_memory(plan_model(config), ParallelSizes(data=2), VOCABULARY),
        engines[f"{precision} {stage} {steps} {algorithm}"],
    )
    parameters = count_parameters(plan_model(config), VOCABULARY)
    states = (estimate.weights + estimate.optimizer) / parameters
    phases = {phase.name: phase for phase in estimate.phases}
    # Tolerance of 2%: gradients larger than a bucket are reduced alone, and DeepSpeed keeps the last of them.
    reduced = phases["the optimizer's step"].gradients + phases["the reduction of gradients"].step
    assert states + reduced / parameters == pytest.approx(found["before the step"], rel=0.02)
    if steps > 1:
        accumulated = phases["the loss"].gradients / parameters
        assert states + accumulated == pytest.approx(found["accumulating"], rel=0.02)
    # Memory between steps includes gradient buffers with ZeRO 3, or with float32 accumulation under ZeRO 1.
    assert states <= found["between"] * 1.001
    assert states + reduced / parameters >= found["between"] * 0.999


def of(name: str, method: str, sizes: ParallelSizes, **keys: Any) -> MemoryEstimate:
    return estimate_memory(plan_model(settled(name, method, **keys)), sizes, 50257)


def settled(name: str, method: str, **keys: Any) -> Config:
    keys = {"precision": "bf16", "train_batch_size": None, "train_micro_batch_size_per_gpu": 1} | keys
    return load_config([name, method]).config.replace(**keys)


def test_twelve_bytes_of_optimizer_are_divided_over_data_and_context() -> None:
    one, eight = (of("2-7B", "rotary", sizes) for sizes in (ParallelSizes(), ParallelSizes(data=4, context=2)))
    assert one.optimizer == 12 * count_parameters(plan_model(settled("2-7B", "rotary")), 50257)
    assert eight.optimizer == pytest.approx(one.optimizer / 8)
    assert eight.weights == one.weights


def test_offloaded_states_take_no_gpu_memory() -> None:
    def stage_3(*offloaded: str) -> MemoryEstimate:
        zero = {"stage": 3} | {name: {"device": "cpu"} for name in offloaded}
        return of("2-7B", "rotary", ParallelSizes(data=4), zero_optimization=zero)

    plain, optimizer, both = stage_3(), stage_3("offload_optimizer"), stage_3("offload_optimizer", "offload_param")
    assert (optimizer.optimizer, optimizer.get_largest("step"), optimizer.weights) == (0, 0, plain.weights)
    assert (both.weights, both.get_largest("buffers")) == (0, plain.get_largest("buffers"))


def test_offloading_by_zero_2_keeps_float32_sums_and_a_buffer_on_the_gpu() -> None:
    """Offloading with ZeRO 2 keeps 4 bytes for each parameter of a rank's shard if bfloat16 gradients accumulate.

    The embedding takes 2 bytes per parameter.
    """

    def offloaded(steps: int, precision: str) -> MemoryEstimate:
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
        return of("350M", "rotary", ParallelSizes(data=2), zero_optimization=zero, gradient_accumulation_steps=steps,
                  precision=precision)  # fmt: skip

    parameters = count_parameters(plan_model(settled("350M", "rotary")), 50257)
    for steps, precision in ((1, "bf16"), (3, "bf16"), (3, "fp16")):
        phase = offloaded(steps, precision).phases[0]
        assert phase.name == "the loss"
        assert phase.buffers == 2 * 50304 * 1024
        assert phase.gradients == (4 * parameters / 2 if (steps, precision) == (3, "bf16") else 0)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_offloading_by_zero_1_holds_its_bucket_from_one_micro_batch_to_the_next(precision: str) -> None:
    """Offloading with ZeRO 1 keeps gradient sums (float32 for bfloat16) and a bucket of the same type.

    The bucket has the size of all parameters and lives across micro-batches.
    """
    parameters, size = count_parameters(plan_model(settled("125M", "rotary")), 50257), 2 if precision == "fp16" else 4
    for steps in (1, 3):
        zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
        found = of("125M", "rotary", ParallelSizes(data=2), zero_optimization=zero, gradient_accumulation_steps=steps,
                   precision=precision)  # fmt: skip
        loss, through = found.phases[0], (4 if precision == "fp32" else 2) * 50304 * 768
        assert loss.name == "the loss"
        assert loss.gradients == (size * parameters if steps == 3 else 0)
        assert loss.buffers == through + (size * parameters if steps == 3 else 0)


@pytest.mark.parametrize("recompute", [False, True])
def test_zero_3_holds_gathered_weights_and_a_bucket_at_the_loss(recompute: bool) -> None:
    """At the loss ZeRO 3 keeps a bucket, and gathered weights up to half the reuse distance."""
    for name in ("125M", "2-7B"):
        found = of(name, "rotary", ParallelSizes(data=8), zero_optimization={"stage": 3},
                   checkpoint_activations=recompute)  # fmt: skip
        parameters = count_parameters(plan_model(settled(name, "rotary")), 50257)
        assert found.phases[0].buffers == 2 * min(parameters, 10**9 // 2) + 2 * min(parameters, 500_000_000)
        assert found.phases[0].gradients == -(-parameters // 8) * 2  # its shard, in one permanent tensor


def test_a_pipeline_stage_keeps_its_output_until_its_backward_pass() -> None:
    planned = plan_model(settled("350M", "rotary", gradient_accumulation_steps=4, checkpoint_activations=True))
    first, last = (estimate_memory(planned, ParallelSizes(pipeline=2), 50257, pipeline_stage=stage) for stage in (0, 1))
    hidden = 2 * 512 * 1024
    phases = {phase.name: phase for phase in first.phases}
    # Two micro-batches of the inputs and output of twelve layers; the first layer's input lives until the end.
    assert phases["the top layer's backward pass"].activations == 2 * (12 + 1) * hidden
    assert phases["the bottom layer's backward pass"].activations == (2 * (12 + 1) - 11) * hidden
    phases = {phase.name: phase for phase in last.phases}
    assert phases["the top layer's backward pass"].activations == (12 - 1) * hidden  # received one of its inputs


def test_components_add_up_to_the_peak() -> None:
    found = of("125M", "cdape_kerple_log", ParallelSizes())
    always = found.weights + found.optimizer
    assert found.total == always + max(sum(getattr(phase, part) for part in COMPONENTS) for phase in found.phases)
    assert found.total == always + found.peak.total == found.to_dict()["total"]
    gib = found.total / 2**30
    assert found.fits(gib / 0.89)
    assert not found.fits(gib / 0.91)
    assert found.fits(gib, reserved_fraction=0)


def test_validation_is_the_peak_if_training_compiles_the_loss() -> None:
    """A rehearsal of 6 layers of 125M reached 2.351 GiB in validation, and 2.250 in forward and backward passes."""
    keys = {"num_layers": 6, "precision": "bf16", "zero_optimization": {"stage": 1}, "checkpoint_activations": False,
            "train_batch_size": None, "train_micro_batch_size_per_gpu": 4, "attention_backend": "triton"}  # fmt: skip
    validated = of("125M", "none", ParallelSizes(), **keys)
    assert validated.peak.name == "validation"
    assert validated.total / 2**30 == pytest.approx(2.351, rel=0.01)
    others = of("125M", "none", ParallelSizes(), eval_interval=0, **keys)
    assert others.total / 2**30 == pytest.approx(2.250, rel=0.01)
    with_graphs = validated.weights + validated.optimizer + validated.graphs + validated.peak.total
    assert validated.total_with_graphs == with_graphs > others.total_with_graphs
    eager = of("125M", "none", ParallelSizes(), compile_regions=False, **keys)
    assert eager.total > validated.total


def test_graphs_keep_the_memory_of_a_micro_batch() -> None:
    """With its gradients in the compute type; a rehearsal of 8 sequences of the 125M model kept 3.93 GiB."""
    keys = {"checkpoint_activations": False, "attention_backend": "triton", "compile_regions": False}
    eight = of("125M", "kerple_log", ParallelSizes(), train_micro_batch_size_per_gpu=8, **keys)
    assert eight.graphs / 2**30 == pytest.approx(3.93, rel=0.15)
    few = of("125M", "kerple_log", ParallelSizes(), train_micro_batch_size_per_gpu=1, **keys)
    assert few.graphs >= few.weights  # gradients alone are as large
    step = next(phase for phase in eight.phases if phase.name == "the optimizer's step")
    assert eight.total_with_graphs >= eight.weights + eight.optimizer + eight.graphs + step.step
    assert eight.total_with_graphs > eight.total
    assert eight.to_dict()["graphs"] == eight.graphs


def test_earlier_stages_hold_more_micro_batches() -> None:
    planned = plan_model(settled("2-7B", "rotary", gradient_accumulation_steps=8, checkpoint_activations=False))
    first, last = (estimate_memory(planned, ParallelSizes(pipeline=4), 50257, pipeline_stage=stage) for stage in (0, 3))
    assert first.get_largest("activations") == pytest.approx(4 * last.get_largest("activations"), rel=0.05)
    assert (first.get_largest("logits"), last.get_largest("logits") > 0) == (0, True)


FEW = {
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "optimizer": {"type": "Muon"},
    "zero_optimization": {"stage": 0}, "precision": "fp32",
}  # fmt: skip
HALVES = {"score_processor": ["none"] * 8 + ["cdape"] * 8}


@pytest.mark.parametrize("keys", [{}, FEW])
@pytest.mark.parametrize(
    ("num_layers", "pattern"),
    [
        (16, {}),
        (17, {}),
        (16, HALVES),
        (19, {"attention_window": [64, 64, None]}),
        (17, {"pos_emb": ["rotary", "fire"]}),
    ],
)
@pytest.mark.parametrize("vocab_size", [64, 50257])
def test_the_worst_stage_is_found_among_all(
    vocab_size: int, num_layers: int, pattern: dict[str, Any], keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worst stage is found among all; stages equal to an earlier one are skipped."""
    options = {"num_layers": num_layers, "gradient_accumulation_steps": 8, "checkpoint_activations": False}
    config, sizes = settled("125M", "rotary", **options | pattern | keys), ParallelSizes(pipeline=8)
    config = config.replace(**resolve_batch_sizes(config, 1))
    cluster = Cluster(get_gpu_spec("a100-40gb"), 8)
    planned = plan_model(config)
    found = estimate_memory(planned, sizes, vocab_size), estimate_step_time(planned, sizes, vocab_size, cluster)
    assert (len(list_distinct_pipeline_stages(config, 8)) < 8) == (pattern is not HALVES)
    for module in (memory_estimate, step_time):
        monkeypatch.setattr(module, "list_distinct_pipeline_stages", lambda config, num_stages: list(range(num_stages)))
    assert found == (
        estimate_memory(planned, sizes, vocab_size),
        estimate_step_time(planned, sizes, vocab_size, cluster),
    )


@pytest.mark.parametrize("method", ["rotary", "cdape_kerple_log"])
def test_activations_fall_with_the_ranks_of_a_sequence(method: str) -> None:
    one, four = (of("2-7B", method, ParallelSizes(context=c), seq_length=8192) for c in (1, 4))
    assert four.get_largest("activations") == pytest.approx(one.get_largest("activations") / 4)
    assert four.get_largest("logits") == pytest.approx(one.get_largest("logits") / 4)


def test_memory_is_linear_in_the_length_if_rows_are_recomputed() -> None:
    short, long = (of("2-7B", "cdape_kerple_log", ParallelSizes(), seq_length=n) for n in (8192, 32768))
    assert long.get_largest("activations") == pytest.approx(4 * short.get_largest("activations"), rel=0.01)
    assert (
        short.get_largest("logits") < long.get_largest("logits") <= 12 * MAX_LOGITS
    )  # the loss processes tokens in chunks
    assert long.get_largest("workspace") < 4.1 * short.get_largest("workspace")
    eager = [
        of("2-7B", "cdape_kerple_log", ParallelSizes(), seq_length=n, attention_backend="eager") for n in (8192, 32768)
    ]
    assert eager[1].get_largest("workspace") > 14 * eager[0].get_largest("workspace")


def test_a_backend_may_be_named() -> None:
    planned = plan_model(settled("125M", "kerple_log", checkpoint_activations=False))
    kept = estimate_memory(planned, ParallelSizes(), 50257, backend="eager").get_largest("activations")
    assert kept > estimate_memory(planned, ParallelSizes(), 50257, backend="chunked").get_largest("activations")


def test_a_user_defined_encoding_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(Path(), pos_emb="mine")
    with pytest.raises(UserError, match=r"the memory of pos_emb mine is not known: no such encoding"):
        estimate_memory(plan_model(config), ParallelSizes(), VOCABULARY)
