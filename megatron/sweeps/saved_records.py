"""Saved records of a sweep's finished runs, one small file for each, which machines can share.

`sweep.records` names the folder of the files. A run that has a file for the same training and the same evaluations is
neither trained nor evaluated: its records are loaded from the file. Machines can thus divide a sweep (`sweep.part`), a
repository can contain what they measured, and a run is repeated if its file is removed.

    docs/results/zoo/niah/cdape+fox/seed_1234.json.gz

Each of these files belongs to one run, so machines that divide a sweep never write the same one. It contains a digest
of what decides the records: the keys that affect training, the code of methods outside the project, the content of
corpora and texts, and the options of the evaluations. Beside them is what a report needs (`results.save_experiment`).
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron.config.method_names import compute_user_method_digests
from megatron.config.stages import list_stage_configs
from megatron.data.corpus_metadata import compute_file_digest, read_corpus_metadata
from megatron.options.data import DataOptions, list_corpus_names
from megatron.options.evaluation import EvaluationOptions
from megatron.reports.records import Record
from megatron.reports.run_records import get_run_file, read_run_file, write_run_file
from megatron.sweeps.remaining_work import list_text_files
from megatron.sweeps.spec import Sweep, SweepMember
from megatron.utils.atomic_io import make_folder
from megatron.utils.errors import FarfieldError, UserError

SAVED_FORMAT = 2
"""Format of the files. In format 1, digests of mean accuracies did not cover their lengths."""


def check_records_folder(sweep: Sweep) -> None:
    """Create the folder of saved records, if the sweep has one, and check that it is writable. Raises UserError."""
    if sweep.options.records is not None:
        make_folder("sweep.records", Path(sweep.options.records))


def load_saved_records(sweep: Sweep, member: SweepMember, digest: str) -> list[Record] | None:
    """Load the saved records of a member.

    Args:
        digest: digest of the member (`compute_member_digest`).

    Returns:
        The records, or None if there are none of this training and these evaluations.

    Raises:
        UserError: the file is damaged or not a file of saved records, or a text of the member cannot be read.
    """
    path = _get_path(sweep, member)
    if path is None or not path.exists():
        return None
    return read_run_file(path, digest)


def save_records(sweep: Sweep, member: SweepMember, records: Sequence[Record], digest: str) -> None:
    """Save the records of a finished member, and replace those of an older definition.

    Args:
        digest: digest of the member when it began; its files may have changed since.

    Raises:
        UserError: the file cannot be written.
    """
    path = _get_path(sweep, member)
    assert path is not None
    write_run_file(path, digest, records)


def list_members_of_other_parts(sweep: Sweep) -> set[SweepMember]:
    """Return the members that other machines run: all but every PARTS-th, from the PART-th on (`sweep.part`)."""
    if sweep.options.part is None:
        return set()
    part, parts = map(int, sweep.options.part.split("/"))
    return {member for index, member in enumerate(sweep.members) if index % parts != part - 1}


def compute_member_digest(member: SweepMember) -> str:
    """Return a hash of what decides a member's records, except for the machine and the versions of libraries.

    Raises:
        UserError: a corpus or a text cannot be read.
    """
    config = member.resolved_config
    training = {
        key: value for key, value in config.get_training_fingerprint(defaults=False).items() if "data_path" not in key
    }
    corpora = [_describe_corpora(stage.data) for stage in (config, *list_stage_configs(config))]
    methods = sorted(compute_user_method_digests(config.position).values())
    evaluations = {str(name): _describe_options(options) for name, options in member.evaluations.items()}
    decisive = [SAVED_FORMAT, member.variant, member.first_step, training, methods, corpora, evaluations]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _get_path(sweep: Sweep, member: SweepMember) -> Path | None:
    if sweep.options.records is None:
        return None
    return get_run_file(Path(sweep.options.records), member.benchmark, member.variant, member.seed)


def _describe_options(options: EvaluationOptions) -> dict[str, Any]:
    """Return the options of an evaluation, with checksums instead of paths."""
    values = options.model_dump(exclude={"batch_tokens", "variants"}, exclude_defaults=True)
    return values | {name: _compute_checksums(path) for name, path in options.named_paths.items()}


def _describe_corpora(data: DataOptions) -> list[list[list[str]]]:
    """Return the checksums of all datasets, by kind and by corpus."""
    kinds = (data.train_data_paths, data.valid_data_paths, data.test_data_paths)
    corpora = [[] if data.data_path is None else [data.data_path], *(kind or [] for kind in kinds)]
    return [
        [checksum for corpus in kind for name in list_corpus_names(corpus) for checksum in [_compute_checksums(name)]]
        for kind in corpora
    ]


def _compute_checksums(path: str) -> list[str]:
    """Return the checksums of the files of a text. A corpus written by `prepare` records them."""
    files = list_text_files(path)
    try:
        recorded = read_corpus_metadata(files[0].parent).files or {}
    except (FarfieldError, IndexError):
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
