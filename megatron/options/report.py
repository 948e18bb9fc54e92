"""How results are put together: the options of `./deepy.py report`."""

from megatron.options.section import Section, key


class ReportOptions(Section):
    """What is compared, and what counts as extrapolating."""

    against: str | None = key(None, "compare all others with this method", metavar="METHOD")
    delta: float = key(0.1, "a perplexity that changes by less, as a share, extrapolates", ge=0)
    title: str | None = key(None, "of the page")
