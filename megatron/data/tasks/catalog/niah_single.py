"""Needle in a haystack: the value of the only key."""

from megatron.data.tasks.needle_task import NeedleTask


class NiahSingle(NeedleTask):
    """One key with one value (RULER's niah_single)."""

    title = "the value of a key in a haystack of n words"
