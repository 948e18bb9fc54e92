"""`train` accepts every proposed layout."""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from megatron.config.load import load_config
from megatron.distributed.hardware import LocalHardware, get_gpu_spec
from megatron.planning.parallel_layouts import build_configured_layout, find_fastest_layouts, iter_layouts
from megatron.planning.plan import make_plan
from megatron.planning.step_time import Cluster
from megatron.training.resolve_run import resolve_run
from megatron.utils.errors import UserError

VOCABULARY = 50257
A100 = get_gpu_spec("a100-40gb")
DATA = ["train_data_paths=[nowhere]"]


CASES = {
    "cdape": (["2-7B", "cdape_kerple_log", "a100_8k"], [], 16),
    "fp16": (["350M", "rotary"], ["train_batch_size=96"], 8),
    "dropout": (["125M", "kerple_log", "a100_512"], ["attention_dropout=0.1", "train_micro_batch_size_per_gpu=2"], 8),
    "an odd length": (["125M", "kerple_log"], ["seq_length=513", "precision=bf16"], 8),
    "overlap": (["125M", "rotary", "a100_2k"], ["zero_optimization.overlap_comm=true"], 4),
    "offloaded": (["1-3B", "rotary", "a100_2k"], ["zero_optimization.offload_optimizer.device=cpu"], 4),
    "seven": (["125M", "rotary", "a100_2k"], ["train_batch_size=21", "train_micro_batch_size_per_gpu=1"], 7),
}


@pytest.mark.parametrize("case", CASES)
def test_train_accepts_proposed_layouts(case: str) -> None:
    files, pairs, gpus = CASES[case]
    config = load_config(files, [*pairs, *DATA]).config
    found = find_fastest_layouts(config, VOCABULARY, Cluster(A100, gpus))
    assert found
    for layout in found:
        written = load_config(files, [*pairs, *DATA, *layout.overrides.split()]).config
        settled = resolve_run(written, LocalHardware(num_gpus=8, num_cores=8), dry_run=True)
        assert layout.config.training.model_dump() == settled.config.training.model_dump()
        assert layout.memory.fits(A100.gib)
        assert settled.config.training.train_batch_size == found[0].config.training.train_batch_size


def sizes_of(files: Sequence[str], gpus: int, *pairs: str, **cluster: Any) -> set[tuple[int, int, int]]:
    found = iter_layouts(load_config(files, pairs).config, VOCABULARY, Cluster(A100, gpus, **cluster))
    return {(layout.sizes.tensor, layout.sizes.context, layout.sizes.pipeline) for layout in found}


def test_tensor_ranks_stay_inside_a_node() -> None:
    files, few = ["6-7B", "rotary", "a100_2k"], "train_batch_size=16"
    assert max(tensor for tensor, _, _ in sizes_of(files, 16, few)) == 8
    assert max(tensor for tensor, _, _ in sizes_of(files, 16, few, gpus_per_node=4)) == 4


def test_all_layouts_that_divide_the_devices_are_considered() -> None:
    found = sizes_of(["125M", "kerple_log", "a100_512"], 4)
    assert found == {(t, c, p) for t in (1, 2, 4) for c in (1, 2, 4) for p in (1, 2, 4) if t * c * p <= 4}


def test_the_fastest_layout_is_listed_first_and_once() -> None:
    cluster = Cluster(A100, 8)
    config = load_config(["2-7B", "cdape_kerple_log", "a100_2k"], ["train_batch_size=16"]).config
    found = find_fastest_layouts(config, VOCABULARY, cluster)
    times = [float(f"{layout.step_time.total:.4g}") for layout in found]
    assert times == sorted(times)
    assert len({layout.sizes for layout in found}) == len(found)
    fitting = [layout for layout in iter_layouts(config, VOCABULARY, cluster) if layout.memory.fits(A100.gib)]
    assert found[0].step_time.total == pytest.approx(min(layout.step_time.total for layout in fitting), rel=1e-3)


