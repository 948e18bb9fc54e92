"""Estimated activations of a layer, compared with the memory saved by autograd for a real one."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_measurement import Peak, kept_by_autograd
from models import build_model
from tiny_runs import tiny_config

from megatron.attention.backends.backend import compute_document_masks
from megatron.attention.backends.pytorch import SdpaBackend
from megatron.attention.documents import mask_documents, restart_positions
from megatron.attention.segments import build_segments, concatenate_ranges
from megatron.config.schema import Config
from megatron.distributed.mesh import Axis, ParallelSizes, list_context_chunks
from megatron.kernels.cdape_attention import cpu
from megatron.model import attention, layer_config
from megatron.model.attention import AttentionContext
from megatron.model.position_modules import build_attention_dims
from megatron.planning import row_block_memory
from megatron.planning.activations import estimate_layer_activations
from megatron.planning.memory_estimate import estimate_memory
from megatron.planning.model_costs import plan_encoding, plan_layer, plan_model
from megatron.position.catalog import list_encodings, list_temperatures
from megatron.position.registry import build_encoding
from megatron.position.token_range import TokenRange

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
METHODS = {
    "rotary": {"pos_emb": "rotary"},
    "kerple_log": {"pos_emb": "kerple_log"},
    "cdape": {"pos_emb": "kerple_log", "score_processor": "cdape"},
    "cdape on rotary": {"pos_emb": "rotary", "score_processor": "cdape"},
    "pope": {"pos_emb": "pope"},
}
WITH_MAPS = {
    "talking heads": {"pos_emb": "rotary", "score_processor": "talking_heads"},
    "mta": {"pos_emb": "kerple_log", "score_processor": "mta"},
    "mta, two kernels": {
        "pos_emb": "kerple_log", "score_processor": "mta",
        "score_processor_options": {"weights_query_kernel_size": 3, "weights_key_kernel_size": 5},
    },
    "mta, as released": {
        "pos_emb": "rotary", "score_processor": "mta",
        "score_processor_options": {
            "weights_query_kernel_size": 6, "weights_key_kernel_size": 11, "mixes_scores": True, "depth_scale": False,
            "gate": True, "absolute": True,
        },
    },
    "selective": {"pos_emb": "rotary", "score_processor": "selective"},
    "ssmax_prior": {"pos_emb": "rotary", "score_processor": "ssmax_prior"},
    "ssmax_prior, fixed": {
        "pos_emb": "rotary", "score_processor": "ssmax_prior", "score_processor_options": {"learned": False}
    },
}  # fmt: skip
"""Processors whose maps are not hidden values of convolutions."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the C code for CPUs, as on a GPU; PyTorch's softmax is still the CPU's, without a product."""
    monkeypatch.setattr(cpu, "describe_unavailable", lambda: "a GPU")
    monkeypatch.setattr(row_block_memory, "SOFTMAX_BACKWARD_BYTES", 8)


def config(length: int, **keys: Any) -> Config:
    flat = {
        "num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": length, "train_batch_size": None,
        "train_micro_batch_size_per_gpu": 2, "attention_chunk_rows": 64, "compile_regions": False,
    }  # fmt: skip
    return tiny_config(Path(), **(flat | keys))


def measured(
    config: Config,
    context: Axis = Axis(),
    *,
    arguments: bool = False,
    attention_context: AttentionContext | None = None,
) -> int:
    """Return the bytes that a layer of the model saves, including its input; if ranks share a sequence, the bytes of
    `context`.
    """
    kind = TYPES[config.training.compute_dtype]
    gpt = build_model(config.model, config.position, 61, dtype=kind).train()
    length = config.model.seq_length
    parts = concatenate_ranges([TokenRange(start, size) for start, size in list_context_chunks(length, context)])
    batch = config.training.train_micro_batch_size_per_gpu
    hidden = torch.zeros(length // context.size, batch, 64, dtype=kind, requires_grad=True)
    where = attention_context or AttentionContext(parts)
    return kept_by_autograd(gpt, lambda: gpt._run_layers(hidden, where), arguments=arguments)


@pytest.fixture
def copied_places(monkeypatch: pytest.MonkeyPatch):
    """Use keys and values of all positions, for two ranks with equal data."""
    monkeypatch.setattr(attention, "gather_sequence", lambda k, v, groups: (torch.cat([k, k], 2), torch.cat([v, v], 2)))


@pytest.mark.parametrize("length", [256, 512])
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    ("method", "backend"),
    [(m, b) for m in METHODS for b in ("eager", "chunked", "auto")] + [("rotary", "sdpa"), ("kerple_log", "auto")],
)
def test_saved_activations_match_the_estimate(method: str, backend: str, precision: str, length: int) -> None:
    wanted = config(length, **METHODS[method], attention_backend=backend, precision=precision)
    assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).saved_bytes == pytest.approx(
        measured(wanted), rel=0.1
    )


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("method", WITH_MAPS)
def test_maps_of_processors(method: str, precision: str) -> None:
    for backend in ("eager", "auto"):
        wanted = config(512, **WITH_MAPS[method], attention_backend=backend, precision=precision)
        estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes())
        assert estimate.saved_bytes == pytest.approx(measured(wanted), rel=0.1), backend


