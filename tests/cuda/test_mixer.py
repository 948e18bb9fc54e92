"""CDAPE's CUDA kernels as NVRTC compiles them, and their launches by the operator on a null device."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from megatron.kernels.cdape_attention import logit_kernels
from megatron.kernels.cdape_attention.attention_kernel import ATTENTION_KERNELS
from megatron.kernels.cdape_attention.geometry import BLOCK_BYTES, KernelFamily, KernelForm, choose_kernel
from megatron.kernels.cdape_attention.mixer import SCORE_GRADIENT_KERNELS, VARIABLE, WEIGHT_GRADIENT_KERNELS
from megatron.kernels.cuda.compile import compile_kernel
from megatron.options.position import PositionOptions
from megatron.planning.attention_memory import ATTENTION_MEMORY
from megatron.planning.model_costs import plan_encoding, plan_processor
from megatron.planning.row_block_memory import AttentionShape

MAX_STACK_BYTES = 512
"""Stack of a thread for values that 255 registers do not hold, for up to five taps and widths to 32."""
MAX_LARGE_STACK_BYTES = 768
"""Stack with seven taps or widths above 32."""
MORE_STACK_BYTES = 160
"""Additional stack with gates and windows, or with heads above 80."""
MAX_GATED_STACK_BYTES = 896
"""Stack with gates and more than three taps, whose sums are kept during a block."""
PROGRAM = """
import os
import torch
from megatron.kernels.cdape_attention import driver, gated_op, mixer_chunks, op
from megatron.kernels.cdape_attention.args import CdapeArgs

launched = []
launch = mixer_chunks.launch_kernel
mixer_chunks.launch_kernel = lambda kernel, *rest: (launched.append(kernel.name), launch(kernel, *rest))


def draw(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, device="cuda", dtype=dtype).requires_grad_()


forward = driver.forward


def note_residue(*args, **options):
    attended = forward(*args, **options)
    residues.append(attended.residue is not None)
    return attended


driver.forward, residues = note_residue, []
has_enough_blocks = mixer_chunks.has_enough_blocks
mixer_chunks.has_enough_blocks = lambda *sizes: True  # small problems have too few blocks


def run(heads, length, dim=64, dtype=torch.bfloat16, width=32, size=3, differentiates=True, **options):
    q, k, v = (draw(2, heads, length, dim, dtype=dtype) for _ in range(3))
    weights = draw(width, 2 * heads, 1, size), draw(width), draw(heads, width, 1, size), draw(heads)
    output = op.cdape_attention(CdapeArgs(q, k, v, draw(heads, length), *weights, **options), chunk=64)
    if not differentiates:
        return
    output.sum().backward()
    assert all(x.grad is not None for x in (q, k, v, *weights))
    if (head_map := options.get("head_map")) is not None:
        assert (head_map.grad.shape, head_map.grad.device) == (head_map.shape, head_map.device)
    assert residues.pop() == any(name.startswith("LogitGradient") for name in launched)
    return list_launched()


def list_launched():
    names = [name.split("<")[0].removeprefix("Mixer") + "*" * ("16, true, " in name) for name in launched]
    launched.clear()
    return ",".join(names) or "none"


def run_gated(heads, length, dtype=torch.bfloat16, **options):
    # The null device computes no values: test_gated_op.py compares them with float64 in the emulator or on a GPU.
    q, k, v = (draw(2, heads, length, 64, dtype=dtype) for _ in range(3))
    assert gated_op.describe_unsupported_device(q, 64, 3) is None
    row, key = (draw(2, heads, length, dtype=torch.float64) for _ in range(2))
    weights = draw(32, 2 * heads, 1, 3), draw(32), draw(heads, 32, 1, 3), draw(heads)
    output = gated_op.attend_with_gates(CdapeArgs(q, k, v, None, *weights, **options), row, key, chunk=64)
    assert (output.shape, output.dtype, output.permute(2, 0, 1, 3).is_contiguous()) == (q.shape, q.dtype, True)
    output.sum().backward()
    for x in (q, k, v, row, key, *weights):
        assert (x.grad.shape, x.grad.dtype, x.grad.device) == (x.shape, x.dtype, x.device)
    assert all("16, 32, true>" in name for name in launched)
    return list_launched()


