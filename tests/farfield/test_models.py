"""A run in a script, compared with plain PyTorch, the commands, and formulas."""

import copy
import math
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from permissions import unprivileged, unreadable
from tiny_runs import make_run

import farfield
from megatron.data.tokenizers import ByteTokenizer

CDAPE = {"pos_emb": "kerple_log", "score_processor": "cdape", "score_processor_options": {"width": 4}}


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> farfield.Model:
    return farfield.load(make_run(str(tmp_path_factory.mktemp("runs") / "cdape"), corpus, **CDAPE), device="cpu")


def load(corpus: Path, folder: Path, **keys: object) -> farfield.Model:
    return farfield.load(make_run(str(folder / "run"), corpus, **keys), device="cpu")


TEXT = " ".join(str(number % 53) for number in range(200))


def test_losses_match_the_logits(model: farfield.Model) -> None:
    tokens = model.encode(TEXT)
    scores = model.score(TEXT, 24)
    assert scores.values.shape == ((len(tokens) - 1) // 24, 24)
    window = torch.tensor(tokens[24 : 2 * 24 + 1])
    with torch.no_grad():
        logits = model.module(window[None, :-1])[0].double()
    expected = torch.nn.functional.cross_entropy(logits, window[1:], reduction="none")
    np.testing.assert_allclose(scores.values[1], expected.numpy(), rtol=1e-5)
    assert scores.tokens[1].tolist() == window[1:].tolist()
    assert scores.perplexity == pytest.approx(math.exp(scores.values.mean()))
    assert scores.average_by_position()[3] == pytest.approx(scores.values[:, 3].mean())


def test_the_last_targets_of_a_window_have_the_others_before_them(model: farfield.Model) -> None:
    whole, last = model.score(TEXT, 96), model.score(TEXT, 96, stride=8)
    np.testing.assert_allclose(last.values[0], whole.values[0, -8:], rtol=1e-5)
    flat = last.tokens.reshape(-1).tolist()
    assert flat == model.encode(TEXT)[89 : 89 + len(flat)], "no target is left out, none is scored twice"


def test_results_with_arrays_compare_by_identity_and_print_in_one_line(model: farfield.Model) -> None:
    losses, maps = model.score(TEXT, 24), model.attention_maps(TEXT[:40], layers=[0])[0]
    for result, other in ((losses, model.score(TEXT, 24)), (maps, model.attention_maps(TEXT[:40], layers=[0])[0])):
        assert result == result
        assert result != other
        assert len({result, other, result}) == 2
    windows = len(losses.values)
    assert repr(losses) == f"<TokenLosses: {windows} windows × 24 targets, loss {losses.loss:.4f} nats per token>"
    heads, queries, keys = maps.scores.shape
    assert repr(maps) == f"<AttentionMaps: {heads} heads × {queries} queries × {keys} keys, a bias>"


def test_scores_match_evaluate(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_run("run", corpus, pos_emb="alibi")
    Path("text.txt").write_text(TEXT)
    (row,) = farfield.evaluate(run, "out", lengths=[40], protocol="nonoverlapping", data="text.txt")
    model = farfield.load(run, device="cpu")
    scores = model.score([*model.encode(TEXT), model.tokenizer.eod], 40)
    assert row["tokens"] == scores.values.size
    assert row["perplexity"] == pytest.approx(scores.perplexity, rel=1e-6)
    assert farfield.read_results("out")[0]["perplexity"] == row["perplexity"]


def test_bias_is_the_formula(corpus: Path, tmp_path: Path) -> None:
    model = load(corpus, tmp_path, pos_emb="alibi", attention_window=40)
    table = model.bias_table(64)
    slopes = 2.0 ** (-8 * np.arange(1, model.num_heads + 1) / model.num_heads)
    expected = -slopes[:, None] * np.arange(64.0)
    expected[:, 40:] = -np.inf
    np.testing.assert_allclose(table, np.broadcast_to(expected, table.shape), rtol=1e-6)
    assert table.shape == (model.num_layers, model.num_heads, 64)


def test_maps_are_the_softmax_of_their_logits(model: farfield.Model) -> None:
    maps = model.attention_maps(TEXT[:80])
    assert sorted(maps) == list(range(model.num_layers))
    length = len(model.encode(TEXT[:80]))
    for layer, found in maps.items():
        assert found.weights.shape == (model.num_heads, length, length)
        hidden = np.triu(np.ones((length, length), dtype=bool), 1)
        assert np.isnan(found.weights[:, hidden]).all()
        assert not np.isnan(found.weights[:, ~hidden]).any()
        logits = torch.from_numpy(found.logits).double().nan_to_num(-torch.inf)
        np.testing.assert_allclose(np.nan_to_num(found.weights), logits.softmax(-1).numpy(), atol=1e-6)
        distances = np.subtract.outer(np.arange(length), np.arange(length))
        table = model.bias_table(length)[layer]
        np.testing.assert_allclose(found.bias[:, ~hidden], table[:, distances[~hidden]], rtol=1e-5, atol=1e-6)
        assert np.abs(found.processor_term[:, ~hidden]).max() > 1e-4
    (only,) = model.attention_maps(TEXT[:80], layers=[1]).items()
    np.testing.assert_array_equal(only[1].weights, maps[1].weights)


def test_single_values_and_negative_layers_are_accepted(model: farfield.Model) -> None:
    last = model.attention_maps(TEXT[:20], layers=[-1])
    assert list(last) == [model.num_layers - 1]
    assert last.keys() == model.attention_maps(TEXT[:20], layers=[model.num_layers - 1]).keys()
    options = {"max_new_tokens": 6, "temperature": 0}
    assert model.generate("1 2 3", stop=" ", **options) == model.generate("1 2 3", stop=[" "], **options)
    scores = model.score(TEXT, 24)
    assert scores.losses is scores.values


def test_bytes_are_the_tokens_of_the_bytes_tokenizer(model: farfield.Model) -> None:
    with pytest.raises(farfield.UserError, match=r"^text is b'1 2'; only the bytes tokenizer reads bytes; give"):
        model.score(b"1 2")
    read_bytes = farfield.Model(model._loaded, ByteTokenizer(), {})
    assert read_bytes._to_tokens("né".encode()).tolist() == read_bytes.encode("né") == [110, 195, 169]


def test_rotary_has_maps_and_no_bias(corpus: Path, tmp_path: Path) -> None:
    model = load(corpus, tmp_path, pos_emb="rotary")
    assert model.attention_maps(TEXT[:40])[0].bias is None
    assert np.nanmax(np.abs(model.attention_maps(TEXT[:40])[0].processor_term)) == 0
    with pytest.raises(farfield.UserError, match="rotary adds no bias to the scores"):
        model.bias_table()


def test_a_training_loop_leaves_no_dropout(corpus: Path, tmp_path: Path) -> None:
    """Losses, texts and maps use the trained weights and no dropout; the training loop may continue."""
    model = load(corpus, tmp_path, pos_emb="transformer_xl", hidden_dropout=0.4, attention_dropout=0.4)
    before = model.score(TEXT, 24)
    model.module.train()
    frozen = next(model.module.children()).eval()
    tokens = torch.tensor([model.encode(TEXT)[:25]])
    model.module(tokens[:, :-1]).logsumexp(-1).sum().backward()
    torch.optim.SGD(model.module.parameters(), lr=1e-3).step()
    trained = model.score(TEXT, 24)
    maps, text = model.attention_maps("1 2 3", layers=[0])[0], model.generate("1 2 3", max_new_tokens=5, seed=3)
    assert model.module.training
    assert not frozen.training
    model.module.eval()
    assert not np.array_equal(trained.values, before.values)
    assert np.array_equal(trained.values, model.score(TEXT, 24).values)
    assert np.array_equal(maps.weights, model.attention_maps("1 2 3", layers=[0])[0].weights, equal_nan=True)
    assert text == model.generate("1 2 3", max_new_tokens=5, seed=3)


def test_texts_consist_of_the_likeliest_tokens(model: farfield.Model) -> None:
    written = model.generate("1 2 3", maximum_tokens=5, temperature=0)
    tokens = model.encode("1 2 3")
    for _ in range(5):
        with torch.no_grad():
            tokens.append(int(model.module(torch.tensor([tokens]))[0, -1, : model.tokenizer.vocab_size].argmax()))
    assert written.split() == model.decode(tokens[3:]).split()
    both = model.generate(["1 2 3", "7"], maximum_tokens=5, temperature=0)
    assert both[0] == written
    assert model.generate([]) == []


@pytest.mark.parametrize(
    ("ask", "reported"),
    [
        (lambda model: model.score("1 2", 64), "the text has 2 tokens; a window of 64 needs 65"),
        (lambda model: model.score(TEXT, 16, stride=17), "stride is 17; it must be an integer from 1 to 16"),
        (lambda model: model.score([1, 2.5, 3], 1), "item 2 of text is 2.5; it must be an integer from 0 to 60"),
        (lambda model: model.score([1, 99, 3], 1), "item 2 of text is 99; it must be an integer from 0 to 60"),
        (lambda model: model.generate("1", top_p=3), "top_p is 3; it must be at most 1"),
        (lambda model: model.generate("1", top_q=3), "no option top_q; did you mean top_k or top_p? choose from "),
        (
            lambda model: model.generate("1", foo=3),
            "there is no option foo; choose from max_new_tokens, temperature, top_k, top_p, seed, stop, batch_size",
        ),
        (lambda model: model.generate("1", stop=""), "item 1 of stop is empty; leave it out"),
        (lambda model: model.generate(None), "prompt is None; it must be a string or a list of strings"),
        (lambda model: model.generate([1, 2]), "item 1 of prompt is 1; it must be a string"),
        (lambda model: model.decode([99]), "item 1 of tokens is 99; it must be an integer from 0 to 60"),
        (lambda model: model.score(TEXT, 6.5), "length is 6.5; it must be an integer of at least 1"),
        (lambda model: model.score(TEXT, True), "length is True; it must be an integer"),
        (lambda model: model.score([[1, 2], [3]]), "a list of tokens, which are integers from 0 to 60"),
        (lambda model: model.attention_maps("1 2", 0), "layers is 0; it must be a list of layer indices"),
        (lambda model: model.attention_maps("1 2", "all"), "layers is 'all'; it must be a list of layer indices"),
        (lambda model: model.attention_maps("1 2", [0.5]), "item 1 of layers is 0.5; it must be an integer"),
        (lambda model: model.bias_table(10**12), "length is 1000000000000; it must be an integer from 1 to"),
        (lambda model: farfield.load("x", precision="fp33"), "precision is fp33; did you mean fp32?"),
        (lambda model: farfield.load("x", rope=5), "rope is 5; it must be a string"),
        (lambda model: farfield.evaluate(5), "runs is 5; it must be a path, or a list of paths"),
        (lambda model: farfield.evaluate("x", length=[5]), "there is no option length; did you mean lengths?"),
        (lambda model: farfield.analyze("x", lengths=[0]), "item 1 of lengths is 0; it must be at least 1"),
        (lambda model: farfield.train(["x.yml"]), "item 1 of files is ['x.yml']; it must be a path"),
        (lambda model: farfield.evaluate(), "evaluate: missing a required argument: 'runs'"),
        (lambda model: farfield.evaluate([]), "runs is empty; give at least one run folder"),
        (lambda model: farfield.evaluate("x", multiples=[2, 0]), "item 2 of multiples is 0; it must be greater than 0"),
        (lambda model: farfield.load("x", divice="cpu"), "load: there is no argument divice; did you mean device?"),
        (lambda model: farfield.sweep(), "name the files of the sweep"),
        (lambda model: model.generate("1", window=3), "window is an option of farfield.load"),
        (lambda model: model.attention_maps("1 2", [2]), "item 1 of layers is 2; it must be an integer from -2 to 1"),
        (lambda model: model.attention_maps("1 2", []), "layers is empty; list layers"),
        (lambda model: model.attention_maps(""), "the text has no tokens"),
        (lambda model: model.bias_table(0), "length is 0; it must be an integer from 1 to"),
        (lambda model: model.attention_maps(np.zeros(40_000, dtype=int)), "GiB; the limit is 4 GiB; use fewer layers"),
        (lambda model: farfield.load("nowhere"), "nowhere: no such folder"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(model: farfield.Model, ask, reported: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(farfield.UserError) as caught:
        ask(model)
    assert reported in str(caught.value)
    assert "\n" not in str(caught.value)


def test_messages_name_arguments_instead_of_options(model: farfield.Model, tmp_path: Path) -> None:
    """Errors of code that the command line shares name the argument."""
    run = str(model._loaded.run.checkpoint)
    with pytest.raises(farfield.UserError, match=r"^only: unknown analysis 'kernel'; did you mean kernels"):
        farfield.analyze(run, tmp_path / "page", only=["kernel"])
    with pytest.raises(farfield.UserError, match="nowhere: no such file or folder; data expects a file"):
        farfield.evaluate(run, tmp_path, data=str(tmp_path / "nowhere"))
    with pytest.raises(farfield.UserError, match=r"^num_layers is 'x'; it must be an integer"):
        farfield.train("configs/model/125M.yml", num_layers="x")


def test_a_folder_that_may_not_be_read_is_a_user_error(corpus: Path, tmp_path: Path) -> None:
    run = Path(make_run(str(tmp_path / "run"), corpus))
    forbidden = run / "checkpoints"
    with unprivileged(), unreadable(forbidden), pytest.raises(farfield.UserError, match=rf"^{forbidden}.*Permission"):
        farfield.load(run)


def test_texts_beyond_a_position_table_are_rejected(corpus: Path, tmp_path: Path) -> None:
    model = load(corpus, tmp_path, pos_emb="learned")
    for ask in (lambda: model.score(TEXT, 17), lambda: model.attention_maps(TEXT)):
        with pytest.raises(farfield.UserError, match="the model supports 16 positions"):
            ask()
    assert "learned" in repr(model)
    assert model.config["pos_emb"] == "learned"
    assert (model.step, model.train_length) == (4, 16)


def test_an_analysis_reads_as_the_model_was_loaded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(corpus, tmp_path, pos_emb="rotary")
    asked: dict[str, object] = {}
    monkeypatch.setattr("farfield.commands.analyze", lambda runs, output=None, **options: asked.update(options))
    farfield.load(tmp_path / "run", rope="pi:2", window=7, device="cpu").analyze(only=["kernels"], window=5)
    assert asked == {
        "rope": "pi:2", "window": 5, "attention_temperature": None, "device": "cpu", "precision": "auto",
        "only": ["kernels"],
    }  # fmt: skip


def test_a_model_survives_a_change_of_the_current_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(corpus, tmp_path, pos_emb="rotary")
    monkeypatch.chdir(tmp_path)
    model = farfield.load("run", device="cpu")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    page = model.analyze("page", lengths=[8])
    assert page.resolve() == tmp_path / "elsewhere" / "page" / "analysis.html"


def run_in_threads(*tasks: Callable[[], None]) -> None:
    """Run functions at the same time, switching between them often; raise the first error."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(tasks)) as pool:
            for future in [pool.submit(task) for task in tasks]:
                future.result()
    finally:
        sys.setswitchinterval(interval)


def test_models_load_in_several_threads(model: farfield.Model) -> None:
    """Layers find torch's default group in a global variable while they are built."""
    expected = model.score(TEXT).perplexity

    def load_repeatedly() -> None:
        for _ in range(3):
            assert farfield.load(model._checkpoint, device="cpu").score(TEXT).perplexity == expected

    run_in_threads(*[load_repeatedly] * 3)


def test_threads_share_a_model(model: farfield.Model) -> None:
    """Maps are captured by a hook in the layers, which would also see the passes of another thread."""
    maps, losses = model.attention_maps(TEXT[:14]), model.score(TEXT)

    def read_maps() -> None:
        for _ in range(5):
            for layer, own in model.attention_maps(TEXT[:14]).items():
                np.testing.assert_array_equal(own.weights, maps[layer].weights)

    def read_losses() -> None:
        for _ in range(5):
            np.testing.assert_array_equal(model.score(TEXT).values, losses.values)

    run_in_threads(read_maps, read_losses, read_maps)


def test_a_model_is_loaded_and_not_copied(model: farfield.Model) -> None:
    for copy_model in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(farfield.UserError, match="a model cannot be copied or pickled; load it where it is used: "):
            copy_model(model)
    losses = model.score(TEXT)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(losses)).values, losses.values)


def test_bias_from_layer_input_is_not_a_table(corpus: Path, tmp_path: Path) -> None:
    model = load(corpus, tmp_path, pos_emb="fox")
    with pytest.raises(farfield.UserError, match="the bias of fox depends on the layer's input"):
        model.bias_table()
    bias = model.attention_maps(TEXT[:40])[0].bias
    assert (np.nan_to_num(bias) <= 0).all()
    assert np.diagonal(bias, axis1=1, axis2=2).max() == 0


WRONG_VALUES = (
    None,
    5,
    2.5,
    "\ud800",
    [[1], [2, 3]],
    [1.5],
    [10**30],
    ["x"],
    {},
    object(),
    b"x",
    {9},
    np.array(3),
    type,
)


@pytest.mark.parametrize("value", WRONG_VALUES, ids=lambda value: ascii(value)[:30])
def test_invalid_arguments_raise_user_errors(model: farfield.Model, value: object) -> None:
    calls = {
        "text": [lambda: model.encode(value), lambda: model.score(value), lambda: model.attention_maps(value)],
        "tokens": [lambda: model.decode(value)],
        "prompt": [lambda: model.generate(value, maximum_tokens=1)] if value != ["x"] else [],
        "length": [lambda: model.score("1 2 3", value)] if value not in (None, 5) else [],
        "stride": [lambda: model.score("1 2 3", 2, stride=value)] if value is not None else [],
        "layer": [lambda: model.attention_maps("1 2 3", layers=value)] if value is not None else [],
        "top_k": [lambda: model.generate("1", top_k=value)] if value not in (None, 5) else [],
        "output": [lambda: model.analyze(value)] if value is not None else [],
    }
    if isinstance(value, np.ndarray):
        del calls["length"], calls["stride"], calls["top_k"]  # integers
    for name, functions in calls.items():
        for function in functions:
            with pytest.raises(farfield.UserError, match=name):
                function()


def test_tokens_come_as_any_sequence(model: farfield.Model) -> None:
    tokens = model.encode(TEXT)[:5]
    for sequence in (tokens, tuple(tokens), iter(tokens), np.array(tokens), torch.tensor(tokens), range(3)):
        assert model.decode(sequence)
    assert model.decode([]) == ""
    with pytest.raises(farfield.UserError, match="tokens is 'abc'; it must be a list of tokens"):
        model.decode("abc")


@pytest.mark.parametrize("stop", [[""], ["a", ""]])
def test_an_empty_stop_is_rejected(model: farfield.Model, stop: list[str]) -> None:
    with pytest.raises(farfield.UserError, match=f"^item {len(stop)} of stop is empty; leave it out$"):
        model.generate("1", stop=stop)
