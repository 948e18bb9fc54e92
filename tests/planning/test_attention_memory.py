"""Declarations about backends that need no torch agree with the backends themselves."""

import io
import json
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_measurement import Peak
from rich.console import Console
from tiny_runs import tiny_config

from megatron.attention.backends import flex, triton
from megatron.attention.backends.backend import (
    AttentionFormula,
    find_unsupported_feature,
    list_method_features,
)
from megatron.attention.backends.fused_processor import NativeBackend
from megatron.attention.backends.pytorch import ChunkedBackend, SdpaBackend
from megatron.attention.check.check_result import RECORD_FILE
from megatron.config.load import load_config
from megatron.distributed.hardware import get_gpu_spec
from megatron.kernels.biased_attention import configs as biased_configs
from megatron.kernels.biased_attention.tables import MARGIN
from megatron.kernels.cdape_attention import configs, gated_op, mixer, op
from megatron.kernels.cdape_attention.weights import get_weight_shape
from megatron.kernels.head_dim import MAX_HEAD_DIM
from megatron.kernels.runtime import DeviceProperties
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.planning import attention_memory, memory_estimate, row_block_memory
from megatron.planning.attention_memory import ATTENTION_MEMORY, MAX_PROCESSOR_WIDTH, choose_chunk_rows, list_backends
from megatron.planning.model_costs import plan_encoding, plan_processor
from megatron.planning.plan import CHECK_RECORD, make_plan, read_checked_backend
from megatron.planning.print_plan import print_plan
from megatron.planning.row_block_memory import AttentionShape
from megatron.planning.step_time import Cluster
from megatron.position import registry
from megatron.position.catalog import list_encodings, list_processors, read_encoding_facts, read_processor_facts
from megatron.position.facts import AttentionDims
from megatron.training import zero_optimizer


def test_every_backend_that_may_be_named_is_known() -> None:
    assert set(ATTENTION_MEMORY) == set(get_args(ModelOptions.model_fields["attention_backend"].annotation))


def test_limits_match_the_kernels() -> None:
    assert attention_memory.MAX_HEAD_DIM == MAX_HEAD_DIM
    assert attention_memory.MAX_PROCESSOR_WIDTH == op.MAX_PROCESSOR_WIDTH
    assert attention_memory.MATRIX_ROWS == triton.ROWS_PER_CALL
    assert attention_memory.PARTIAL_SUMS == biased_configs.PARTIAL_SUMS
    assert 2 * MARGIN.value == attention_memory.TABLE_MARGINS
    assert memory_estimate.CAST_ELEMENTS == zero_optimizer.CAST_ELEMENTS
    assert CHECK_RECORD == RECORD_FILE


COUNTS = st.integers(1, 90)


@given(
    segments=st.lists(st.tuples(st.integers(0, 90), COUNTS), min_size=1, max_size=3),
    block_rows=COUNTS,
    window=st.none() | COUNTS,
    kept=st.sampled_from((0, 60, 1000)),
    processor_name=st.sampled_from(("none", "cdape")),
)
def test_row_blocks_match_explicit_counts(
    segments: list[tuple[int, int]], block_rows: int, window: int | None, kept: int, processor_name: str
) -> None:
    position = PositionOptions(pos_emb="none", score_processor=processor_name)
    processor = plan_processor(position)
    shape = AttentionShape(
        1, tuple(segments), 4, 16, 4, plan_encoding(position), processor, True, window, block_rows, False, 1 << 30
    )
    groups = list(row_block_memory._iter_row_blocks(shape, kept))
    total, largest, saved = 0, 0, 0
    for start, length in segments:
        is_saved = start + length <= kept
        size = max(block_rows, row_block_memory.MIN_ROWS_SAVED) if is_saved and processor is None else block_rows
        for first in range(start, start + length, size):
            last = min(first + size, start + length)
            reach = last if window is None else window - 1 + (0 if processor is None else processor.left_context)
            scores = (last - first) * (last - max(0, first - reach))
            total, largest, saved = total + scores, max(largest, scores), saved + is_saved * scores
    assert sum(group.total_scores for group in groups) == total
    assert max(group.num_scores for group in groups) == largest
    assert sum(group.total_scores for group in groups if group.is_saved) == saved