documents = torch.arange(96, device="cuda").repeat(2, 1).div(40, rounding_mode="floor").mul(40).int()
print(run(16, 96), run(12, 128, sinks=draw(12)), run(17, 96), run(16, 97), flush=True)
print(run(16, 96, window=48), run(16, 96, document_starts=documents), run(16, 96, window=96), flush=True)
print(run(16, 96, 96, torch.float16), run(16, 96, 128), run(16, 96, 72), flush=True)
heads_mapped = {"size": 1, "is_linear": True}
print(run(16, 96, width=16, head_map=draw(16, 16), **heads_mapped), run(16, 96, width=16, **heads_mapped), flush=True)
print(run(8, 97, width=8, head_map=draw(8, 8), **heads_mapped), flush=True)
print(run(16, 96, size=1), run(16, 96, 128, size=7), run(16, 96, width=64), run(32, 96, width=64), flush=True)
os.environ["FARFIELD_CUDA_MIXER"] = "0"
print(run(16, 96))
del os.environ["FARFIELD_CUDA_MIXER"]
with torch.no_grad():
    run(16, 96, differentiates=False)
    assert len(launched) == 1 and not residues.pop()  # no maps, thus no chunks
launched.clear()
mixer_chunks.has_enough_blocks = has_enough_blocks
print(run(16, 96), run_gated(4, 96), run_gated(4, 96, torch.float16, window=48, sinks=draw(4)), flush=True)
os._exit(0)  # autograd's threads may be in the way of an orderly end
"""


FAMILIES = [
    ATTENTION_KERNELS,
    logit_kernels.LOGIT_GRADIENT_KERNELS,
    SCORE_GRADIENT_KERNELS,
    WEIGHT_GRADIENT_KERNELS,
]
LINEAR_FAMILIES = [logit_kernels.LOGIT_KERNELS, SCORE_GRADIENT_KERNELS, WEIGHT_GRADIENT_KERNELS]
"""Kernels before a map after the softmax."""


FORMS = [
    KernelForm(3, 64, torch.bfloat16),
    KernelForm(3, 64, torch.bfloat16, is_local=True),
    KernelForm(3, 96, torch.float16),
    KernelForm(3, 128, torch.bfloat16),
    KernelForm(3, 64, torch.bfloat16, is_gated=True),
    KernelForm(3, 64, torch.float16, is_local=True, is_gated=True),
    KernelForm(1, 64, torch.bfloat16),
    KernelForm(1, 64, torch.bfloat16, is_linear=True),
    KernelForm(1, 80, torch.float16, is_local=True, is_linear=True),
    KernelForm(1, 64, torch.bfloat16, is_gated=True),
    KernelForm(5, 64, torch.bfloat16),
    KernelForm(5, 64, torch.bfloat16, is_gated=True),
    KernelForm(7, 64, torch.bfloat16),
    KernelForm(3, 64, torch.bfloat16, width=64),
]


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("family", "form"),
    [(family, form) for form in FORMS for family in (LINEAR_FAMILIES if form.is_linear else FAMILIES)],
)
def test_kernels_compile_with_few_spills(family: KernelFamily, form: KernelForm, arch: int, tmp_path: Path) -> None:
    check_kernel(family, form, arch, tmp_path)


@pytest.mark.parametrize(
    ("arch", "form"),
    [
        (80, KernelForm(3, 64, torch.bfloat16, heads=32)),
        (90, KernelForm(3, 64, torch.bfloat16, heads=32)),
        (80, KernelForm(7, 128, torch.bfloat16)),
    ],
    ids=str,
)
def test_kernels_of_logits_compile_with_few_spills(arch: int, form: KernelForm, tmp_path: Path) -> None:
    check_kernel(logit_kernels.LOGIT_KERNELS, form, arch, tmp_path)


def check_kernel(family: KernelFamily, form: KernelForm, arch: int, tmp_path: Path) -> None:
    kernel = choose_kernel(family, form, arch)
    assert kernel is not None
    assert kernel.code.shared_bytes <= BLOCK_BYTES[arch]
    code, name = compile_kernel(kernel.code, arch)
    assert "launch_kernel" in name
    (tmp_path / "kernel.cubin").write_bytes(code)
    tool = str(Path(triton.knobs.nvidia.cuobjdump.path))
    usage = subprocess.run([tool, "-res-usage", "kernel.cubin"], cwd=tmp_path, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    assert int(found[1]) <= 255
    if form.is_gated and form.kernel_size > 3:
        budget = MAX_GATED_STACK_BYTES
    elif form.kernel_size > 5 or form.width > 32:
        budget = MAX_LARGE_STACK_BYTES
    else:
        budget = MAX_STACK_BYTES + MORE_STACK_BYTES * ((form.is_local and form.is_gated) or form.dim > 80)
    assert int(found[2]) <= budget


FORWARD, LOGITS, BACKWARD = "Attention", "Forward", "LogitGradient,Backward,Backward"


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_the_operator_launches_them_where_they_fit(gpu: str) -> None:
    two_chunks, one_chunk = f"{FORWARD},{FORWARD},{BACKWARD},{BACKWARD}", f"{FORWARD},{BACKWARD}"
    # On an A100, seven taps with heads of 128 do not fit the kernel that stores no logits.
    large = two_chunks if gpu == "h200" else two_chunks.replace(FORWARD, LOGITS)
    printed = run_on_null_device(gpu, PROGRAM)
    # With 17 heads only the kernel for logits is launched. None is launched with 32 heads and a wide processor, an odd
    # number of columns in a chunk, heads of 72, FARFIELD_CUDA_MIXER=0, or too few blocks for the device. A star marks
    # kernels for windows and documents, which a chunk does not need if its rows see all columns.
    stars = [re.sub(r"(\w+)", r"\1*", text) for text in (FORWARD, BACKWARD)]
    documents = f"{stars[0]},{stars[0]},{stars[1]},{stars[1]}"
    logits = ",".join([LOGITS] * 4)
    expected = [two_chunks, two_chunks, logits, one_chunk, documents, documents, two_chunks]
    # With a map after the softmax, other kernels compute P and dL, from logits.
    mapped = f"{LOGITS},{LOGITS},{LOGITS},Backward,Backward,{LOGITS},Backward,Backward"
    expected += [two_chunks, two_chunks, "none", mapped, two_chunks, "none"]
    expected += [two_chunks, large, two_chunks, "none", "none", "none"]
    # Gates have no other kernels. They use these even with few blocks, and with a window the same ones for all chunks.
    expected += [two_chunks, documents]
    assert printed == expected


def run_on_null_device(gpu: str, program: str) -> list[str]:
    """Return the words that a program prints in a process of its own."""
    command = [sys.executable, "-m", "megatron.rehearsal.null_device", "--gpu", gpu, "-c", program]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("FARFIELD_NULL_DEVICE")}
    environment = {**inherited, "LD_PRELOAD": "", "PYTHONPATH": ""}
    environment.pop(VARIABLE, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


LAUNCHES = """
import os
import torch
from megatron.kernels.cdape_attention import op
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.layer_terms import compute_layer_terms
from megatron.rehearsal.null_device.recorder import read_counters