def test_rejected_layouts_have_the_error_of_train() -> None:
    config = load_config(["125M", "rotary", "a100_128k"]).config
    with pytest.raises(UserError, match="does not divide the 4 processes"):
        build_configured_layout(config, VOCABULARY, Cluster(A100, 4))
    made = make_plan(config, VOCABULARY, Cluster(A100, 4))
    assert "does not divide the 4 processes" in (made.config_error or "")
    assert made.detailed_layout is made.fitting_layouts[0]
    words = shlex.split(replace(made, arguments="").rehearse_command)[2:]
    pairs = words[: words.index("--gpus")]  # without them, the command would raise the same error
    repaired = make_plan(load_config(["125M", "rotary", "a100_128k"], pairs).config, VOCABULARY, made.cluster)
    assert repaired.configured_layout is not None
    assert repaired.configured_layout.config_keys == made.detailed_layout.config_keys
    assert " train_batch_size=" not in repaired.rehearse_command


def test_gpus_are_whole_nodes() -> None:
    with pytest.raises(UserError, match="12 GPUs do not fill whole nodes of 8"):
        make_plan(load_config(["125M", "rotary"]).config, VOCABULARY, Cluster(A100, 12))


def test_nothing_fits() -> None:
    made = make_plan(load_config(["6-7B", "rotary", "a100_2k"]).config, VOCABULARY, Cluster(get_gpu_spec("t4"), 2))
    assert (made.fitting_layouts, made.configured_layout is not None) == ([], True)
    assert not made.fits_gpu(made.configured_layout)  # type: ignore[arg-type]
    impossible = make_plan(load_config(["125M", "rotary"]).config, VOCABULARY, Cluster(A100, 7))  # batch of 256
    assert (impossible.detailed_layout, impossible.estimate_backends()) == (None, {})


def test_backends_have_separate_estimates() -> None:
    config = load_config(["125M", "cdape_kerple_log", "a100_512"], ["checkpoint_activations=false"]).config
    estimates = make_plan(config, VOCABULARY, Cluster(A100, 8)).estimate_backends()
    found = {name: estimate.memory for name, estimate in estimates.items()}
    assert list(found) == ["auto", "triton", "chunked", "eager"]  # fused attention does not support it
    assert found["triton"].saved_maps == 0
    assert found["chunked"].saved_maps == 0 < found["chunked"].workspace_maps
    assert found["auto"].saved_maps > 0.5 * found["auto"].get_largest("activations")
    for memory in found.values():
        assert memory.saved_maps < memory.get_largest("activations")
        assert memory.workspace_maps <= memory.get_largest("workspace")


def test_a_run_in_stages_is_planned_for_the_largest() -> None:
    keys = ["save=run", "train_iters=3000", "train_micro_batch_size_per_gpu=16", "train_batch_size=128"]
    stages = "[{until: 1000}, {until: 2500, seq_length: 4096, checkpoint_activations: true}, {seq_length: 2048}]"
    cluster = Cluster(A100, 4)
    made = make_plan(load_config(["125M", "rotary"], [*keys, f"stages={stages}"]).config, VOCABULARY, cluster)
    longer = (
        ["seq_length=4096", "train_micro_batch_size_per_gpu=2", "train_batch_size=16"],
        ["seq_length=2048", "train_micro_batch_size_per_gpu=4", "train_batch_size=32"],
    )
    plain = [
        make_plan(load_config(["125M", "rotary"], [*keys[:2], *batch]).config, VOCABULARY, cluster).configured_layout
        for batch in (keys[2:], *([*batch, "checkpoint_activations=true"] for batch in longer))
    ]
    assert [stage.gpu_bytes for stage in made.stages] == [layout.memory.total for layout in plain if layout]
    steps = (1000, 1500, 500)
    days = [layout.step_time.total * n / 86400 for layout, n in zip(plain, steps, strict=True) if layout]
    assert [stage.days for stage in made.stages] == pytest.approx(days)
    largest = max(range(3), key=lambda index: (made.stages[index].gpu_bytes, index))
    assert made.largest_stage == f"stage {largest + 1} of 3, which needs the most memory"
    assert made.configured_layout is not None
    assert made.configured_layout.memory.total == made.stages[largest].gpu_bytes
