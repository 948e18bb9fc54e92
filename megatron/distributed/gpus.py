"""GPUs that are known by name: how fast they compute, how much they hold, how fast they talk to their neighbours.

Peaks are dense, without sparsity, from the vendors' data sheets. Memory is what PyTorch finds: about 1.5% less than the
sheet says, and 7.5% less on cards whose GDDR memory corrects errors. The link is one direction of what joins the GPUs
of a node: NVLink where there is one, else PCIe.
"""

from dataclasses import dataclass, replace

from megatron.errors import UserError
from megatron.suggest import choose_from


@dataclass(frozen=True)
class Gpu:
    """What one GPU can do."""

    half: float
    """Peak TFLOP/s in bfloat16 and float16."""
    single: float
    """Peak TFLOP/s in float32, without TF32."""
    gib: float
    """Memory; of several sizes the smallest."""
    link: float
    """GB/s to another GPU of the node, in one direction."""

    def peak(self, precision: str) -> float:
        """Peak TFLOP/s in a precision (fp32, bf16, fp16)."""
        return self.single if precision == "fp32" else self.half


GPUS = {
    "B200": Gpu(2250.0, 75.0, 177.0, 900),
    "H200": Gpu(989.0, 67.0, 139.0, 450),
    "H100 PCIe": Gpu(756.0, 51.0, 79.1, 64),
    "H100 NVL": Gpu(835.0, 60.0, 92.5, 300),
    "GH200": Gpu(989.0, 67.0, 94.5, 450),
    "H100": Gpu(989.0, 67.0, 79.1, 450),
    "A100": Gpu(312.0, 19.5, 39.4, 300),
    "A800": Gpu(312.0, 19.5, 79.1, 200),
    "H800": Gpu(989.0, 67.0, 79.1, 200),
    "A40": Gpu(149.7, 37.4, 44.4, 32),
    "A6000": Gpu(154.8, 38.7, 47.3, 32),
    "A10G": Gpu(70.0, 35.0, 22.2, 32),
    "A10": Gpu(125.0, 31.2, 22.2, 32),
    "L40S": Gpu(362.0, 91.6, 44.4, 32),
    "L40": Gpu(181.0, 90.5, 44.4, 32),
    "L4": Gpu(121.0, 30.3, 22.2, 32),
    "V100": Gpu(125.0, 15.7, 15.8, 150),
    "T4": Gpu(65.0, 8.1, 14.8, 16),
    "RTX 4090": Gpu(165.2, 82.6, 23.6, 32),
    "RTX 3090": Gpu(71.0, 35.6, 23.6, 32),
}
"""By a part of the name that the driver gives them; the first one that occurs in it counts, so the more special one
stands first."""

SIZES = {"A100 40GB": 39.4, "A100 80GB": 79.1, "V100 16GB": 15.8, "V100 32GB": 31.5}
"""GiB of the GPUs above that are sold with more than one memory."""


def of_device(name: str) -> Gpu | None:
    """The GPU that a driver calls so ("NVIDIA A100-SXM4-80GB"), if it is known. Its memory is better asked of it."""
    return next((gpu for part, gpu in GPUS.items() if part in name), None)


def choices() -> list[str]:
    """What `named` takes."""
    return [name.lower().replace(" ", "-") for name in sorted([*GPUS, *SIZES])]


def named(text: str) -> Gpu:
    """The GPU that somebody means: a100-40gb, A100_40GB, h100, "RTX 4090".

    Raises:
        UserError: none is called so; names those that are.
    """

    for name in (*SIZES, *GPUS):
        if _plain(name) == _plain(text):
            gpu = GPUS[name if name in GPUS else name.split()[0]]
            return replace(gpu, gib=SIZES.get(name, gpu.gib))
    raise UserError(f"--gpu {text} is not known; {choose_from(text.lower(), choices())}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