HEADS, BATCH, LENGTH, WIDTH = 16, 32, 512, 32


def draw(*sizes, dtype=torch.bfloat16):
    return torch.randn(*sizes, device="cuda", dtype=dtype).requires_grad_()


def count(layers):
    # Kernels and all launches of each pass of layers with terms in common.
    weights = [(draw(WIDTH, 2 * HEADS, 1, 3), draw(WIDTH), draw(HEADS, WIDTH, 1, 3), draw(HEADS)) for _ in layers]
    biases = draw(len(layers), HEADS, LENGTH, dtype=torch.float32).unbind()
    heads = [[draw(BATCH, HEADS, LENGTH, 64) for _ in range(3)] for _ in layers]
    before = read_counters()
    terms = compute_layer_terms(
        biases, weights, rows=LENGTH, offset=0, window=None, dtype=torch.bfloat16, residual_bias=True
    )
    outputs = [
        op.cdape_attention(CdapeArgs(*heads[i], biases[i], *weights[i]), terms=terms[i]) for i in layers
    ]
    forward = read_counters()
    torch.autograd.backward(outputs, [torch.empty_like(x) for x in outputs])
    done = read_counters()
    return [count for passed in (forward - before, done - forward) for count in (passed.triton, passed.all_launches)]


count(range(2))  # builds what later calls share
few, many = count(range(2)), count(range(6))
print(*((after - before) / 4 for before, after in zip(few, many)), flush=True)
os._exit(0)  # autograd's threads may be in the way of an orderly end
"""


@pytest.mark.slow
def test_a_layer_launches_six_operations() -> None:
    """A layer launches a kernel and a product forward, four kernels backward, and hardly any other operation."""
    kernels_forward, forward, kernels_backward, backward = map(float, run_on_null_device("h200", LAUNCHES))
    assert (kernels_forward, forward, kernels_backward) == (1, 2, 4)
    assert 4 <= backward < 5  # what layers share grows a little with their number


GATED_LAUNCHES = """
import os
import torch
from megatron.kernels.bias.gate_sums import sum_gates
from megatron.kernels.cdape_attention.args import CdapeArgs
from megatron.kernels.cdape_attention.gated_op import attend_with_gates
from megatron.rehearsal.null_device.recorder import read_counters

