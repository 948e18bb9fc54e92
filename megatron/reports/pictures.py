"""Pictures inside a page, in two widths: as base64, so that nothing must lie beside it."""

import base64
import html
from collections.abc import Callable


def embedded(draw: Callable[[bool], bytes], alt: str) -> str:
    """A paragraph of HTML with a picture, of which screens up to 40rem wide take the narrow drawing.

    Args:
        draw: makes the PNG, told whether the narrow one is wanted.
        alt: what it shows, for those who do not see it; escaped here.
    """
    wide, narrow = (base64.b64encode(draw(each)).decode("ascii") for each in (False, True))
    return (
        f'<p class="plot"><picture><source media="(max-width: 40rem)" srcset="data:image/png;base64,{narrow}">'
        f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{wide}"></picture></p>'
    )
