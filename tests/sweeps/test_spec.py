"""Reading of a sweep file: configurations of its variants, and errors with line numbers."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.method_names import find_missing_published_keys
from megatron.options.position import SOFTMAX_TYPES, PositionOptions
from megatron.position.registry import list_encodings, list_processors, list_temperatures
from megatron.sweeps.spec import find_ablations, read_sweep
from megatron.utils.errors import UserError

from .conftest import BASE, ROOT, Trainer, run, write


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("output: out", "outptu: out"), "sweep.yml:16: unknown key 'sweep.outptu'; did you mean sweep.output?"),
        (("windows: 3", "num_wndows: 3"), "'sweep.evaluate.num_wndows'; did you mean sweep.evaluate.num_windows?"),
        (("windows: 3", "windows: 0"), "sweep.yml:21: sweep.evaluate.windows is 0; it must be at least 1"),
        (("windows: 3", "protocol: first"), "protocol is first; choose from last, nonoverlapping"),
        (("multiples: [1, 4]", "multiples: [0.3]"), "sweep.evaluate.multiples: 0.3x is "),
        (("multiples: [1, 4]", "lengths: [0.3x]"), "sweep.evaluate.lengths: 0.3x is "),
        (("multiples: [1, 4]", "lengths: [1x, 4y]"), "sweep.evaluate.lengths is ['1x', '4y']; '4y' is not"),
        (("windows: 3", "num_windows: 3000"), "sweep.yml:21: sweep.evaluate.num_windows is 3000, but the text"),
        (("windows: 3", "windows: 3, num_windows: 4"), "num_windows is 4; an older name of this key"),
        (("multiples: [1, 4]", "lengths: '1x,4y'"), "sweep.yml:21: sweep.evaluate.lengths is 1x,4y; '4y' is not"),
        (("windows: 3", "rope: yarn:x"), "sweep.yml:21: sweep.evaluate.rope"),
        (("windows: 3", "windows: 3000"), "sweep.yml:21: sweep.evaluate.windows is 3000, but the text"),
        (("multiples: [1, 4]", "multiples: [4096]"), "too few for the largest length"),
        (("rotary: {pos_emb: rotary}", "rotary: {pos_emb: rotery}"), "sweep.yml:19: "),
        (("rotary: {pos_emb: rotary}", "rotary: {pos_em: rotary}"), "sweep.yml:19: unknown key 'pos_em'"),
        (("rotary: {pos_emb: rotary}", "a/b: {pos_emb: rotary}"), "variant 'a/b': variant names become folder names"),
        (("rotary: {pos_emb: rotary}", "rotary:"), "sweep.variants.rotary is empty (null); give it keys, write {}, or"),
        (("rotary: {pos_emb: rotary}", "rotary: {branch: {from: b, step: 2}}"), "sweep.variants.rotary.branch is {"),
        (("output: out", "output: out\n      seeds: []"), "sweep.seeds is []; it must be a list of at least 1 value"),
        (("output: out", "output: out\n      jobs: '2'"), "sweep.jobs is '2'; it must be an integer or auto"),
        (("rotary: {pos_emb: rotary}", "rotary: {seed: 1}"), "sweep.yml:19: seed is set by the sweep: use sweep.seeds"),
        (("rotary: {pos_emb: rotary}", "rotary: {seq_length: 32}"), "so sweep.evaluate.lengths must set"),
        (("train_iters: 6", "train_iters: 6\n    save: runs/x"), "sweep.yml:9: save is set by the sweep: use"),
        (("output: out", "output: out\n      seeds: [1, 1]"), "sweep.yml:17: sweep.seeds repeats a seed"),
        (("output: out", "output: text/1.txt/x"), "sweep.output is text/1.txt/x, but text/1.txt is a file; name"),
        (("sources: [text]", "sources: [nothing]"), "nothing"),
        (("variants:", "variants: {}\n      varients:"), "unknown key 'sweep.varients'; did you mean sweep.variants?"),
    ],
)  # fmt: skip
def test_errors_in_the_file_are_reported_before_training(
    trainer: Trainer, change: tuple[str, str], message: str
) -> None:
    assert change[0] in BASE
    write(BASE.replace(*change))
    with pytest.raises(UserError) as caught:
        run()
    assert message in str(caught.value)
    assert trainer.asked == []


def test_missing_keys_name_each_file_once(trainer: Trainer) -> None:
    write(BASE.replace("    hidden_size: 16\n", ""))
    with pytest.raises(UserError, match=r"^sweep\.yml: hidden_size is missing \(.*\); set it in a file or as \S+$"):
        run()


def test_mistakes_on_the_command_line(trainer: Trainer) -> None:
    for override, message in (
        ("seed=3", "command line: seed is set by the sweep: use sweep.seeds"),
        ("sweep.output.x=3", "sweep.output is out, not a mapping"),
        ("sweep.evaluat.windows=3", "command line: unknown key 'sweep.evaluat'; did you mean sweep.evaluate?"),
        ("sweep.evaluate.windows=0", "command line: sweep.evaluate.windows is 0"),
        ("sweep.evaluate={windws: 3}", "command line: unknown key 'sweep.evaluate.windws'"),
        ("sweep.seeds=3", "command line: sweep.seeds is 3"),
        (
            "sweep.seeds=[5000000000]",
            "command line: item 1 of sweep.seeds is 5000000000; it must be at most 4294967295",
        ),
        ("num_layrs=3", "num_layers"),
        ("sweep.variants.mine.pos_emb=rotray", "command line, variant 'mine': pos_emb rotray is not available"),
        ("sweep.variants.mine.score_processor_options.wdth=3", "command line, variant 'mine': score_processor"),
        ("sweep.variants.mine.num_layrs=3", "command line, variant 'mine': unknown key 'num_layrs'"),
    ):
        with pytest.raises(UserError) as caught:
            run(override)
        assert message in str(caught.value)


def test_errors_of_a_member_name_where_the_value_was_set(place: Path) -> None:
    write(BASE.replace("rotary: {pos_emb: rotary}", "rotary: {pos_emb: rotary, device: cuda}"))
    with pytest.raises(UserError, match=r"^sweep.yml:\d+: device is cuda, but this machine has no CUDA device"):
        _ = read_sweep(["sweep.yml"]).members[0].resolved_run


def test_files_without_a_sweep(place: Path) -> None:
    with pytest.raises(UserError, match="no sweep: mapping found"):
        read_sweep(["125M"])
    write("sweep: [1]")
    with pytest.raises(UserError, match=r"sweep.yml:1: sweep is \[1\]; it must be a mapping of keys"):
        read_sweep(["quickstart", "sweep.yml"])


def test_later_sweep_files_override_key_by_key(place: Path) -> None:
    write(BASE, "base.yml")
    over = "num_layers: 2\nsweep:\n  output: elsewhere\n  seeds: [1234]\n  variants:\n    t5: {pos_emb: t5}\n"
    write(over)
    found = read_sweep(["base.yml", "sweep.yml"])
    assert [(m.variant, str(m.folder), m.config.model.num_layers) for m in found.members] == [
        ("t5", "elsewhere/t5/seed_1234", 2)
    ]
    assert (found.options.evaluate.num_windows, found.options.corpus.folder) == (3, "corpus")
    assert found.notes == (
        "sweep.output (base.yml:16) replaced (sweep.yml:3)",
        "sweep.variants (base.yml:18) replaced (sweep.yml:5)",
    )
    assert set(found.texts) == {"base.yml", "sweep.yml"}
    write(over.replace("pos_emb: t5", "pos_em: t5"))
    with pytest.raises(UserError, match=r"sweep.yml:6: unknown key 'pos_em'"):
        read_sweep(["base.yml", "sweep.yml"])
    write(BASE.replace("windows: 3", "windows: 0"), "base.yml")
    with pytest.raises(UserError, match=r"base.yml:21: sweep.evaluate.windows is 0"):
        read_sweep(["base.yml", "sweep.yml"])
    with pytest.raises(UserError, match=r"command line: sweep.output.x: sweep.output is elsewhere, not a mapping"):
        read_sweep(["base.yml", "sweep.yml"], ["sweep.output.x=3"])


@pytest.mark.parametrize("key", ["windows", "num_windows"])
def test_an_older_name_of_a_key_is_the_same_key(place: Path, key: str) -> None:
    """Either name sets a key, overrides the other, and gives the same stored description."""
    write(BASE.replace("windows: 3", f"{key}: 3"))
    for overrides, expected in (([], 3), (["sweep.evaluate.windows=2"], 2), (["sweep.evaluate.num_windows=2"], 2)):
        options = read_sweep(["sweep.yml"], overrides).options.evaluate
        assert options.num_windows == expected
        assert options.model_dump(by_alias=True)["windows"] == expected


def test_lengths_of_the_command_line_replace_multiples(place: Path) -> None:
    write(BASE)
    for text in ("sweep.evaluate.lengths=[2x]", "sweep.evaluate.lengths=2x", "sweep.evaluate.multiples=[2]"):
        options = read_sweep(["sweep.yml"], [text]).options.evaluate
        assert (options.lengths, options.multiples) == (None, [2])


def test_the_quickstart_is_valid() -> None:
    found = read_sweep([str(ROOT / "configs" / "quickstart.yml")])
    assert [member.variant for member in found.members] == ["rotary", "kerple_log", "cdape"]
    assert {member.config.model.seq_length for member in found.members} == {64}
    assert found.members[2].config.position.score_processor == "cdape"
    assert found.options.evaluate.multiples == [1, 2, 4, 8, 16, 32]
    assert found.notes == ()


def test_methods_without_the_keys_of_their_files_are_noted_once(place: Path) -> None:
    write(BASE.replace("rotary: {pos_emb: rotary}", "fox: {pos_emb: fox}").replace("alibi", "fire"))
    (note,) = read_sweep(["sweep.yml"], ["sweep.seeds=[1, 2]"]).notes
    assert note.startswith("fox, fire: their files in configs/position, which define them as published, also set pos_")
    assert read_sweep(["sweep.yml"], ["pos_emb_per_layer=false"]).notes == ()
    assert read_sweep(["sweep.yml"], ["sweep.differences=[All layers share parameters]"]).notes == ()


def test_zoo_has_every_method_at_one_budget_and_all_its_questions() -> None:
    configs = ROOT / "configs"
    zoo = read_sweep([str(configs / "quickstart.yml"), str(configs / "zoo.yml")])
    quickstart = read_sweep([str(configs / "quickstart.yml")])
    assert (zoo.options.output, zoo.options.records) == ("runs/zoo", "docs/results/zoo")
    assert zoo.options.evaluate == quickstart.options.evaluate
    texts = [member for member in zoo.members if member.benchmark is None]
    positions = {member.variant: member.config.position for member in texts}
    unpublished = {
        member.variant: find_missing_published_keys(member.config, member.layers.values)
        for member in texts
        if member.variant in list_encodings()
    }
    assert unpublished.keys() == set(list_encodings()) - {"rotary_local"}  # in all layers it is rotary
    assert not any(unpublished.values())
    assert {position.score_processor for position in positions.values()} == {"none", *list_processors()}
    assert {position.temperature for position in positions.values() if position.period == 1} == {
        "none", *list_temperatures(),
    }  # fmt: skip
    assert {str(position.softmax_type) for position in positions.values()} == set(SOFTMAX_TYPES)
    positional = {"save", "max_position_embeddings", "attention_output_gate", *PositionOptions.model_fields}
    groups = {name: [m for m in zoo.members if m.benchmark == name] for name in (None, *zoo.options.benchmarks)}
    for text in texts:
        text_keys, quickstart_keys = text.config.to_flat(), quickstart.members[0].config.to_flat()
        differing = {key for key, value in text_keys.items() if quickstart_keys[key] != value}
        assert differing <= {*positional, "seed"}
    for name, members in groups.items():
        budgets = [
            {key: value for key, value in member.config.to_flat().items() if key not in {*positional, "seed"}}
            for member in members
        ]
        assert all(budget == budgets[0] for budget in budgets), name
    # Questions: CDAPE on each encoding, also on the new ones in the tasks, and some with several seeds.
    pairs = {base: variant for name, variant, base in find_ablations(zoo) if name == "cdape"}
    assert pairs.keys() >= {
        "none",
        "rotary",
        "alibi",
        "kerple_log",
        "fire",
        "fox",
        "bam",
        "pope",
        "ssmax+rotary",
        "rnope_swa",
    }
    assert {member.variant for member in groups[None]} == positions.keys()
    asked = {"rotary", "kerple_log", "fox", "bam", "pope", "ssmax+rotary", "rnope_swa"}
    for name in zoo.options.benchmarks:
        assert {member.variant for member in groups[name]} >= {*asked, *(pairs[base] for base in asked)}, name
    seeds_by_variant: dict[tuple[str | None, str], list[int]] = {}
    for member in zoo.members:
        seeds_by_variant.setdefault((member.benchmark, member.variant), []).append(member.seed)
    assert set(map(tuple, seeds_by_variant.values())) == {(1234, 1235, 1236)}


def test_reading_a_sweep_needs_no_torch() -> None:
    code = "import sys, megatron.sweeps.spec as s; s.read_sweep(['quickstart']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