@pytest.mark.parametrize(
    ("method", "backend"), [(m, b) for m in METHODS for b in ("eager", "chunked")] + [("rotary", "sdpa")]
)
def test_masked_documents(method: str, backend: str) -> None:
    """With document masks for all sequences at once, masks may be saved for each sequence."""
    length, cpu_device = 512, torch.device("cpu")
    wanted = config(length, **METHODS[method], attention_backend=backend, attention_mask="document")
    starts = torch.stack([torch.arange(length) // size * size for size in (100, length)])
    segments = mask_documents(starts, 0, cpu_device)
    if backend == "sdpa":  # built before the layers, which share it
        method_of, like = build_model(wanted.model, wanted.position, 61).local_layers[0], torch.zeros(1)
        encoding = method_of.self_attention.core_attention.encoding
        segments = compute_document_masks(segments, starts, SdpaBackend(), encoding, None, like, dropout=False)
    context = AttentionContext(segments, restarted=restart_positions(starts, torch.arange(length), cpu_device))
    estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes())
    found = measured(wanted, attention_context=context)
    assert estimate.saved_bytes + estimate.shared_bytes == pytest.approx(found, rel=0.1)
    assert (estimate.shared_bytes > 0) == (backend == "sdpa")


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    ("method", "backend"), [(m, b) for m in METHODS for b in ("eager", "chunked")] + [("rotary", "sdpa")]
)
def test_ranks_that_share_a_sequence(method: str, backend: str, precision: str, copied_places: None) -> None:
    wanted = config(512, **METHODS[method], attention_backend=backend, precision=precision)
    for index in range(2):
        estimate = estimate_layer_activations(
            plan_layer(wanted), ParallelSizes(context=2), context_rank=index
        ).saved_bytes
        found = measured(wanted, Axis(index, 2), arguments=(method, backend) == ("cdape", "chunked"))
        assert estimate == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("backend", ["auto", "chunked"])
