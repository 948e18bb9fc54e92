"""How results are put together: the options of `./deepy.py report`."""

from megatron.options.section import ConfigSection, config_field


class ReportOptions(ConfigSection):
    """What is compared, and what counts as extrapolating."""

    against: str | None = config_field(None, "compare all others with this method", metavar="METHOD")
    delta: float = config_field(0.1, "a perplexity that changes by less, as a share, extrapolates", ge=0)
    title: str | None = config_field(None, "of the page")
