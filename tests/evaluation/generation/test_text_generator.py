"""Text generation, compared with whole forward passes over the text so far."""

import pytest
import torch
from models import build_model

from megatron.data.tokenizers import ByteTokenizer
from megatron.evaluation.forward_passes import TokenSampler, check_prompt_length, group_prompts
from megatron.evaluation.text_generator import Completion, TextGenerator
from megatron.model.gpt import GPT
from megatron.options.commands import GenerationOptions
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.utils.errors import UserError

SHAPE = ModelOptions(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=3,
    seq_length=16,
    max_position_embeddings=40,
    init_method_std=0.3,  # gives texts that do not repeat one token
    make_vocab_size_divisible_by=128,
)
PROMPTS = ["The quick", "brown", " fox j", "jumps", "é"]


def gpt(pos_emb: str = "kerple_log", **position: object) -> GPT:
    return build_model(SHAPE, PositionOptions(pos_emb=pos_emb, **position), 257, seed=5).eval()


def written(model: GPT, prompts: list[str], **options: object) -> list[Completion]:
    writer = TextGenerator(model, ByteTokenizer(), GenerationOptions(**options))
    texts: dict[int, Completion] = {}
    joined: dict[int, str] = {}
    for text, piece in writer.generate([writer.encode(prompt) for prompt in prompts]):
        assert texts.setdefault(text.prompt_index, text) is text
        joined[text.prompt_index] = joined.get(text.prompt_index, "") + piece
    assert {number: text.text for number, text in texts.items()} == joined
    return [texts[number] for number in range(len(prompts))]


@torch.no_grad()
def by_whole_passes(model: GPT, prompt: str, tokens: int) -> list[int]:
    """Decode greedily without a cache: one forward pass over all earlier tokens for each token."""
    found = list(prompt.encode()) or [256]
    start = len(found)
    while len(found) < start + tokens:
        token = int(model(torch.tensor([found]))[0, -1, :257].argmax())
        if token == 256:
            break
        found.append(token)
    return found[start:]


@pytest.mark.parametrize(
    ("pos_emb", "processor", "window"),
    [("kerple_log", "cdape", None), ("rotary", "none", 6), ("learned", "none", None), ("cope", "dape", None)],
)
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_is_the_argmax_of_whole_forward_passes(
    pos_emb: str, processor: str, window: int | None, batch_size: int
) -> None:
    model = gpt(pos_emb, score_processor=processor, attention_window=window)
    found = written(model, [*PROMPTS, ""], temperature=0.0, maximum_tokens=20, batch_size=batch_size)
    for prompt, text in zip([*PROMPTS, ""], found, strict=True):
        expected = by_whole_passes(model, prompt, 20)
        assert text.tokens == expected
        assert text.text == bytes(expected).decode(errors="replace")
        assert text.finish_reason == ("length" if len(expected) == 20 else "eod")
    assert len({tuple(text.tokens) for text in found}) == len(found)


def test_randomized_positions_are_drawn_for_the_whole_text() -> None:
    model = gpt("kerple_log", randomized_positions=60)
    (text,) = written(model, ["The quick"], temperature=0.0, maximum_tokens=12)
    # Positions of a sequence of 9 + 12 − 1 tokens, of which each step reads a prefix.
    with torch.no_grad():
        for step in range(12):
            read = torch.tensor([[*b"The quick", *text.tokens[:-1]]])
            logits = model(read)[0, 8 + step]
            assert int(logits[:257].argmax()) == text.tokens[step]


def test_a_seed_reproduces_the_text_and_prompts_sample_independently() -> None:
    model = gpt()
    first = written(model, ["a", "a", "bc"], seed=1, maximum_tokens=30)
    again = written(model, ["a", "a", "bc"], seed=1, maximum_tokens=30)
    other = written(model, ["a", "a", "bc"], seed=2, maximum_tokens=30)
    assert [text.tokens for text in first] == [text.tokens for text in again]
    assert all(one.tokens != two.tokens for one, two in zip(first, other, strict=True))
    assert first[0].tokens != first[1].tokens
    (alone,) = written(model, ["a"], seed=1, maximum_tokens=30)
    assert alone.tokens == first[0].tokens


