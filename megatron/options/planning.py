"""Which GPUs a run is planned for: the options of `./deepy.py plan`."""

from megatron.options.section import Section, key


class PlanOptions(Section):
    """A cluster, and how much of the plan is shown."""

    gpus: int = key(8, "GPUs in all", ge=1, le=8192)
    gpu: str = key("a100-40gb", "which: a100-40gb, a100-80gb, h100, …")
    gpus_per_node: int = key(8, "GPUs of one machine", ge=1, le=1024)
    network: float = key(25.0, "GB/s of one node to the others; 25 is one 200 Gbit/s adapter", ge=0.001)
    mfu: float = key(0.45, "share of its peak that a GPU reaches while it computes", ge=0.001, le=1)
    gib: float | None = key(None, "memory of one GPU, if not as sold", ge=0.1)
    vocabulary: int | None = key(None, "tokens; the data's if they are here, else 50257", ge=1)
    layouts: int = key(10, "layouts to list", ge=1)
