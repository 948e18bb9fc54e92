"""Write the pages of docs/ that are made from the code: `make docs`. Tests keep them current."""

import io
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
from tools.docs import parallel_page, position_plots, positions_page  # noqa: E402

PAGES: dict[Path, Callable[[], str]] = {
    reference.REFERENCE_PAGE: reference.build_reference,
    positions_page.PAGE: positions_page.render_page,
    parallel_page.PAGE: parallel_page.render_page,
}


def _show_the_same(old: bytes, new: bytes) -> bool:
    """Do two PNG files show the same, but for a rounding of colours that differs between processors?"""
    before, after = (matplotlib.image.imread(io.BytesIO(content), format="png") for content in (old, new))
    return before.shape == after.shape and float(abs(before - after).max()) < 4 / 255


def main() -> None:
    """Write every page and picture that has changed and name it."""
    for page, make in PAGES.items():
        path, text = ROOT / page, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {page}")
    pictures = {ROOT / picture: content for picture, content in position_plots.draw_pictures().items()}
    pictures[ROOT / parallel_page.PICTURE] = parallel_page.draw_picture()
    folder = ROOT / position_plots.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in pictures.items():
        if not path.is_file() or not _show_the_same(path.read_bytes(), content):
            path.write_bytes(content)
            print(f"written: {path.relative_to(ROOT)}")
    for path in set(folder.iterdir()) - set(pictures):
        path.unlink()
        print(f"removed: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