HEADS, BATCH, LENGTH, WIDTH = 16, 32, 512, 32


def draw(*sizes, dtype=torch.bfloat16):
    return torch.randn(*sizes, device="cuda", dtype=dtype).requires_grad_()


def count():
    weights = draw(WIDTH, 2 * HEADS, 1, 3), draw(WIDTH), draw(HEADS, WIDTH, 1, 3), draw(HEADS)
    q, k, v = (draw(BATCH, HEADS, LENGTH, 64) for _ in range(3))
    gates = draw(LENGTH, BATCH, HEADS, dtype=torch.float32).permute(1, 2, 0)
    before = read_counters()
    row, key = sum_gates(gates, LENGTH)
    output = attend_with_gates(CdapeArgs(q, k, v, None, *weights), row, key)
    forward = read_counters()
    torch.autograd.grad(output, (q, k, v, gates, *weights), torch.empty_like(output))
    return (forward - before).all_launches, (read_counters() - forward).all_launches


count()  # builds what later calls share
print(*count(), flush=True)
os._exit(0)  # autograd's threads may be in the way of an orderly end
"""


@pytest.mark.slow
def test_a_layer_with_gates_launches_14_operations() -> None:
    """Forward sums of gates, scaled queries, terms, and attention; backward eight kernels and two fills."""
    assert run_on_null_device("h200", GATED_LAUNCHES) == ["4", "10"]


MEMORY = """
import os
import torch
from megatron.kernels.cdape_attention import op
from megatron.kernels.cdape_attention.args import CdapeArgs

BATCH, LENGTH = 16, 2048


def draw(*sizes, dtype=torch.bfloat16):
    return torch.randn(*sizes, device="cuda", dtype=dtype).requires_grad_()


def measure(heads, uses_cuda):
    # Peak of the backward pass, in bytes.
    os.environ["FARFIELD_CUDA_MIXER"] = str(int(uses_cuda))
    weights = draw(32, 2 * heads, 1, 3), draw(32), draw(heads, 32, 1, 3), draw(heads)
    q, k, v = (draw(BATCH, heads, LENGTH, 64) for _ in range(3))
    output = op.cdape_attention(CdapeArgs(q, k, v, draw(heads, LENGTH, dtype=torch.float32), *weights))
    into, before = torch.empty_like(output), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    output.backward(into)
    return torch.cuda.max_memory_allocated() - before


print(*(measure(heads, uses_cuda) for heads in (12, 16) for uses_cuda in (True, False)), flush=True)
os._exit(0)  # autograd's threads may be in the way of an orderly end
"""


@pytest.mark.slow
def test_the_backward_pass_needs_no_more_memory_than_planned() -> None:
    """The CUDA kernels have fewer maps than planned, and tables of partial sums instead. Triton's maps are planned."""
    position = PositionOptions(pos_emb="kerple_log", score_processor="cdape")
    measured = map(int, run_on_null_device("h200", MEMORY))
    for heads, of_kernels in ((12, (80, 136)), (16, (96, 160))):
        shape = AttentionShape(
            *(16, ((0, 2048),), heads, 64, 2, plan_encoding(position), plan_processor(position)),
            *(True, None, 64, False, 141 << 30),
        )
        planned, scores = ATTENTION_MEMORY["triton"](shape), 16 * 1024 * 2048
        assert planned.workspace_map_bytes == of_kernels[1] * scores
        for map_bytes in of_kernels:  # of P, dS and dL, or of S, P, dL and the logits
            assert map_bytes * scores < next(measured) <= planned.workspace_bytes
