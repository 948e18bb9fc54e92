"""Which GPUs a run is planned for: the options of `./deepy.py plan`."""

from megatron.options.section import ConfigSection, config_field


class PlanOptions(ConfigSection):
    """A cluster, and how much of the plan is shown."""

    gpus: int = config_field(8, "GPUs in all", ge=1, le=8192)
    gpu: str = config_field("a100-40gb", "which: a100-40gb, a100-80gb, h100, …")
    gpus_per_node: int = config_field(8, "GPUs of one machine", ge=1, le=1024)
    network: float = config_field(25.0, "GB/s of one node to the others; 25 is one 200 Gbit/s adapter", ge=0.001)
    mfu: float = config_field(0.45, "share of its peak that a GPU reaches while it computes", ge=0.001, le=1)
    gib: float | None = config_field(None, "memory of one GPU, if not as sold", ge=0.1)
    vocabulary: int | None = config_field(None, "tokens; the data's if they are here, else 50257", ge=1)
    layouts: int = config_field(10, "layouts to list", ge=1)
