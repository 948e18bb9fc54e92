"""`./deepy.py sweep FILE`: prepare a corpus, train every variant with every seed, evaluate all alike, report.

    OUTPUT/results.json, .csv, .md, .png, report.html              rewritten after every run that was evaluated
    OUTPUT/log.txt                                                 what libraries had to say
    OUTPUT/VARIANT/seed_1234.yml                                   the run's whole configuration: `train` takes it too
    OUTPUT/VARIANT/seed_1234.txt                                   what its training printed
    OUTPUT/VARIANT/seed_1234/                                      the run: checkpoints, metrics, its own results

Every training is `./deepy.py train` in a process of its own, so no run inherits another's state, and any of them can be
repeated by hand. A sweep that is stopped, by a person or an error, is carried on by the same command: finished
runs are taken as they are, an interrupted one resumes at its last checkpoint. A run folder whose configuration is
not the one asked for is never overwritten and never reused; the sweep refuses to start.

How long it takes is estimated from the FLOPs of every training and evaluation, which are known before the first, and
the speed of those that have run or are running.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.checkpoint import folder as checkpoints
from megatron.checkpoint.manifest import newest_whole
from megatron.checkpoint.progress import Progress
from megatron.config.load import find, merge, split_override
from megatron.config.schema import Config, Path_
from megatron.config.settings import COMMAND_LINE, show
from megatron.config.yaml_files import Document, read_yaml
from megatron.errors import FarfieldError, RunError, UserError
from megatron.evaluation.progress import Job, Meter, duration, flop, seconds_left
from megatron.files import check_folder, write_text
from megatron.launch.console import explained, run_console
from megatron.launch.local import terminable
from megatron.launch.parent import bound
from megatron.launch.sweep_options import MINE, CorpusOptions, EvaluateOptions, SweepOptions, check
from megatron.training.records import METRICS, recorded
from megatron.training.signals import acknowledged

if TYPE_CHECKING:
    from megatron.reports.records import Record

# What needs torch or matplotlib is imported where it is used: a mistake in the file is told at once.

DEEPY = Path(__file__).resolve().parents[2] / "deepy.py"
POLL_SECONDS = 0.2
RECEIPT = "evaluated.json"
STOPPING = "stopping; a training under way saves after its step first (again to end at once)"


@dataclass(frozen=True, eq=False)  # compared by identity: a configuration holds mappings, which have no hash
class Member:
    """One run of the sweep."""

    variant: str
    seed: int
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.variant}, seed {self.seed}"

    def beside(self, ending: str) -> Path:
        """A file beside the run's folder, with its name."""
        return self.folder.with_name(self.folder.name + ending)


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked."""

    options: SweepOptions
    members: tuple[Member, ...]
    notes: tuple[str, ...]
    texts: dict[str, str]  # the files it was read from, for the report


def run(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    console: Console | None = None,
    search: Sequence[str | Path] | None = None,
) -> "list[Record]":
    """Run a sweep to its end, from wherever an earlier attempt left it.

    Args:
        files: configuration files, merged left to right, at least one with a `sweep:` mapping; of these too the later
            wins, key by key (`sweep.variants` as a whole).
        overrides: `key=value` for all variants, or `sweep.key=value`.
        console: where progress and table go. If None, the terminal; what libraries print then goes to OUTPUT/log.txt.
        search: folders to look file names up in, as for `megatron.config.load.load`.

    Returns:
        The records of all runs.

    Raises:
        UserError: the files, a run folder that holds another run, or what training or evaluation refuse.
        RunError: a training or an evaluation failed; what is finished stays and is used next time.
    """
    sweep = read(files, overrides, search)
    output = Path(sweep.options.output)
    check_folder("sweep.output", output)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"sweep.output: {output} cannot be made: {error.strerror}") from error
    with terminable(), _console(console, output / "log.txt") as shown, acknowledged(_teller(shown), STOPPING):
        for note in sweep.notes:
            shown.print(note, style="dim", markup=False, highlight=False, soft_wrap=True)
        return _run(sweep, output, shown)


def _teller(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


def read(
    files: Sequence[str | Path], overrides: Sequence[str] = (), search: Sequence[str | Path] | None = None
) -> Sweep:
    """Read and check a sweep without running anything; torch is not imported. Arguments and errors as for `run`."""
    documents = [read_yaml(find(name, search)) for name in files]
    values, setters, notes = _sweep_keys(documents)
    own = [text for text in overrides if text.removeprefix("--").startswith("sweep.")]
    common = [text for text in overrides if text not in own]
    settings = json.loads(json.dumps(values))
    for text in own:
        _override(settings, text)
    for name in (split_override(text)[0].replace("-", "_") for text in common):
        if name in MINE:
            raise UserError(f"command line: {name} is set by the sweep: use sweep.{MINE[name]}=…")
    ordered = [tuple(split_override(text)[0].split(".")) for text in own]

    def where(path: Path_) -> str:
        document = setters[path[1]] if path[1:] and path[1] in setters else setters["sweep"]
        given = any(path[: len(each)] == each for each in ordered)  # the command line set it, or what it is in
        opened = path not in document.lines and any(each[: len(path)] == path for each in ordered)
        return COMMAND_LINE if given or opened else document.where(path)

    options = check(settings, where)
    shared = [_part(each, ()) for each in documents]
    for each in shared:
        for name in each.values:
            if (instead := MINE.get(name.replace("-", "_"))) is not None:
                raise UserError(f"{each.where((name,))}: {name} is set by the sweep: use sweep.{instead}")

    members = []
    for variant in options.variants:
        own_keys = _part(setters["variants"], ("sweep", "variants", variant), options.variants[variant])
        loaded = merge([*shared, own_keys], common)
        # That a variant replaces a shared key is what it is for.
        meant = tuple(f"({own_keys.source}:{line})" for line in own_keys.lines.values())
        notes += [note for note in loaded.notes if not note.endswith(meant)]
        for seed in options.seeds:
            folder = Path(options.output) / variant / f"seed_{seed}"
            members.append(Member(variant, seed, loaded.config.replace(seed=seed, save=str(folder)), folder))
    lengths = {member.config.model.seq_length for member in members}
    if len(lengths) > 1:
        raise UserError(f"seq_length: all variants of a sweep need the same training length, not {sorted(lengths)}")
    texts = {each.source: Path(each.source).read_text(encoding="utf-8") for each in documents}
    return Sweep(options, tuple(members), tuple(dict.fromkeys(notes)), texts)


def _sweep_keys(documents: Sequence[Document]) -> tuple[dict[str, Any], dict[str, Document], list[str]]:
    """The keys of `sweep:` after merging, the file that set each (and `sweep` itself), and what replaced what."""
    values: dict[str, Any] = {}
    setters: dict[str, Document] = {}
    notes = []
    for document in documents:
        if "sweep" not in document.values:
            continue
        given = document.values["sweep"]
        if not isinstance(given, dict):
            raise UserError(f"{document.where(('sweep',))}: sweep is {show(given)}; it must be a mapping of keys")
        for name in given.keys() & values.keys():
            if values[name] != given[name]:
                old, new = setters[name].where(("sweep", name)), document.where(("sweep", name))
                notes.append(f"sweep.{name} ({old}) replaced ({new})")
        values |= given
        setters |= dict.fromkeys([*given, "sweep"], document)
    if not setters:
        names = ", ".join(document.source for document in documents)
        raise UserError(f"{names}: there is no sweep: mapping; a sweep needs one")
    return values, setters, sorted(notes)


def _run(sweep: Sweep, output: Path, console: Console) -> "list[Record]":
    begun = time.monotonic()
    finished = {member: _finished_steps(member) for member in sweep.members}  # refuses foreign run folders first of all
    if sweep.options.corpus is not None:
        _prepare(sweep.options.corpus, console)
    lengths = _lengths(sweep)
    jobs = _jobs(sweep, lengths, finished, console)
    total, todo = len(jobs), sum(any(job.work for job in pair) for pair in jobs.values())

    def forecast(left: float) -> None:
        meter.say(f"about {duration(left)} for {todo} of {total} runs, at the speed of the first steps")

    found: list[Record] = []
    with Meter(console, [job for pair in jobs.values() for job in pair], forecast=forecast) as meter:
        training, evaluation = (sum(pair[i].work for pair in jobs.values()) for i in (0, 1))
        meter.say(
            f"{todo} of {total} runs to do: {flop(training)} of training and {flop(evaluation)} of evaluation; "
            "how long that takes follows with the first steps"
            if todo
            else f"all {total} runs are done"
        )
        for number, member in enumerate(sweep.members, start=1):
            try:
                worked = any(job.work for job in jobs[member])
                _train(member, finished[member], jobs[member][0], meter)
                found += _evaluate(member, sweep.options.evaluate, lengths, jobs[member][1], meter)
            except FarfieldError as error:
                kept = f" ({len(found)} results are kept in {output})" if found else ""
                again = f"{member.name}: {error}{kept}; the same command carries on from here"
                raise (UserError if isinstance(error, UserError) else RunError)(again) from error
            _write(output, found, sweep)
            if worked and number < total and (left := seconds_left(meter.jobs)) is not None:
                meter.say(f"{number} of {total} runs done, about {duration(left)} left")
    from megatron.reports import tables

    tables.show(console, found)
    files = ", ".join(str(output / name) for name in ("report.html", "results.json", "results.csv", "results.md"))
    console.print(f"{files} ({duration(time.monotonic() - begun)})", markup=False, highlight=False, soft_wrap=True)
    return found


def _prepare(corpus: CorpusOptions, console: Console) -> None:
    from megatron.data.corpus import prepare

    job = Job(f"corpus {corpus.folder}", "prepare", 1.0)
    with Meter(console, [job]) as meter:
        meter.begin(job)
        made = prepare(
            corpus.sources, corpus.folder, tokenizer=corpus.tokenizer, vocab_file=corpus.vocab_file,
            merge_file=corpus.merge_file, vocab_size=corpus.vocab_size, split=corpus.split, seed=corpus.seed,
            workers=corpus.workers, progress=lambda stage, done, total: meter.update(done / max(total, 1), stage),
        )  # fmt: skip
    for note in made.notes:
        meter.say(note)
    sizes = ", ".join(f"{split} {size.tokens:,} tokens" for split, size in made.splits.items())
    meter.say(f"corpus {made.folder} {'is there' if made.reused else 'prepared'}: {sizes}")


def _lengths(sweep: Sweep) -> list[int]:
    from megatron.evaluation.request import parse_lengths

    chosen = sweep.options.evaluate
    train_length = sweep.members[0].config.model.seq_length
    if chosen.multiples is not None:
        return parse_lengths(",".join(f"{multiple}x" for multiple in chosen.multiples), [train_length])
    return parse_lengths(chosen.lengths, [train_length])


def _jobs(
    sweep: Sweep, lengths: list[int], finished: dict[Member, int], console: Console
) -> dict[Member, tuple[Job, Job]]:
    """A training and an evaluation job for each member, with the FLOPs that are left to do.

    Refuses what cannot be evaluated later, and says what can be evaluated at some lengths only.
    """
    from megatron.evaluation.run import ends_early, plan_for
    from megatron.model.build import check_position

    jobs, chosen = {}, sweep.options.evaluate
    for number, member in enumerate(sweep.members, start=1):
        config = member.config
        try:
            check_position(config.model, config.position)
        except UserError as error:
            raise UserError(f"sweep.variants.{member.variant}: {error}") from None
        scoring = plan_for(
            config, lengths, chosen.protocol, windows=chosen.windows, targets=chosen.targets, data=chosen.data,
            backend=chosen.backend, name=member.name,
        )  # fmt: skip
        training, sequence = config.training, config.model.seq_length
        batch = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
        tokens = (training.train_batch_size or batch * (config.launch.num_gpus or 1)) * sequence * training.train_iters
        if member.seed == sweep.options.seeds[0]:
            note = ends_early(member.variant, config, scoring.model, lengths)
            if note is not None:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
        left = max(0.0, 1 - finished[member] / training.train_iters)
        evaluated = left == 0 and _evaluated(member, _how(member, chosen, lengths)) is not None
        place = f"{number}/{len(sweep.members)}"
        jobs[member] = (
            Job(f"{place} train {member.name}", "train", scoring.model.flops_per_token(sequence) * tokens * left),
            Job(f"{place} evaluate {member.name}", "evaluate", 0.0 if evaluated else scoring.flops),
        )
    return jobs


def _finished_steps(member: Member) -> int:
    """Steps of the member's newest whole checkpoint, which its training would go on from; 0 if there is none.

    Raises:
        UserError: its folder holds a run with another configuration.
        RunError: it has checkpoints, but none is whole.
    """
    checkpoint = newest_whole(member.folder)
    if checkpoint is None:
        return 0
    found = Config.read(checkpoint / checkpoints.CONFIG).training_as_such()
    wanted = member.config.training_as_such()
    # None in the wanted configuration is settled when a run begins.
    others = [k for k, v in wanted.items() if v is not None and found.get(k) != v]
    if others:
        changes = ", ".join(f"{k} {show(found.get(k))} there, {show(wanted[k])} here" for k in others[:4])
        raise UserError(
            f"{member.folder}: holds a run with another configuration ({changes}); remove the folder, or choose "
            "another sweep.output"
        )
    return Progress.read(checkpoint).step


def _lacks_test(member: Member) -> bool:
    """Was a finished training killed between its last checkpoint and the end of its test?"""
    from megatron.data.datasets import sequence_range

    training, data = member.config.training, member.config.data
    tests = bool(data.test_data_paths) or (
        data.data_path is not None and sequence_range(data.split, "test", 10**9) is not None
    )
    if not (tests and training.eval_interval and training.eval_iters):
        return False
    return not recorded(member.folder, "test", training.train_iters)


def _train(member: Member, done: int, job: Job, meter: Meter) -> None:
    """Train a member to its end, or find it trained."""
    steps = member.config.training.train_iters
    if done >= steps and not _lacks_test(member):
        meter.skip(job)
        meter.say(f"{member.name}: trained already, {done} steps in {member.folder}")
        return
    if done:
        what = f"resumes after step {done} of {steps}" if done < steps else "is trained; its test is made up for"
        meter.say(f"{member.name}: {what}")
    # With `load` naming its own folder a run resumes.
    config = member.config.replace(load=str(member.folder)) if done else member.config
    config.save(member.beside(".yml"))
    metrics = member.folder / METRICS
    meter.begin(job, f"step {done} of {steps}")
    with open(member.beside(".txt"), "w", encoding="utf-8") as printed:
        begun = time.time()
        child = subprocess.Popen(
            [sys.executable, str(DEEPY), "train", str(member.beside(".yml"))],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **bound()},  # it ends with this process, however that goes
            start_new_session=True,  # Ctrl-C reaches this process alone, which hands it on once
        )
        try:
            while child.poll() is None:
                step = _last_step(metrics, begun)
                share = 0.0 if step is None else max(0, step - done) / max(1, steps - done)
                meter.update(share * job.work, f"step {done if step is None else step} of {steps}")
                time.sleep(POLL_SECONDS)
        finally:
            _end(child)
    if child.returncode != 0:
        raise _failure(child.returncode, member.beside(".txt"))
    if _finished_steps(member) < steps:
        raise RunError(f"training ended early without an error; its output is in {member.beside('.txt')}")
    meter.finish()


def _evaluate(member: Member, chosen: EvaluateOptions, lengths: list[int], job: Job, meter: Meter) -> "list[Record]":
    """Evaluate a trained member, or find it evaluated in the same way."""
    from megatron.evaluation.run import evaluate_runs

    how = _how(member, chosen, lengths)
    known = _evaluated(member, how)
    if known is not None:
        meter.skip(job)
        meter.say(f"{member.name}: evaluated already")
        return known

    meter.begin(job, "loading")
    found = evaluate_runs(
        [member.folder], lengths, chosen.protocol, chosen.windows, chosen.targets, data=chosen.data,
        output=member.folder, device=member.config.launch.device, precision=chosen.precision, backend=chosen.backend,
        names=[member.variant], progress=lambda length, done, total: meter.update(done, f"length {length:,}"),
    )  # fmt: skip
    meter.finish()
    receipt = {"how": how, "records": [_sha256(record) for record in found]}
    write_text(member.folder / RECEIPT, json.dumps(receipt, indent=1) + "\n")
    return found


def _how(member: Member, chosen: EvaluateOptions, lengths: list[int]) -> dict[str, Any]:
    """All that an evaluation's results depend on, as far as a sweep decides it."""
    checkpoint = checkpoints.resolve(member.folder)
    weights = (checkpoint / checkpoints.WEIGHTS).stat()
    return {
        "format": 3,  # 1 had no bootstrap, 2 was a receipt for the whole results.json
        "evaluate": chosen.model_dump(),
        "lengths": lengths,
        "method": member.variant,
        "weights": [checkpoint.name, weights.st_size, weights.st_mtime_ns],
    }