def test_draws_follow_the_probabilities_of_the_model() -> None:
    """First tokens of many samples, compared with the softmax of a whole forward pass by a chi-square test at p =
    1e-6.
    """
    model, draws = gpt(), 400
    texts = written(model, ["x"] * draws, maximum_tokens=1, temperature=0.8, top_k=4, batch_size=100)
    with torch.no_grad():
        logits = model(torch.tensor([[120]]))[0, -1, :257].double() / 0.8
    values, likeliest = logits.topk(4)
    expected = dict(zip(likeliest.tolist(), (values.softmax(0) * draws).tolist(), strict=True))
    tokens = [text.tokens[0] if text.tokens else 256 for text in texts]
    assert set(tokens) <= set(expected)
    statistic = sum((tokens.count(token) - count) ** 2 / count for token, count in expected.items())
    assert statistic < 30.7  # with 3 degrees of freedom


def test_stop_strings_and_document_ends_end_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    output = iter("one two€ three".encode())

    def dictated(self: TokenSampler, logits: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
        return torch.tensor([next(output, 256)])

    monkeypatch.setattr(TokenSampler, "sample", dictated)
    (text,) = written(gpt(), ["x"], maximum_tokens=30)
    assert (text.text, text.finish_reason, len(text.tokens)) == ("one two€ three", "eod", 16)
    output = iter("one two€ three".encode())
    (text,) = written(gpt(), ["x"], maximum_tokens=30, stop=["€ t", "four"])
    assert (text.text, text.finish_reason) == ("one two", "stop")
    output = iter("one two€ three".encode())
    (text,) = written(gpt(), ["x"], maximum_tokens=9, stop=["€ t", "four"])
    assert (text.text, text.finish_reason) == ("one two\ufffd", "length")


def test_a_table_of_positions_is_used_to_its_last_row_and_not_beyond() -> None:
    model = gpt("learned")
    (text,) = written(model, ["x" * 30], temperature=0.0, maximum_tokens=11)
    assert text.finish_reason == "eod" or len(text.tokens) == 11
    with pytest.raises(
        UserError, match=r"40 positions; a prompt of 30 tokens and 12 new tokens need 41; .*-tokens 11 or"
    ):
        check_prompt_length(model, 30, 12)
    with pytest.raises(UserError, match="the prompt alone is too long"):
        check_prompt_length(model, 41, 1)
    with pytest.raises(UserError, match="a prompt of 40 tokens and 2 new tokens need 41"):
        check_prompt_length(model, 40, 2)
    with pytest.raises(UserError, match="a prompt of 1 token and 41 new tokens need 41"):
        check_prompt_length(model, 1, 41)
    check_prompt_length(gpt("rotary"), 10**6, 10**6)


def test_groups_are_of_similar_length_and_not_too_large() -> None:
    model = gpt()
    assert group_prompts(model, [3, 5, 3, 4, 5], 2) == [[0, 2], [3, 1], [4]]
    assert group_prompts(model, [3, 5, 3], 1) == [[0], [1], [2]]
    assert group_prompts(model, [], 2) == []
    drawn = gpt("kerple_log", randomized_positions=60)
    assert group_prompts(drawn, [3, 5, 3, 4, 5], 2) == [[0, 2], [3], [1, 4]]
    drawn.end_of_document = 0  # after its end, a row of a batch would continue in another document
    assert group_prompts(drawn, [3, 5, 3], 2) == [[0], [1], [2]]


@pytest.mark.parametrize(
    "position", [{"pos_emb": "learned"}, {"randomized_positions": 60}, {"score_processor": "cdape"}]
)
def test_a_text_does_not_depend_on_its_batch(position: dict[str, object]) -> None:
    model = gpt(**position)
    together = written(model, PROMPTS, seed=3, maximum_tokens=15, batch_size=5)
    one_by_one = written(model, PROMPTS, seed=3, maximum_tokens=15, batch_size=1)
    assert [text.tokens for text in together] == [text.tokens for text in one_by_one]
