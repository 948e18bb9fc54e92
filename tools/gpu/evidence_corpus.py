#!/usr/bin/env python3
"""Pack the corpus of the evidence runs, source code and documentation of installed Python packages, into one file.

    python tools/gpu/evidence_corpus.py

collects the text files of `PACKAGES` from this environment (the versions of constraints.txt), prepares them with a
byte-level BPE of 8,192 tokens, and writes

    data/evidence                        the corpus folder, as `./deepy.py prepare` makes it
    data/evidence.tar.xz                 the same folder, packed for a machine without a network
    docs/results/evidence_corpus.json    packages, versions, licenses, files and bytes, tokens, and checksums

All packages have permissive licenses or the MPL; the record lists them. Nothing is downloaded. The same versions
produce the same bytes: documents are sorted, the split has a fixed seed, and the archive contains no times or owners.
"""

import hashlib
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.arguments import ToolParser, int_at_least, parse_output_path, print_interrupts_in_one_line  # noqa: E402

PACKAGES = (
    *("accelerate", "aiohttp", "datasets", "deepspeed", "fonttools", "fsspec", "huggingface_hub", "hypothesis"),
    *("ipython", "joblib", "lm_eval", "matplotlib", "mpmath", "mypy", "networkx", "nltk", "numpy", "pip", "pydantic"),
    *("pytest", "rich", "scikit-learn", "setuptools", "sympy", "tornado", "triton"),
)
"""Packages with permissive licenses or the MPL. constraints.txt pins their versions, except pip's. Their archive is
small enough to be copied together with the required wheels."""
SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
MIN_BYTES, MAX_BYTES = 1_000, 400_000
"""Minimum and maximum size of a document, in bytes. Longer files are tables and generated code."""
PERMITTED = re.compile(r"\b(apache|0?bsd|mit|mpl|psf|python software foundation|isc|zlib)\b", re.IGNORECASE)
"""Names of licenses that permit copying the texts: permissive ones, and the MPL, whose terms remain with its files."""
VOCABULARY_SIZE = 8192
MAX_ARCHIVE_BYTES = 22 << 20
XZ_PRESET = 1
"""Preset of the compressor. For token ids, preset 4 saves a tenth more and takes three times as long."""


class Document(NamedTuple):
    """One text file of a package."""

    name: str
    """Package and path."""
    text: str


def read_license(package: Distribution) -> str:
    """Return a package's license in one line: its expression, its classifiers, or the first line of its text."""
    metadata = package.metadata
    classifiers = metadata.get_all("Classifier") or []
    named = [line.split("::")[-1].strip() for line in classifiers if line.startswith("License ::")]
    text = (metadata.get("License") or "").strip().splitlines()
    return metadata.get("License-Expression") or ", ".join(named) or (text[0].strip() if text else "unknown")


def iter_documents(package: Distribution) -> Iterator[Document]:
    """Yield the texts of a package in the order of their paths, and the package's description."""
    for file in sorted(package.files or (), key=str):
        if file.suffix not in SUFFIXES or ".." in file.parts:
            continue
        path = Path(str(file.locate()))
        if not path.is_file() or not MIN_BYTES <= path.stat().st_size <= MAX_BYTES:
            continue
        try:
            yield Document(f"{package.name}/{file}", path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    description = package.metadata.get_payload()
    if isinstance(description, str) and len(description) >= MIN_BYTES:
        yield Document(f"{package.name}/description", description)


def collect_documents(names: tuple[str, ...], output: Path) -> list[dict[str, Any]]:
    """Write the documents of packages to a file of JSON lines, without duplicates.

    Returns:
        Name, version, license, files and bytes of each package.

    Raises:
        SystemExit: if a package is missing or has another license than `PERMITTED`.
    """
    seen: set[bytes] = set()
    found: list[dict[str, Any]] = []
    with output.open("w", encoding="utf-8") as file:
        for name in names:
            try:
                package = distribution(name)
            except PackageNotFoundError:
                sys.exit(f"error: {name} is not installed; run `make setup-dev`")
            terms = read_license(package)
            if "gpl" in terms.lower() or not PERMITTED.search(terms):
                sys.exit(f"error: {name} {package.version} has the license {terms!r}, which `PERMITTED` does not list")
            files = size = 0
            for document in iter_documents(package):
                digest = hashlib.sha256(document.text.encode()).digest()
                if digest in seen:
                    continue
                seen.add(digest)
                file.write(json.dumps({"text": document.text, "name": document.name}, ensure_ascii=False) + "\n")
                files, size = files + 1, size + len(document.text.encode())
            found.append({"package": name, "version": package.version, "license": terms, "files": files, "bytes": size})
    return found


def pack_folder(folder: Path, archive: Path) -> None:
    """Write a compressed archive of a corpus folder without times and owners."""

    def strip(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime = member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mode = 0o755 if member.isdir() else 0o644
        return member

    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:xz", preset=XZ_PRESET) as packed:
        for path in sorted(folder.iterdir()):
            if path.is_file() and not path.name.startswith("."):
                packed.add(path, f"{folder.name}/{path.name}", filter=strip)
    part.replace(archive)


def prepare(folder: Path, packages: tuple[str, ...], documents: int | None) -> list[dict[str, Any]]:
    """Prepare the corpus folder with `./deepy.py prepare`. Return the result of `collect_documents`."""
    texts = folder.with_name(f"{folder.name}.jsonl")
    texts.parent.mkdir(parents=True, exist_ok=True)
    found = collect_documents(packages, texts)
    options = ["--tokenizer", "bpe", "--vocab-size", str(VOCABULARY_SIZE), "--split", "0.93,0.02,0.05"]
    options += [] if documents is None else ["--documents", str(documents)]
    command = [sys.executable, str(ROOT / "deepy.py"), "prepare", str(texts), "--output", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode:
        sys.exit(done.returncode)
    texts.unlink()
    return found


def describe_corpus(packages: list[dict[str, Any]], folder: Path, archive: Path) -> dict[str, Any]:
    """Return the record of a corpus: packages, splits, and the archive's size and checksum."""
    content = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
    return {
        "packages": packages,
        "splits": content["splits"],
        "archive_bytes": archive.stat().st_size,
        "archive_sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
    }


def main() -> None:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "data/evidence", help="corpus folder (data/evidence)")
    parser.add_argument("--packages", nargs="+", default=list(PACKAGES), help="packages to read, instead of all")
    parser.add_argument("--documents", type=int_at_least(1), help="maximum number of documents, counted from the first")
    parser.add_argument("--json", type=parse_output_path, default=ROOT / "docs/results/evidence_corpus.json")
    arguments = parser.parse_args()
    if arguments.output.exists():
        parser.error(f"{arguments.output} exists; remove it or choose another --output")
    found = prepare(arguments.output, tuple(arguments.packages), arguments.documents)
    archive = arguments.output.with_name(f"{arguments.output.name}.tar.xz")
    pack_folder(arguments.output, archive)
    record = describe_corpus(found, arguments.output, archive)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written: {archive} ({archive.stat().st_size / 2**20:.1f} MiB) and {arguments.json}")
    if archive.stat().st_size > MAX_ARCHIVE_BYTES:
        sys.exit(f"error: {archive} is larger than {MAX_ARCHIVE_BYTES >> 20} MiB; give fewer --packages or --documents")


if __name__ == "__main__":
    print_interrupts_in_one_line()
    main()