def _evaluated(member: Member, how: dict[str, Any]) -> "list[Record] | None":
    """The records of a member if it was evaluated in this way before and all of them are still in its results."""
    from megatron.reports.records import RESULTS, read

    results, known = member.folder / RESULTS, _receipt(member.folder / RECEIPT)
    if known.get("how") != how or not results.is_file():
        return None
    there = {_sha256(record): record for record in read(results)}
    wanted = known.get("records") or []
    return [there[name] for name in wanted] if wanted and all(name in there for name in wanted) else None


def _write(output: Path, found: "Sequence[Record]", sweep: Sweep) -> None:
    from megatron.evaluation.run import write_results
    from megatron.reports import report

    write_results(output, found)
    texts = dict(sweep.texts)
    for member in sweep.members:
        if any(record.method == member.variant and record.seed == member.seed for record in found):
            texts[str(member.beside(".yml"))] = member.config.text()
    missing = len(sweep.members) - len({(record.method, record.seed) for record in found})
    title = f"Length extrapolation: {output.name}" + (f" ({missing} runs to come)" if missing else "")
    report.write(output / "report.html", found, title=title, configurations=texts)


def _last_step(metrics: Path, since: float) -> int | None:
    """The newest step in a run's metrics.jsonl, if that was written since a point in time."""
    try:
        if metrics.stat().st_mtime < since:
            return None
        with open(metrics, "rb") as file:
            file.seek(max(0, file.seek(0, 2) - (1 << 14)))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line end is still being written
    except OSError:
        return None
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a training that still runs when the sweep is leaving: it saves after its step, however long that takes."""
    if child.poll() is not None:
        return
    child.terminate()
    try:
        child.wait()
    except BaseException:  # asked a second time
        child.kill()
        child.wait()
        raise


def _failure(code: int, printed: Path) -> FarfieldError:
    """A failed training's own error line, with its kind."""
    lines = printed.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = "; ".join(errors) if errors else f"training ended with exit code {code}; its output is in {printed}"
    return UserError(message) if code == UserError.exit_code and errors else RunError(message)


