"""Needles in a haystack: all values of a key."""

from megatron.data.tasks.needle_task import NeedleTask
from megatron.options.section import config_field


class NiahMultivalue(NeedleTask):
    """One key with several values, all of which are expected in order (RULER's niah_multivalue accepts any order)."""

    title = "all values of a key in a haystack of n words, in order"

    num_needle_v: int = config_field(4, "number of values per key, with a needle for each", ge=1, le=10**4)
