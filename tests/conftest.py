"""Shared by all tests: small shapes, quiet and deterministic torch, one thread (tests run side by side)."""

import os
import signal

# What is started in the background ignores SIGINT and what is started by nohup ignores SIGHUP, and so would every process
# that a test starts to interrupt it.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
os.environ.setdefault("OMP_NUM_THREADS", "1")
# cuBLAS refuses deterministic algorithms without a workspace of its own, and reads this when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # tests/kernels run in Triton's interpreter, which triton chooses when any test first imports it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        import triton.language  # noqa: F401

# A GPU would round the factors of float32 convolutions (PyTorch's default) to TF32's 10 bits: no judge may.
torch.backends.cudnn.allow_tf32 = False
torch.backends.cuda.matmul.allow_tf32 = False

settings.register_profile("farfield", deadline=None, max_examples=15, derandomize=True)
settings.load_profile("farfield")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
