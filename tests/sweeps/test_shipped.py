"""Shipped experiments: each can be read in both sizes, and its tables match its variants."""

from pathlib import Path

import pytest

from megatron.sweeps.spec import Sweep, read_sweep

from .conftest import ROOT

FOLDER = ROOT / "configs" / "experiment"
SIZES = ("small", "paper")
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yml") if path.stem not in SIZES)
SHAPES = {"kerple": "162M", "dape": "125M", "exploring": "125M", "muon": "125M", "drope": "125M", "context": "125M"}
NO_PAPERS = ("muon", "drope", "context")  # not compared with a published table
PAPERS = [name for name in EXPERIMENTS if name not in NO_PAPERS]


def small(name: str) -> Sweep:
    return read_sweep(["small", name])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_both_sizes_can_be_read(name: str) -> None:
    ours = small(name)
    corpus = ["data_path=data/books_text_document"]
    theirs = read_sweep([SHAPES[name.split("_")[0]], "slurm_a100", "paper", name], corpus)
    assert [member.name for member in ours.members] == [member.name for member in theirs.members]
    assert ours.output_folder == Path("runs/small") / name
    assert theirs.output_folder == Path("runs/paper") / name
    assert all(member.folder.parent.parent == Path("runs/small/runs") for member in ours.members)
    assert all(member.results.is_relative_to(ours.output_folder) for member in ours.members)


def test_a_run_needed_by_several_sweeps_is_one_run() -> None:
    sweeps = {name: small(name) for name in EXPERIMENTS}
    folders = {
        name: {(member.variant, member.seed): member.folder for member in sweep.members}
        for name, sweep in sweeps.items()
    }
    assert folders["kerple_t3"]["log", 1236] == folders["kerple_t5"]["log", 1236]
    assert folders["dape_t10"]["cdape", 1235] == folders["dape_t4"]["k3", 1235] == folders["dape_t9"]["cdape", 1235]
    everything = [folder for found in folders.values() for folder in found.values()]
    assert len(set(everything)) < 0.8 * len(everything)
    # A folder's name identifies what is trained; no other training has it.
    trained: dict[Path, dict[str, object]] = {}
    for sweep in sweeps.values():
        for member in sweep.members:
            assert trained.setdefault(member.folder, member.config.get_training_fingerprint()) == (
                member.config.get_training_fingerprint()
            )


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quoted_lengths_are_multiples_that_are_scored(name: str) -> None:
    """Lengths of quoted numbers are evaluated too, except the longest of some, so that both can be compared."""
    options = small(name).options
    for table in options.published:
        multiples = {length / table.train_length for length in table.lengths}
        assert len(multiples & set(options.evaluate.multiples or ())) >= min(2, len(multiples)) - (name == "dape_f7")
        assert all(value is None or value > 0 for values in table.rows.values() for value in values) or (
            table.metric == "delta_perplexity"
        )


@pytest.mark.parametrize("name", PAPERS)
def test_stated_training_settings_match_papers_and_configurations(name: str) -> None:
    """Batch, vocabulary, minimum learning rate and seeds are stated under every table and match ours.

    The small size matches its description.
    """
    sweep = small(name)
    reported = " ".join(sweep.options.differences)
    for word in ("seeds", "vocabulary", "min_lr", "least learning rate"):
        assert word in reported, word
    assert "sequences at a time" in reported or "a step has 2,048 tokens at every length" in reported
    seeds = {"one": "here there is one", "three": "here there are three"}
    output = {number for number, text in seeds.items() if text in reported}
    assert output <= {"one" if len(sweep.options.seeds) == 1 else "three"}
    for config in (member.config for member in sweep.members):
        batch = config.training.train_micro_batch_size_per_gpu
        assert (batch, config.model.seq_length) == (32, 64) or (
            name == "dape_f3" and batch * config.model.seq_length == 2048
        )
        assert config.optimizer.min_lr == pytest.approx(config.optimizer.optimizer.params.lr / 10)


SWEEPS = [
    ["quickstart"],
    ["quickstart", "zoo"],
    ["quickstart", "zoo_3m"],
    ["evidence"],
    *(["small", name] for name in EXPERIMENTS),
    *([path.stem] for path in sorted((ROOT / "configs/task").glob("*.yml")) if path.stem != "chomsky_paper"),
    ["chomsky", "chomsky_paper"],
]


@pytest.mark.parametrize("files", SWEEPS, ids=" ".join)
def test_a_processor_is_compared_at_equal_parameters(files: list[str]) -> None:
    """A processor is compared with its encoding alone, with the same parameters shared over layers.

    The gain of DAPE or CDAPE is then the processor's alone.
    """
    positions = {
        member.variant: member.config.position for member in read_sweep(files).members if member.benchmark is None
    }
    for name, position in positions.items():
        plain = [
            other
            for other in positions.values()
            if other.processors == ["none"] and other.encodings == position.encodings
        ]
        if plain:
            assert position.pos_emb_per_layer in {other.pos_emb_per_layer for other in plain}, name


def test_papers_parameters_are_decayed_as_their_code_decays_them() -> None:
    for name in PAPERS:
        sweep = small(name)
        if name.startswith("kerple"):  # its published settings use no weight decay
            assert all(member.config.optimizer.weight_decay == 0 for member in sweep.members), name
            continue
        assert all(member.config.optimizer.decay_positions for member in sweep.members), name
        assert any("decay" in line for line in sweep.options.differences), name