def test_recomputed_layers_keep_their_input_alone(method: str, backend: str) -> None:
    """Recomputed layers save only their input, although row blocks are recomputed inside them."""
    wanted = config(256, **METHODS[method], checkpoint_activations=True, attention_backend=backend)
    kept = measured(wanted, arguments=(method, backend) == ("cdape", "chunked"))
    assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).input_bytes == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    "keys", [{}, {"num_kv_heads": 2, "use_qk_layernorm": True}, {"head_dim": 32, "attention_dropout": 0.1}]
)
@pytest.mark.parametrize(
    ("method", "backend"), [("rotary", "sdpa"), ("kerple_log", "auto"), ("cdape", "auto"), ("cdape on rotary", "eager")]
)
def test_selective_recomputation_keeps_the_linear_layers_of_attention(
    method: str, backend: str, keys: dict[str, Any], precision: str
) -> None:
    found = [
        config(256, **METHODS[method], attention_backend=backend, precision=precision, **keys, **recompute)
        for recompute in ({}, {"checkpoint_activations": "selective"})
    ]
    whole, selective = (estimate_layer_activations(plan_layer(wanted), ParallelSizes()) for wanted in found)
    # The saved random state of 5 KB is not an activation.
    state = torch.get_rng_state().nbytes if keys.get("attention_dropout") else 0
    assert selective.saved_bytes + state == pytest.approx(measured(found[1]), rel=0.02)
    assert selective.saved_bytes < whole.saved_bytes
    assert selective.saved_map_bytes == 0
    assert selective.workspace_map_bytes == whole.workspace_map_bytes + whole.saved_map_bytes


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize(
    "keys",
    [
        {"activation": "swiglu", "norm": "rmsnorm"},
        {"activation": "relu", "gpt_j_residual": True},
        {"norm": "rmsnorm", "gpt_j_residual": True},
        {"norm": "rmsnorm", "gpt_j_residual": True, "gpt_j_tied": True},
        {"activation": "geglu", "intermediate_size": 96},
        {"norm_placement": "post", "head_dim": 32},
        {"norm_placement": "sandwich", "activation": "geglu_tanh"},
        {"norm_placement": "sandwich", "norm": "rmsnorm"},
    ],
)
def test_other_layers(keys: dict[str, Any], precision: str) -> None:
    wanted = config(256, pos_emb="none", precision=precision, **keys)
    assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).saved_bytes == pytest.approx(
        measured(wanted), rel=0.02
    )


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("method", "backend"),
    [(m, b) for m in METHODS for b in ("eager", "chunked")] + [("rotary", "sdpa"), ("none", "sdpa")],
)
def test_grouped_queries(method: str, backend: str, groups: int, precision: str) -> None:
    keys = {"attention_backend": backend, "precision": precision, "num_kv_heads": groups, "use_bias_in_qkv": True}
    wanted = config(256, **METHODS.get(method, {"pos_emb": "none"}), **keys, use_bias_in_attn_linear=False)
    assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).saved_bytes == pytest.approx(
        measured(wanted), rel=0.1
    )


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("norm", [{"qk_norm": "layernorm"}, {"qk_norm": "rmsnorm"}, {"qk_layernorm_over_heads": True}])
@pytest.mark.parametrize(
    ("method", "backend"), [("rotary", "sdpa"), ("rotary", "eager"), ("kerple_log", "chunked"), ("cdape", "auto")]
)
def test_normalized_queries_and_keys_and_capped_scores(
    method: str, backend: str, norm: dict[str, Any], precision: str
) -> None:
    cap = None if backend == "sdpa" else 20.0
    for groups in (4, 2):
        keys = {"num_kv_heads": groups, "head_dim": 32, "attn_logit_softcapping": cap, "norm": "rmsnorm"}
        wanted = config(256, **METHODS[method], attention_backend=backend, precision=precision, use_qk_layernorm=True,
                        **keys, **norm)  # fmt: skip
        assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).saved_bytes == pytest.approx(
            measured(wanted), rel=0.1
        )


def test_ranks_that_share_a_sequence_of_grouped_queries(copied_places: None) -> None:
    wanted = config(512, **METHODS["rotary"], num_kv_heads=2, attention_backend="sdpa")
    for index in range(2):
        estimate = estimate_layer_activations(
            plan_layer(wanted), ParallelSizes(context=2), context_rank=index
        ).saved_bytes
        assert estimate == pytest.approx(measured(wanted, Axis(index, 2)), rel=0.1)


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("name", list_encodings())
def test_every_encoding(name: str, precision: str) -> None:
    wanted = config(256, pos_emb=name, attention_backend="eager", precision=precision)
    assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).saved_bytes == pytest.approx(
        measured(wanted), rel=0.1
    )


@pytest.mark.parametrize("precision", TYPES)
def test_blocks_that_copy_their_keys(precision: str) -> None:
    """In bfloat16 the copies are a fifth of what a layer saves."""
    wanted = config(1024, pos_emb="grape_a", head_dim=64, attention_backend="auto", precision=precision)
    estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes())
    assert estimate.saved_bytes == pytest.approx(measured(wanted), rel=0.03)


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("temperature", list_temperatures())
@pytest.mark.parametrize("ranks", [1, 2])
def test_scaled_queries(temperature: str, precision: str, ranks: int, request: pytest.FixtureRequest) -> None:
    if ranks > 1:
        request.getfixturevalue("copied_places")
    for keys in (
        {**METHODS["rotary"], "attention_backend": "sdpa"},
        {"pos_emb": "none", "attention_backend": "sdpa"},
        {**METHODS["cdape"], "attention_backend": "chunked"},
        {**METHODS["kerple_log"], "attention_backend": "eager", "num_kv_heads": 2},
    ):
        wanted = config(256, **keys, attention_temperature=temperature, precision=precision)
        estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes(context=ranks), context_rank=ranks - 1)
        assert estimate.saved_bytes == pytest.approx(measured(wanted, Axis(ranks - 1, ranks)), rel=0.05 * ranks)


