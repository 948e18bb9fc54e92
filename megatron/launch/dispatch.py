"""Where a training runs: as a rank that somebody started, on this machine, on others over ssh, or as a SLURM job."""

from collections.abc import Callable, Iterable

from megatron.config.load import Loaded
from megatron.distributed import surroundings
from megatron.distributed.devices import Machine
from megatron.launch import local, nodes, slurm
from megatron.training.preflight import Settled, afar, preflight


def train(
    load_config: Callable[[bool], Loaded], print_notes: Callable[[Iterable[str]], object], *, dry_run: bool = False
) -> int:
    """Train as a configuration says, wherever it says.

    Args:
        load_config: reads the configuration; told whether another rank says what there is to say about it.
        print_notes: prints lines beside the results.
        dry_run: print the resolved configuration, or the batch script, and do nothing else.

    Returns:
        0, or 128 + n if signal n ended the run early (it saved a checkpoint first).
    """
    started = surroundings.told()
    is_main = started is None or started.place.rank == 0
    with local.told_once(started):
        loaded = load_config(not is_main)
        launch = loaded.config.launch
        if started is not None:
            started = surroundings.told(port=launch.master_port)
        if slurm.wanted(launch):
            return _submit(loaded, print_notes, dry_run=dry_run)
        over_ssh = started is None and nodes.wanted(launch)
        if over_ssh:
            settled = afar(loaded.config, nodes.places(nodes.read_hosts(launch))[0][0])
        else:
            place = None if started is None else started.place
            settled = preflight(loaded.config, Machine.here(), place=place, dry=dry_run)
        if dry_run:
            if is_main:
                _print_config(loaded, settled, print_notes)
            return 0
        if is_main:
            print_notes((*settled.notes, *nodes.notes(launch), *filter(None, [surroundings.job_line()])))
        with loaded.placing_errors():
            return nodes.train(loaded.config) if over_ssh else local.train(settled, started)


def _print_config(loaded: Loaded, settled: Settled, print_notes: Callable[[Iterable[str]], object]) -> None:
    """Print the configuration, and nothing of one that is refused: it may be meant for a file."""
    _check_position(loaded)
    print(settled.config.text(), end="")
    print_notes(settled.notes)


def _check_position(loaded: Loaded) -> None:
    from megatron.model.build import check_position_options  # torch takes seconds

    with loaded.placing_errors():
        check_position_options(loaded.config.model, loaded.config.position)


def _submit(loaded: Loaded, print_notes: Callable[[Iterable[str]], object], *, dry_run: bool) -> int:
    """Hand a run to SLURM, or print its batch script. What its ranks would refuse is refused here, as far as that
    can be known."""
    settled = afar(loaded.config)
    job = slurm.training(loaded.config)
    slurm.check_start(loaded.config)
    _check_position(loaded)
    with loaded.placing_errors():
        local.check_data(loaded.config)
        local.check_save(loaded.config)
    print_notes(settled.notes)
    if dry_run:
        print(slurm.script(job), end="")
        return 0
    for line in slurm.described(job, slurm.submit(job)):
        print(line)
    return 0
