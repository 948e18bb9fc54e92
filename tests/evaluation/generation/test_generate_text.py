"""Input and output of generation: prompts, their order, JSON, interrupts, and the interactive loop."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import build_model

from megatron.data.tokenizers import ByteTokenizer
from megatron.evaluation import generate_text as generation
from megatron.evaluation.text_generator import Completion, TextGenerator
from megatron.options.commands import GenerationOptions
from megatron.options.model import ModelOptions
from megatron.options.position import PositionOptions
from megatron.utils.errors import UserError

SHAPE = ModelOptions(
    num_layers=1, hidden_size=16, num_attention_heads=2, seq_length=16, max_position_embeddings=24, init_method_std=0.3
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def a_writer(**options: object) -> TextGenerator:
    model = build_model(SHAPE, PositionOptions(pos_emb="learned"), 257, seed=3).eval()
    return TextGenerator(model, ByteTokenizer(), GenerationOptions(**{"maximum_tokens": 9, **options}))


def shown(writer: TextGenerator, prompts: list[str], **how: bool) -> tuple[str, list[str]]:
    out, output = io.StringIO(), []
    generation.print_completions(writer, prompts, out, output.append, **how)
    return out.getvalue(), output


def test_prompts_come_from_the_command_line_files_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("two\nlines\n\n")
    (tmp_path / "code").write_text("def main(")
    (tmp_path / "many.jsonl").write_text('{"text": "one\\n"}\n\n{"text": ""}\n')
    files = [tmp_path / name for name in ("text.txt", "code", "many.jsonl")]
    standard = io.StringIO("given\n")
    found = generation.collect_prompts(["a", ""], files, standard)
    assert found == ("a", "", "two\nlines\n", "def main(", "one\n", "")
    assert generation.collect_prompts([], [], standard) == ("given",)
    assert generation.collect_prompts([], [], Terminal("typed later\n")) == ()
    (tmp_path / "none.jsonl").write_text("\n")
    (tmp_path / "bytes.txt").write_bytes(b"a\xff")
    for path, message in (
        (tmp_path / "absent", "absent: no such file; --file expects a text"),
        (tmp_path, "is a folder; --file expects a text"),
        (tmp_path / "none.jsonl", "none.jsonl: no text found"),
        (tmp_path / "bytes.txt", r"bytes.txt:1: not UTF-8: byte 0xff at offset 1"),
    ):
        with pytest.raises(UserError, match=message):
            generation.collect_prompts([], [path], standard)
    with pytest.raises(UserError, match="standard input: not UTF-8 at byte 1"):
        generation.collect_prompts([], [], io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))


def test_invalid_utf_8_is_rejected() -> None:
    for prompts, standard_input in ((["caf\udce9"], ""), ([], "caf\udce9\n")):
        with pytest.raises(UserError, match="the prompt is not UTF-8: byte 0xe9 at character 3"):
            generation.collect_prompts(prompts, [], io.StringIO(standard_input))


def test_texts_are_shown_in_the_order_of_their_prompts() -> None:
    prompts = ["abc", "d", "efg", "h", "abc"]
    texts = {
        prompt: "".join(p for _, p in a_writer(temperature=0.0).generate([list(prompt.encode())])) for prompt in prompts
    }
    out, output = shown(a_writer(temperature=0.0, batch_size=3), prompts)
    assert out == "".join(f"{texts[prompt]}\n" for prompt in prompts)
    assert [line.split(" prompt tokens")[0] for line in output] == [
        *(f"{number} of 5: {prompt}" for number, prompt in enumerate(prompts, start=1)),
        "11",
    ]
    alone, output = shown(a_writer(temperature=0.0), ["d"])
    assert alone == f"{texts['d']}\n"
    assert [line.split(",")[0] for line in output] == ["1 prompt token"]


def test_json_has_a_line_for_each_prompt() -> None:
    prompts = ["ab\n", "€", "c"]
    out, _ = shown(a_writer(temperature=0.0), prompts, as_json=True)
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["prompt"] for each in found] == prompts
    for each, prompt in zip(found, prompts, strict=True):
        plain, _ = shown(a_writer(temperature=0.0), [prompt])
        assert each["text"] + "\n" == plain
        assert (each["finish"], each["tokens"]) == ("length", 9) or (each["finish"] == "eod" and each["tokens"] < 9)


def test_a_text_that_is_interrupted_ends_with_a_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: TextGenerator, prompts: object) -> Iterator[tuple[Completion, str]]:
        yield Completion(0), "begun"
        raise KeyboardInterrupt

    monkeypatch.setattr(TextGenerator, "generate", interrupted)
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt):
        generation.print_completions(a_writer(), ["x"], out, lambda line: None)
    assert out.getvalue() == "begun\n"


def test_each_input_line_is_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = iter(["ab", "x" * 30, "stop", "ab"])
    writer, usual = a_writer(temperature=0.0), TextGenerator.generate

    def line(_: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    def stopping(self: TextGenerator, prompts: list[list[int]]) -> Iterator[tuple[Completion, str]]:
        for text, piece in usual(self, prompts):
            yield text, piece
            if bytes(prompts[0]) == b"stop" and text.text:
                raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", line)
    monkeypatch.setattr(TextGenerator, "generate", stopping)
    out, output = io.StringIO(), []
    generation.run_interactive(writer, out, output.append)
    (alone, _), (other, _) = shown(a_writer(temperature=0.0), ["ab"]), shown(a_writer(temperature=0.0), ["stop "])
    assert out.getvalue().startswith(alone)
    assert out.getvalue().endswith(f"\n{alone}\n")
    assert len(out.getvalue()) < 2 * len(alone) + len(other)
    assert [line.split(":")[0] for line in output if "prompt tokens," not in line][1:] == ["error", "interrupted"]
    assert "the prompt alone is too long" in output[2]
