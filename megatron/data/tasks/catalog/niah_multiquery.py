"""Needles in a haystack: the values of several keys."""

from megatron.data.tasks.needle_task import NeedleTask
from megatron.options.section import config_field


class NiahMultiquery(NeedleTask):
    """Several keys with one value each, all of which are queried (RULER's niah_multiquery)."""

    title = "the values of several keys in a haystack of n words"

    num_needle_k: int = config_field(4, "number of keys with needles", ge=1, le=10**4)
    num_needle_q: int = config_field(4, "number of queried keys", ge=1, le=10**4)