@pytest.mark.parametrize("precision", TYPES)
def test_sinks_stick_breaking_and_gates(precision: str) -> None:
    for keys in (
        {**METHODS["rotary"], "attention_backend": "sdpa", "attention_output_gate": True},
        {"pos_emb": "none", "attention_backend": "sdpa", "attention_output_gate": "headwise", "num_kv_heads": 2},
        {**METHODS["rotary"], "attention_backend": "eager", "softmax_type": "learnable"},
        {**METHODS["cdape"], "attention_backend": "eager", "softmax_type": "off-by-one"},
        {**METHODS["kerple_log"], "attention_backend": "eager", "softmax_type": "stick-breaking"},
        {**METHODS["kerple_log"], "attention_backend": "eager", "softmax_type": "stick-breaking-remainder"},
        {**METHODS["cdape"], "attention_backend": "auto", "softmax_type": "stick-breaking-remainder"},
        {**WITH_MAPS["talking heads"], "attention_backend": "eager", "softmax_type": "off-by-one"},
        {**WITH_MAPS["talking heads"], "attention_backend": "auto", "softmax_type": "learnable"},
        {**WITH_MAPS["mta"], "attention_backend": "eager", "softmax_type": "stick-breaking-remainder"},
        {**METHODS["kerple_log"], "checkpoint_activations": "selective", "attention_output_gate": True},
    ):
        wanted = config(256, **keys, precision=precision)
        estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes())
        assert estimate.saved_bytes == pytest.approx(measured(wanted), rel=0.05), keys


def test_a_window_leaves_out_columns() -> None:
    wanted = config(512, **METHODS["cdape"], attention_window=100)
    assert estimate_layer_activations(plan_layer(wanted), ParallelSizes()).saved_bytes == pytest.approx(
        measured(wanted), rel=0.1
    )


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_of_a_window_in_fused_attention(ranks: int, precision: str, request: pytest.FixtureRequest) -> None:
    if ranks > 1:
        request.getfixturevalue("copied_places")
    for pos_emb, window in (("rotary", 100), ("none", 100), ("none", 700), ("rotary", 1200)):
        wanted = config(1200, pos_emb=pos_emb, attention_backend="sdpa", attention_window=window, precision=precision)
        for index in range(ranks):
            estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes(context=ranks), context_rank=index)
            found = measured(wanted, Axis(index, ranks))
            assert estimate.saved_bytes == pytest.approx(found, rel=0.02), (pos_emb, window, index)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("method", [*METHODS, *WITH_MAPS])
