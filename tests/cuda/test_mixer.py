"""The mixer's CUDA kernels as NVRTC compiles them, and how the operator launches them on a card of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from kernels.cdape_attention.logit_gradient import KERNEL as LOGIT_GRADIENT
from kernels.cdape_attention.mixer import TO_SCORES, TO_WEIGHTS, VARIABLE
from kernels.cdape_attention.mixer_forward import KERNELS
from kernels.cuda.compile import compile_kernel
from kernels.cuda.kernel import CudaKernel

MAX_STACK_BYTES = 512
"""Stack of a thread for values that 255 registers do not hold."""
PROGRAM = """
import os
import torch
from kernels.cdape_attention import driver, mixer, op
from kernels.cdape_attention.args import CdapeArgs

launched = []
launch = driver.launch_kernel
driver.launch_kernel = lambda kernel, *rest: (launched.append(kernel.name), launch(kernel, *rest))


def draw(*sizes, dtype=torch.float32):
    return torch.randn(*sizes, device="cuda", dtype=dtype).requires_grad_()


fills_device = mixer.fills_device
mixer.fills_device = lambda *sizes: True  # small problems have too few blocks


def run(heads, length, window):
    q, k, v = (draw(2, heads, length, 64, dtype=torch.bfloat16) for _ in range(3))
    weights = draw(32, 2 * heads, 1, 3), draw(32), draw(heads, 32, 1, 3), draw(heads)
    op.cdape_attention(CdapeArgs(q, k, v, draw(heads, length), *weights, window=window), chunk=64).sum().backward()
    assert all(x.grad is not None for x in (q, k, v, *weights))
    names = [name.split("<")[0].removeprefix("Mixer") for name in launched]
    launched.clear()
    return ",".join(names) or "none"


print(run(16, 96, None), run(12, 128, None), run(16, 96, 32), run(8, 96, None), run(16, 97, None), flush=True)
os.environ["FARFIELD_CUDA_MIXER"] = "0"
print(run(16, 96, None))
del os.environ["FARFIELD_CUDA_MIXER"]
mixer.fills_device = fills_device
print(run(16, 96, None), flush=True)
os._exit(0)  # autograd's threads may be in the way of an orderly end
"""


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "kernel", [TO_SCORES, TO_WEIGHTS, LOGIT_GRADIENT, *KERNELS.values()], ids=lambda kernel: kernel.name
)
def test_kernels_compile_with_few_spills(kernel: CudaKernel, arch: int, tmp_path: Path) -> None:
    code, name = compile_kernel(kernel, arch)
    assert "launch_kernel" in name
    (tmp_path / "kernel.cubin").write_bytes(code)
    tool = str(Path(triton.knobs.nvidia.cuobjdump.path))
    usage = subprocess.run([tool, "-res-usage", "kernel.cubin"], cwd=tmp_path, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    assert int(found[1]) <= 255
    assert int(found[2]) <= MAX_STACK_BYTES


FORWARD, BACKWARD = "Forward", "LogitGradient,Backward,Backward"


@pytest.mark.parametrize(
    ("gpu", "two_chunks", "one_chunk"),
    [
        ("h200", f"{FORWARD},{FORWARD},{BACKWARD},{BACKWARD}", f"{FORWARD},{BACKWARD}"),
        ("a100", f"{FORWARD},{FORWARD},{FORWARD},{FORWARD}", f"{FORWARD},{FORWARD}"),
    ],
)
def test_the_operator_launches_them_where_they_fit(gpu: str, two_chunks: str, one_chunk: str) -> None:
    command = [sys.executable, "-m", "megatron.rehearsal.null_device", "--gpu", gpu, "-c", PROGRAM]
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("FARFIELD_NULL_DEVICE")}
    environment = {**inherited, "LD_PRELOAD": "", "PYTHONPATH": ""}
    environment.pop(VARIABLE, None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    # None with a window, with few heads or in a chunk with odd columns; none where the environment forbids them; and
    # none where blocks are too few for the device.
    assert done.stdout.split() == [two_chunks, two_chunks, "none", "none", one_chunk, "none", "none"]
