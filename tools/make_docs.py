"""Write the pages of docs/ that are made from the code: `make docs`. Tests keep them current."""

import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron.config import reference  # noqa: E402

PAGES: dict[Path, Callable[[], str]] = {reference.PAGE: reference.markdown}


def main() -> None:
    """Write every page whose text has changed and name it."""
    for page, make in PAGES.items():
        path, text = ROOT / page, make()
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written: {page}")


if __name__ == "__main__":
    main()