def test_the_peak_of_the_backward_pass(method: str, precision: str, batch: int) -> None:
    """Peak memory in the backward pass of a layer with recomputed row blocks.

    The number of copies made by a product of maps of heads depends on the batch.
    """
    keys = {"precision": precision, "train_micro_batch_size_per_gpu": batch, "attention_backend": "chunked"}
    method_keys, tolerance = {**METHODS, **WITH_MAPS}[method], 0.2 if method in WITH_MAPS else 0.1
    wanted, kind = config(512, **method_keys, attention_chunk_rows=64, **keys), TYPES[precision]
    gpt = build_model(wanted.model, wanted.position, 61, dtype=kind).train()
    hidden = torch.zeros(512, batch, 64, dtype=kind, requires_grad=True)
    for parameter in gpt.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Peak() as tracked:
        output = gpt._run_layers(hidden, AttentionContext(build_segments(512)))
        tracked.most = tracked.now
        output.sum().backward()
    estimate = estimate_layer_activations(plan_layer(wanted), ParallelSizes())
    assert estimate.saved_bytes - estimate.freed_bytes + estimate.workspace_bytes == pytest.approx(
        tracked.most, rel=tolerance
    )


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"checkpoint_activations": True},
        {"checkpoint_activations": "selective"},
        {"no_weight_tying": True, "precision": "bf16"},
    ],
)
@pytest.mark.parametrize("method", ["rotary", "kerple_log", "cdape"])
def test_the_peak_of_a_whole_model(method: str, keys: dict[str, Any]) -> None:
    """Peak memory of forward and backward pass with the loss: activations of all layers, and the larger of logits and a
    layer.
    """
    eager = {"num_layers": 3, "precision": "fp32", "compile_regions": False}  # a CPU compiles nothing
    wanted = config(256, **METHODS[method], **(eager | keys))
    for vocabulary in (64, 4096):  # a layer's backward pass, or the logits, is the peak
        gpt = build_model(wanted.model, wanted.position, vocabulary, dtype=TYPES[wanted.training.compute_dtype]).train()
        for parameter in gpt.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tokens = torch.zeros(2, 256, dtype=torch.int64)
        with Peak() as tracked:
            gpt(tokens, labels=tokens).sum().backward()
        estimate = estimate_memory(plan_model(wanted), ParallelSizes(), vocabulary)
        found = max(phase.activations + phase.logits + phase.workspace for phase in estimate.phases)
        assert found == pytest.approx(tracked.most, rel=0.1)


LLAMA = {"pos_emb": "rotary", "norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2}
QK_NORM = {"use_qk_layernorm": True, "qk_norm": "rmsnorm"}
COMPILED = {
    "none": {"pos_emb": "none"},
    "kerple_log, relu": {"pos_emb": "kerple_log", "activation": "relu"},
    "rotary": {"pos_emb": "rotary"},
    "rotary, parallel": {"pos_emb": "rotary", "gpt_j_residual": True, "norm": "rmsnorm"},
    "rotary, sandwich": {"pos_emb": "rotary", "norm_placement": "sandwich", "norm": "rmsnorm"},
    "rotary, gate": {"pos_emb": "rotary", "attention_output_gate": True},
    "rotary, learned temperature": {"pos_emb": "rotary", "attention_temperature": "ssmax"},
    "xpos": {"pos_emb": "rotary", "pos_emb_options": {"xpos": True}},
    "norms of queries and keys": {"pos_emb": "none", **QK_NORM},
    "Llama": LLAMA,
    "Qwen": {**LLAMA, **QK_NORM},
}


@pytest.mark.parametrize("precision", TYPES)
@pytest.mark.parametrize("method", COMPILED)
def test_compiled_regions(method: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend has the partition into forward and backward pass of a GPU's compiler, and runs on a CPU."""
    monkeypatch.setattr(layer_config, "runs_compiled", lambda x: True)
    monkeypatch.setattr(layer_config, "COMPILE_ARGUMENTS", {"backend": "aot_eager_decomp_partition"})
    monkeypatch.setattr(layer_config, "compile_region", cache(layer_config.compile_region.__wrapped__))
    keys = {**COMPILED[method], "precision": precision, "compile_regions": True, "device": "cuda"}
    # Regions reach from one attention to the next. The estimate counts a rotation's tables, up to 5%, in each layer.
    one, three = (measured(config(256, **keys, num_layers=num_layers)) for num_layers in (1, 3))
    estimate = estimate_layer_activations(plan_layer(config(256, **keys)), ParallelSizes())
    assert estimate.saved_bytes == pytest.approx((three - one) / 2, rel=0.06)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in list_encodings()),
        ("rotary", {"xpos": True}),
        ("rotary", {"scaling": "linear", "factor": 8.0}),
        ("rotary", {"scaling": "rerope", "neighbors": 8}),
        ("rotary", {"scaling": "selfextend", "neighbors": 8, "group": 4}),
    ],
)
def test_rotations_of_compiled_regions(name: str, options: dict[str, Any]) -> None:
    wanted = config(64, pos_emb=name, pos_emb_options=options)
    planned = plan_encoding(wanted.position)
    encoding = build_encoding(name, build_attention_dims(wanted.model), options)
    has_cos_sin = encoding.get_cos_sin(torch.zeros(1, 4, 64, 16), TokenRange(0, 64)) is not None
    assert planned.cost.has_cos_sin(planned.options) == has_cos_sin
