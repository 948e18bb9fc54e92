"""Needle in a haystack: the value of one of several keys."""

from megatron.data.tasks.needle_task import NeedleTask
from megatron.options.section import config_field


class NiahMultikey(NeedleTask):
    """Several keys with one value each, of which one is queried (RULER's niah_multikey).

    With `haystack: needles` all other tokens are needles too, as in its second variant.
    """

    title = "the value of one of several keys in a haystack of n words"

    num_needle_k: int = config_field(4, "number of keys with needles", ge=1, le=10**4)
