"""Keys of a task: derived values, and keys that they exclude."""

from pathlib import Path

import pytest

from megatron.config.load import load_config
from megatron.utils.errors import UserError

MODEL = "num_layers: 2\nhidden_size: 16\nnum_attention_heads: 2\ntrain_iters: 3\n"


def loaded(tmp_path: Path, text: str, *overrides: str):
    (tmp_path / "task.yml").write_text(MODEL + text, encoding="utf-8")
    return load_config([tmp_path / "task.yml"], overrides)


COUPLED = "task: addition\ntask_length: 4\ntask_options: {positions: coupled, max_digits: 40}\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("task: even_pairs\ntask_length: 40\n", 41),
        ("task: duplicate_string\ntask_length: 40\n", 120),
        ("task: modular_arithmetic\ntask_length: 40\n", 40),
        ("task: compute_sqrt\ntask_length: 40\ntask_options: {compute_tokens: 2}\n", 140),
        ("task: copy_string\ntask_length: 40\n", 82),
    ],
)
def test_the_sequence_length_follows(tmp_path: Path, text: str, expected: int) -> None:
    found = loaded(tmp_path, text)
    assert found.config.model.seq_length == expected
    assert any(note.endswith(f"sets seq_length to {expected}") for note in found.notes)
    found.config.save(tmp_path / "saved.yml")
    assert load_config([tmp_path / "saved.yml"]).config == found.config


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "task: even_pars\ntask_length: 4\n",
            r"task.yml:5: unknown task even_pars; did you mean even_pairs\?",
        ),
        ("task: even_pars\n", r"^[^\n]*task.yml:5: unknown task even_pars; [^\n]*$"),  # and no missing task_length
        ("task: even_pairs\n", "task_length is missing"),
        ("task: even_pairs\ntask_length: 4\nseq_length: 9\n", "task.yml:7: seq_length is 9, but the longest .* has 5"),
        ("task: mqar\ntask_length: 65\n", "task.yml:6: task_length is 65: 8 pairs"),
        ("task: mqar\ntask_length: 64\ntask_options: {pairs: many}\n", "task.yml:7: task_options.pairs is 'many'"),
        ("task: mqar\ntask_length: 64\ntask_shortest_length: 80\n", "task_shortest_length 80 is more than task_length"),
        ("seq_length: 9\ntask_length: 4\n", "task_length is given without task"),
        ("task: even_pairs\ntask_length: 4\ndata_path: data/x\n", "data_path and task exclude each other"),
        ("task: even_pairs\ntask_length: 4\neod_mask_loss: true\n", "eod_mask_loss and task exclude each other"),
        (
            "task: even_pairs\ntask_length: 4\ncontext_parallel_size: 2\n",
            "context_parallel_size 2: .* differ in length",
        ),
        (COUPLED + "pos_emb: [rotary, alibi]\n", "pos_emb rotary, alibi: addition provides its own positions"),
        (COUPLED + "pos_emb: none\n", "pos_emb none: addition provides its own positions"),
        (
            COUPLED + "pos_emb: learned\nmax_position_embeddings: 20\n",
            "max_position_embeddings is 20, but addition needs 43 rows of the learned table",
        ),
        (
            COUPLED + "pos_emb: rotary\nrandomized_positions: 90\n",
            "randomized_positions is 90, but addition provides its own positions",
        ),
        ("task: even_pairs\ntask_length: 4\npipe_parallel_size: 2\n", "pipe_parallel_size 2: .* differ in length"),
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        loaded(tmp_path, text)


def test_another_task_drops_the_options_of_the_first(tmp_path: Path) -> None:
    text = "task: mqar\ntask_length: 64\ntask_options: {pairs: 4}\n"
    found = loaded(tmp_path, text, "task=copy_string")
    assert found.config.data.task_options == {}
    assert found.config.model.seq_length == 130


def test_task_positions_determine_the_table_size(tmp_path: Path) -> None:
    def table_size(text: str) -> int | None:
        return loaded(tmp_path, text + "pos_emb: learned\n").config.model.max_position_embeddings

    assert table_size(COUPLED) == 43
    assert table_size(COUPLED.replace("max_digits: 40", "max_digits: 4")) == 16  # at least seq_length tokens
    assert table_size("task: addition\ntask_length: 4\n") is None
