"""Write the generated pages and pictures of docs/: `make docs`. Tests check that they are current."""

import base64
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tools.arguments import print_interrupts_in_one_line  # noqa: E402

if __name__ == "__main__":
    print_interrupts_in_one_line()

import matplotlib.image  # noqa: E402

from megatron.config import reference  # noqa: E402
from tools.docs import (  # noqa: E402
    agreement_page,
    card_page,
    claims_page,
    parallel_page,
    position_plots,
    positions_page,
    small_page,
)

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
SHOWN_TEXT = re.compile(r"<text[^>]*>([^<]*)<")
EMBEDDED_MAP = re.compile(r"(?<=data:image/png;base64,)[^\"]+")
PAGES: dict[Path, Callable[[], str]] = {
    reference.REFERENCE_PAGE: reference.build_reference,
    positions_page.PAGE: positions_page.render_page,
    parallel_page.PAGE: parallel_page.render_page,
    claims_page.PAGE: claims_page.render_page,
    card_page.PAGE: card_page.render_page,
    agreement_page.PAGE: agreement_page.render_page,
    small_page.PAGE: small_page.render_page,
}


def _look_equal(old: bytes, new: bytes) -> bool:
    """Return True if two pictures differ only by rounding that depends on the processor.

    Pictures are PNG files, or SVG files of `position_plots`, which contain texts, lines and maps.
    """
    if not new.startswith(b"<?xml"):
        return _have_equal_colors(old, new)
    (before, before_maps), (after, after_maps) = map(_split_svg, (old, new))
    if len(before_maps) != len(after_maps) or NUMBER.sub("", before) != NUMBER.sub("", after):
        return False
    if SHOWN_TEXT.findall(before) != SHOWN_TEXT.findall(after):
        return False
    pairs = zip(NUMBER.findall(before), NUMBER.findall(after), strict=True)
    return all(abs(float(one) - float(other)) < 0.05 for one, other in pairs) and all(
        map(_have_equal_colors, before_maps, after_maps)
    )


def _have_equal_colors(old: bytes, new: bytes) -> bool:
    before, after = (matplotlib.image.imread(io.BytesIO(content), format="png") for content in (old, new))
    return before.shape == after.shape and float(abs(before - after).max()) < 4 / 255


def _split_svg(content: bytes) -> tuple[str, list[bytes]]:
    """Split an SVG into its text without maps and ids (content hashes), and its maps."""
    text = content.decode()
    maps = [base64.b64decode(found) for found in EMBEDDED_MAP.findall(text)]
    return re.sub(r"[a-z]+[0-9a-f]{10}", "", EMBEDDED_MAP.sub("", text)), maps


def write_pages() -> None:
    """Write every page that has changed, and print its name."""
    for page, make in PAGES.items():
        path, text = ROOT / page, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {page}")


def main() -> None:
    """Write every page and picture that has changed, and print its name."""
    write_pages()
    pictures = {ROOT / picture: content for picture, content in position_plots.draw_pictures().items()}
    pictures[ROOT / parallel_page.PICTURE] = parallel_page.draw_picture()
    folder = ROOT / position_plots.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in pictures.items():
        if not path.is_file() or not _look_equal(path.read_bytes(), content):
            path.write_bytes(content)
            print(f"written: {path.relative_to(ROOT)}")
    for path in set(folder.iterdir()) - set(pictures):
        path.unlink()
        print(f"removed: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