@pytest.mark.parametrize("processor_name", ["none", *list_processors()])
def test_methods_supported_by_backends(processor_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supported methods match the backends' answers when a model is built, for every encoding."""
    monkeypatch.setattr(triton, "is_triton_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    fallback = ChunkedBackend(64)
    backends = {
        "triton": triton.TritonBackend(fallback), "flex": flex.FlexBackend(fallback), "sdpa": SdpaBackend()
    }  # fmt: skip
    for name in list_encodings():
        position = PositionOptions(pos_emb=name, score_processor=processor_name)
        dims = AttentionDims(4, 16, 64, 32, 32)
        encoding, processor = registry.build_encoding(name, dims), None
        if processor_name != "none":
            processor = registry.build_processor(processor_name, dims, {}, has_bias=encoding.adds_bias)
        # Rejections before torch is imported, by these backends and our C code.
        facts = read_encoding_facts(name)
        processor_facts = None if processor is None else read_processor_facts(processor_name)
        for softcap in (None, 50.0):
            formula = AttentionFormula(encoding, processor, softcap)
            reasons = {key: x.describe_unsupported(formula) for key, x in backends.items()}
            wanted = {key for key, reason in reasons.items() if reason is None}
            has_softcap = softcap is not None
            found = list_backends(
                plan_encoding(position), plan_processor(position), dims.head_dim, has_softcap=has_softcap
            )
            assert set(found) == {"auto", "chunked", "eager", *wanted}, name
            reasons["native"] = NativeBackend.describe_unsupported_formula(formula)
            features = list_method_features(facts, processor_facts=processor_facts, has_softcap=has_softcap)
            known = {key: find_unsupported_feature(key, features) for key in reasons}
            assert known == reasons, name


@pytest.mark.parametrize(("heads", "gib"), product((12, 32), (16, 40, 80)))
def test_chunks_of_the_processor_kernel(heads: int, gib: int) -> None:
    position = PositionOptions(pos_emb="kerple_log", score_processor="cdape")
    encoding, processor = plan_encoding(position), plan_processor(position)
    for dtype, batch, length in product((torch.bfloat16, torch.float32), (1, 2, 8), (512, 8192, 131072)):
        assert attention_memory.estimate_kernel_map_bytes(heads, dtype.itemsize) == configs.count_map_bytes(
            heads, dtype
        )
        shape = AttentionShape(
            batch, ((0, length),), heads, 64, dtype.itemsize, encoding, processor, True, None, 64, False, gib << 30
        )
        has_kernels = attention_memory.has_cuda_kernels(shape)
        for multiprocessors in (108, 132):  # of an A100 and an H100
            sizes = batch, heads, length, length, dtype, DeviceProperties(gib << 30, multiprocessors)
            wanted = configs.choose_chunk_rows(*sizes, has_cuda_kernels=has_kernels)
            assert min(choose_chunk_rows(shape), length) == wanted


@pytest.mark.parametrize(("heads", "dim", "length"), product((8, 9, 16, 17), (64, 72, 144), (512, 513)))
def test_the_output_is_kept_for_cuda_kernels(heads: int, dim: int, length: int) -> None:
    position = PositionOptions(pos_emb="kerple_log", score_processor="cdape")
    encoding, processor = plan_encoding(position), plan_processor(position)
    assert processor is not None
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        shape = AttentionShape(
            2, ((0, length),), heads, dim, dtype.itemsize, encoding, processor, True, None, 64, False, 80 << 30
        )
        weights = get_weight_shape(heads, processor.width, processor.kernel_size, True)
        has_kernels = mixer.is_supported(weights, dtype, dim, length)
        assert attention_memory.has_cuda_kernels(shape) == has_kernels
        kept = ATTENTION_MEMORY["triton"](shape).saved_bytes
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_memory, "has_cuda_kernels", lambda shape: False)
            assert kept - ATTENTION_MEMORY["triton"](shape).saved_bytes == (2 * shape.query_bytes if has_kernels else 0)


@pytest.mark.parametrize("heads", [8, 9, 16, 17, 65])
def test_maps_of_heads_are_planned_as_the_kernels_compute_them(heads: int) -> None:
    position = PositionOptions(pos_emb="kerple_log", score_processor="talking_heads")
    encoding, processor = plan_encoding(position), plan_processor(position)
    shape = AttentionShape(
        2, ((0, 512),), heads, 64, 2, encoding, processor, True, None, 64, False, 80 << 30
    )  # fmt: skip
    weights = get_weight_shape(heads, heads, 1, True)
    assert attention_memory.has_cuda_kernels(shape) == mixer.is_supported(weights, torch.bfloat16, 64, 512)
    assert ATTENTION_MEMORY["triton"](shape).saved_bytes < 2 * shape.query_bytes
    assert ("triton" in list_backends(encoding, processor, 64, num_heads=heads)) == (heads <= MAX_PROCESSOR_WIDTH)
    assert not attention_memory.supports_gates(shape)


@pytest.mark.parametrize(("heads", "width", "kernel_size"), product((4, 8, 9, 17), (16, 32, 33, 64, 65), (1, 5, 7, 9)))
def test_sizes_of_a_processor_with_cuda_kernels_are_those_of_the_kernels(
    heads: int, width: int, kernel_size: int
) -> None:
    options = {"width": width, "kernel_size": kernel_size}
    position = PositionOptions(pos_emb="fox", score_processor="cdape", score_processor_options=options)
    encoding, processor = plan_encoding(position), plan_processor(position)
    shape = AttentionShape(
        2, ((0, 512),), heads, 64, 2, encoding, processor, True, None, 64, False, 80 << 30
    )  # fmt: skip
    weights = get_weight_shape(heads, width, kernel_size, True)
    assert attention_memory.has_cuda_kernels(shape) == mixer.is_supported(weights, torch.bfloat16, 64, 512)
    with_gates = gated_op.describe_unsupported(torch.bfloat16, heads, 64, width, kernel_size, 512) is None
    assert attention_memory.supports_gates(shape) == with_gates


@pytest.mark.parametrize(("heads", "dim", "length", "window"), product((4, 16, 17), (64, 72), (512, 513), (None, 99)))
def test_processors_on_gates_take_the_memory_of_their_kernels_where_these_run(
    heads: int, dim: int, length: int, window: int | None
) -> None:
    """`test_gated_op.py` compares the memory with the operator's."""
    position = PositionOptions(pos_emb="fox", score_processor="cdape")
    encoding, processor = plan_encoding(position), plan_processor(position)
    assert processor is not None
    shape = AttentionShape(
        2, ((0, length),), heads, dim, 2, encoding, processor, True, window, 64, False, 80 << 30
    )  # fmt: skip
    sizes = (heads, dim, processor.width, processor.kernel_size, length)
    is_supported = gated_op.describe_unsupported(torch.bfloat16, *sizes) is None
    estimate = ATTENTION_MEMORY["triton"](shape)
    # The kernels save contiguous keys, the output and its rounding error; row blocks save neither.
    assert estimate.copies_keys == is_supported
    assert (estimate.saved_bytes > 2 * shape.query_bytes) == is_supported


def test_maps_of_the_processor_kernel_do_not_grow_with_the_length() -> None:
    found = []
    for length in (16384, 131072):
        position = PositionOptions(pos_emb="kerple_log", score_processor="cdape")
        shape = AttentionShape(
            1, ((0, length),), 12, 64, 2, plan_encoding(position), plan_processor(position), True, None, 64, False,
            80 << 30,
        )  # fmt: skip
        found.append(ATTENTION_MEMORY["triton"](shape).workspace_map_bytes)
    assert max(found) <= (80 << 30) / 12
    assert ATTENTION_MEMORY["triton"](shape).saved_map_bytes == 0


def test_blocks_of_rows_find_the_gradients_of_keys_and_values() -> None:
    """Each block except the last finds key and value gradients; the last has most columns and is differentiated
    first.
    """
    batch, heads, dim, length, rows = 2, 4, 16, 256, 64
    position = PositionOptions(pos_emb="kerple_log")
    shape = AttentionShape(
        batch, ((0, length),), heads, dim, 4, plan_encoding(position), None, True, None, rows, False, 80 << 30
    )
    found = ATTENTION_MEMORY["chunked"](shape)
    last = found.workspace_map_bytes
    before = last * (length - rows) // length + 2 * 4 * batch * heads * length * dim
    assert found.workspace_bytes == max(last, before)
    one_block = ATTENTION_MEMORY["eager"](shape)
    assert one_block.workspace_bytes == one_block.workspace_map_bytes


def test_a_softmax_stores_three_maps_and_its_probabilities() -> None:
    """On CUDA devices the softmax stores three more float32 maps: its gradient, their product, and the logits'
    gradient.
    """
    for b, kept in ((4, 4), (2, 4 + 2)):  # half-precision types store a copy of them, freed by then
        shape = AttentionShape(
            2,
            ((0, 256),),
            4,
            16,
            b,
            plan_encoding(PositionOptions(pos_emb="none")),
            None,
            True,
            None,
            64,
            False,
            80 << 30,
        )
        found, scores = ATTENTION_MEMORY["eager"](shape), 2 * 4 * 256 * 256
        assert (found.saved_map_bytes, found.workspace_map_bytes) == (kept * scores, (4 + 12 - kept) * scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_of_a_processor_while_it_is_computed(dtype: torch.dtype) -> None:
    """A processor stores padded scores, hidden values, its output and their float32 sum, besides its inputs."""
    batch, heads, width, rows, columns, b = 4, 8, 16, 32, 128, dtype.itemsize
    dims = AttentionDims(heads, 16, 16 * heads, columns, columns)
    processor = registry.build_processor("cdape", dims, {"width": width}, has_bias=True).to(dtype)
    scores, bias, share = (torch.zeros(*size, rows, columns) for size in ((batch, heads), (heads,), (width,)))
    scores = scores.to(dtype).requires_grad_()
    share = torch.nn.functional.pad(share, (0, processor.left_context))
    visible = torch.ones(1, 1, rows, columns, dtype=torch.bool)
    with Peak() as tracked:
        result = processor(scores, bias, visible, bias_contribution=share)
    assert result.dtype == torch.float32
    assert tracked.most == pytest.approx(batch * rows * columns * (heads * (2 * b + 4) + b * width), rel=0.1)


def test_a_plan_uses_the_backend_chosen_by_the_check(tmp_path: Path) -> None:
    config = load_config(
        ["125M", "kerple_log", "a100_512"], [f"save={tmp_path}", "checkpoint_activations=false"]
    ).config
    cluster = Cluster(get_gpu_spec("a100-40gb"), 8)
    assert read_checked_backend(config) is None
    for text in ("{", "[]", '{"line": 1}', '{"backend": 3}'):
        (tmp_path / CHECK_RECORD).write_text(text)
        assert read_checked_backend(config) is None
    totals = {}
    for backend in ("row blocks", "triton"):
        (tmp_path / CHECK_RECORD).write_text(json.dumps({"backend": backend}))
        plan = make_plan(config, 50257, cluster)
        assert plan.checked_backend == backend
        assert plan.configured_layout is not None
        totals[backend] = plan.configured_layout.memory.total
        columns = plan.estimate_backends()
        assert totals[backend] == columns["auto" if backend == "row blocks" else backend].memory.total
    assert totals["triton"] < totals["row blocks"]
    named = config.replace(attention_backend="chunked")
    assert read_checked_backend(named) is read_checked_backend(config.replace(attention_check=False)) is None


def test_a_plan_states_how_it_was_measured() -> None:
    config = tiny_config(Path(), pos_emb="rotary", train_batch_size=8, train_micro_batch_size_per_gpu=1)
    plan = make_plan(config, 61, Cluster(get_gpu_spec("a100-40gb"), 8))
    assert plan.to_dict(1)["rehearse"] == "./deepy.py rehearse CONFIG… --gpus 8"
    assert {"auto", "triton", "sdpa"} < set(plan.to_dict(1)["seconds_by_backend"])


def test_a_plan_names_evaluations_that_it_does_not_count() -> None:
    config = tiny_config(Path(), pos_emb="rotary", train_batch_size=8, train_micro_batch_size_per_gpu=1)
    tasks = {"tasks": ["piqa"], "interval": 2}
    for keys, names in (
        ({}, ()),
        ({"eval_lengths": ["4x"], "eval_interval": 0}, ()),
        ({"eval_lengths": ["4x"], "eval_interval": 5}, ("eval_lengths",)),
        ({"eval_lengths": ["4x"], "eval_interval": 5, "harness": tasks}, ("eval_lengths", "harness.tasks")),
    ):
        plan = make_plan(config.replace(**keys), 61, Cluster(get_gpu_spec("a100-40gb"), 8))
        assert plan.uncounted_keys == names
        output = io.StringIO()
        print_plan(plan, Console(file=output, width=100), 1)
        line = f"not counted: evaluation during training with {' and '.join(names)}\n"
        assert (line in output.getvalue()) == bool(names)
