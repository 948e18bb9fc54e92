"""Records of a sweep's finished members, kept in a folder of small files that machines can share.

`sweep.records` names the folder. A member with a file there, for the same training and the same evaluations, is neither
trained nor evaluated: its records are read from the file. So several machines divide a sweep (`sweep.part`), a
repository keeps what they measured, and a member is repeated by removing its file.

    docs/results/zoo/niah/cdape+fox/seed_1234.json.gz

A file belongs to one member, so no two machines that divide a sweep write the same one. It contains a digest of what
decides the records: the keys that affect training, the content of the corpora, and the options of the evaluations.
"""

import gzip
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron.data.corpus_metadata import compute_file_digest, read_corpus_metadata
from megatron.reports.records import Record, record_from_row
from megatron.sweeps.spec import Sweep, SweepMember
from megatron.utils.atomic_io import make_folder, parse_json, write_bytes_atomically
from megatron.utils.errors import FarfieldError, RunError, UserError

KEPT_FORMAT = 1


def read_kept_records(sweep: Sweep, member: SweepMember) -> list[Record] | None:
    """Read the kept records of a member.

    Returns:
        The records, or None if the sweep keeps none, or none of this training and these evaluations.

    Raises:
        UserError: the file is not one of ours.
        RunError: the file is damaged.
    """
    path = _get_path(sweep, member)
    if path is None or not path.exists():
        return None
    try:
        content = parse_json(gzip.decompress(path.read_bytes()).decode())
        digest, rows = content["digest"], content["records"]
        records = [record_from_row(row) for row in rows]
    except (OSError, EOFError, ValueError, KeyError, TypeError, FarfieldError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path}: not records of a sweep's member ({reason}); restore or remove it") from None
    return records if digest == compute_member_digest(member) else None


def keep_records(sweep: Sweep, member: SweepMember, records: Sequence[Record]) -> None:
    """Write the records of a finished member, if the sweep keeps them, and replace those of an older definition."""
    path = _get_path(sweep, member)
    if path is None:
        return
    make_folder("sweep.records", path.parent)
    content: dict[str, Any] = {
        "format": KEPT_FORMAT,
        "digest": compute_member_digest(member),
        "records": [record.to_row() for record in records],
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    write_bytes_atomically(path, gzip.compress(text.encode(), mtime=0))


def list_other_parts(sweep: Sweep) -> set[SweepMember]:
    """Return the members that another machine runs: all but every PARTS-th, from the PART-th on (`sweep.part`)."""
    if sweep.options.part is None:
        return set()
    part, parts = map(int, sweep.options.part.split("/"))
    return {member for index, member in enumerate(sweep.members) if index % parts != part - 1}


def compute_member_digest(member: SweepMember) -> str:
    """Return a hash of what decides a member's records, except for the machine and the versions of libraries.

    Raises:
        UserError: a corpus cannot be read.
    """
    config = member.resolved_config
    training = {
        key: value for key, value in config.training_fingerprint(defaults=False).items() if "data_path" not in key
    }
    data = config.data
    corpora = {
        name: [_describe_data(path) for path in _list_paths(getattr(data, name))]
        for name in ("data_path", "train_data_paths", "valid_data_paths", "test_data_paths")
    }
    evaluations = {
        str(name): options.model_dump(exclude={"batch_tokens", "variants", "data"}, exclude_defaults=True)
        for name, options in member.evaluations.items()
    }
    decisive = [KEPT_FORMAT, member.variant, member.first_step, training, corpora, evaluations]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _get_path(sweep: Sweep, member: SweepMember) -> Path | None:
    if sweep.options.records is None:
        return None
    benchmark = [] if member.benchmark is None else [member.benchmark]
    return Path(sweep.options.records, *benchmark, member.variant, f"seed_{member.seed}.json.gz")


def _list_paths(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str)]


def _describe_data(prefix: str) -> list[str]:
    """Return the checksums of a dataset's files, which a corpus of ours records."""
    path = Path(prefix)
    files = [path.with_name(path.name + suffix) for suffix in (".bin", ".idx")]
    try:
        recorded = read_corpus_metadata(path.parent).files or {}
    except FarfieldError:
        recorded = {}
    try:
        return [
            recorded[file.name].sha256 if file.name in recorded else _compute_checksum(file, file.stat().st_mtime_ns)
            for file in files
        ]
    except OSError as error:
        raise UserError(f"sweep.records: {error.filename}: cannot be read ({error.strerror})") from None


@cache
def _compute_checksum(file: Path, modified: int) -> str:
    """Return the checksum of a file, which is read again if its modification time changes."""
    return compute_file_digest(file).sha256