def _part(document: Document, path: Path_, values: dict[str, Any] | None = None) -> Document:
    """The mapping under a path as a document of its own with its lines. Without a path: all but `sweep`."""
    if not path:
        kept = {name: value for name, value in document.values.items() if name != "sweep"}
        return replace(document, values=kept, lines={p: n for p, n in document.lines.items() if p[0] != "sweep"})
    lines = {p[len(path) :]: n for p, n in document.lines.items() if p[: len(path)] == path and len(p) > len(path)}
    return Document(document.source, values or {}, lines)


def _override(settings: dict[str, Any], text: str) -> None:
    """Put `sweep.a.b=value` into the mapping."""
    name, value = split_override(text)
    *outer, last = name.split(".")[1:]
    inside = settings
    for part in outer:
        if not isinstance(inside.setdefault(part, {}), dict):
            raise UserError(f"command line: {name}: sweep.{part} is {show(inside[part])}, not a mapping")
        inside = inside[part]
    inside[last] = value


def _receipt(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _sha256(record: "Record") -> str:
    return hashlib.sha256(record.model_dump_json().encode()).hexdigest()


@contextmanager
def _console(given: Console | None, log: Path) -> Iterator[Console]:
    if given is not None:
        yield given
        return
    with run_console(log) as console, explained(log):
        yield console
