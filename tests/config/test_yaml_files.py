"""YAML as written by people: numbers, JSON habits, and one-line errors with a position."""

import re
from pathlib import Path
from textwrap import indent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.yaml_files import dump_yaml, parse_scalar, parse_yaml, read_yaml
from megatron.utils.errors import UserError


def test_json_like_with_trailing_commas_comments_and_python_booleans():
    document = parse_yaml(
        '# comment\n{\n  "a": True, # why\n  "b": {"c": False, "d": [1, 2,],},\n  "e": 6e-4,\n}\n', "f.yml"
    )
    assert document.values == {"a": True, "b": {"c": False, "d": [1, 2]}, "e": 0.0006}
    assert document.lines == {("a",): 3, ("b",): 4, ("b", "c"): 4, ("b", "d"): 4, ("e",): 5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4),
        ("6E-4", 6e-4),
        ("1e6", 1e6),
        (".5", 0.5),
        ("1.0e-8", 1e-8),
        ("12", 12),
        ("true", True),
        ("False", False),
        ("yes", "yes"),  # YAML 1.2 has two booleans, not ten
        ("on", "on"),
        ("null", None),
        ("", None),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a: 1}", {"a": 1}),
        ("969,30,1", "969,30,1"),
        ("'6e-4'", "6e-4"),
    ],
)
def test_values(text, value):
    found = parse_scalar(text, "command line")
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("text", ["'run #3'", '"#x"', "run#3", "[1, 2]  ", "&a x", "- a\n- b", "|\n  abc\n"])
def test_a_value_may_contain_what_begins_a_comment(text):
    assert parse_scalar(text, "command line") == parse_yaml(f"a:\n{indent(text, '  ')}", "f.yml").values["a"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *[(text, "only a part of .* is a YAML value; put it in quotes") for text in (
            "#x", "run #3", "1e-3 # c", "a # b\n# c", "---", "--- a", "%YAML 1.1\n--- on", "a\n...\n",
        )],
        ("&a [*a]", r"alias \*a is inside its own anchor"),
        ("&a {b: *a}", r"alias \*a is inside its own anchor"),
        ("{a: 1, a: 2}", ".* gives a key twice; remove one of the two"),
        ("!!bool x", "tag '!!bool' is not allowed; only plain values are read"),
        ("!!int ''", "tag '!!int' is not allowed; only plain values are read"),
        ("{[[a]]: 1}", "a key is a list; it must be a string"),
        ("[{1: 2}]", "key 1 is not a string; put it in quotes"),
    ],
)  # fmt: skip
def test_a_value_that_would_be_read_in_part_is_rejected(text, message):
    with pytest.raises(UserError, match=f"^command line: save: {message}"):
        parse_scalar(text, "command line: save")


def test_anchors_and_merge_keys_keep_the_line_of_the_anchor():
    document = parse_yaml("base: &b\n  lr: 1\nother:\n  <<: *b\n  eps: 2\n", "f.yml")
    assert document.values["other"] == {"lr": 1, "eps": 2}
    assert document.lines[("other", "lr")] == 2
    assert document.lines[("other", "eps")] == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", r"^f\.yml:3: key 'a' is given twice"),
        ("a: {b: 1, c: 2,\n  b: 3}\n", r"^f\.yml:2: key 'b' is given twice"),
        ("a:\n\t- 1\n", r"^f\.yml:2: .*tab"),
        ("a: [1,\nb: 2\n", r"^f\.yml:3: .*line 1"),
        ("a: b: c\n", r"^f\.yml:1: "),
        ("- 1\n- 2\n", r"^f\.yml: contains a list"),
        ("word\n", r"^f\.yml: contains a single value"),
        ("x: 1\na: !!python/object/apply:os.system [ls]\n", r"^f\.yml:2: .*tag"),
        ("a: !mine 3\n", r"^f\.yml:1: .*'!mine'"),
        ("a: *nowhere\n", r"^f\.yml:1: .*nowhere"),
        ("a: 1\n---\nb: 2\n", r"^f\.yml:2: .*second document"),
        (
            "x: 1\na: !!timestamp 2020-01-01\n",
            r"^f\.yml:2: tag '!!timestamp' is not allowed; only plain",
        ),
        ("a: !!timestamp 2020-99-01\n", r"^f\.yml:1: "),
        ("1: 2\n", r"^f\.yml:1: key 1 is not a string"),
        ("a: 1\nb:\n  true: 3\n", r"^f\.yml:3: key true is not a string"),
        ("a: !!set {x, y}\n", r"^f\.yml:1: "),
        ("x: 1\na: !!bool x\n", r"^f\.yml:2: tag '!!bool' is not allowed"),
        ("a: !!int ''\n", r"^f\.yml:1: tag '!!int' is not allowed"),
        ("a: !!omap [b: 1, b: 2]\n", r"^f\.yml:1: tag '!!omap' is not allowed"),
        ("x: 1\n? [a]\n: 2\n", r"^f\.yml:2: a key is a list; it must be a string"),
        ("x: 1\ny: [{[[a], {b: 1}]: 2}]\n", r"^f\.yml:2: a key is a list; it must be a string"),
        ("{a: 1}: 2\n", r"^f\.yml:1: a key is a mapping; it must be a string"),
        ("x:\n- y: 1\n  2: 3\n", r"^f\.yml:3: key 2 is not a string; put it in quotes"),
        ("a: \x00\n", r"^f\.yml: not valid YAML"),
        ("b: 1\na: &a [*a]\n", r"^f\.yml:2: alias \*a is inside its own anchor; remove it"),
        ("a: " + "[" * 500 + "\n", r"^f\.yml"),
    ],
)
def test_errors_are_one_line_with_a_position(text, message):
    with pytest.raises(UserError) as caught:
        parse_yaml(text, "f.yml")
    assert "\n" not in str(caught.value)
    assert re.search(message, str(caught.value)), str(caught.value)


BOMB = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 40)
)
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, r"^f\.yml:4: more than 10,000 values"),
        (MERGES, r"^f\.yml:5: more than 10,000 values"),
        ("k: 1\n" * 700_000, r"^f\.yml:5000: more than 10,000 values"),
        ("a: [" + "1, " * 700_000, r"^f\.yml:1: more than 10,000 values"),
        ("a: " + "[" * 300_000, r"^f\.yml:1: nested too deeply"),
        ("a: " + "{b: " * 300_000, r"^f\.yml:1: nested too deeply"),
        ("- " * 300_000, r"^f\.yml:1: nested too deeply"),
    ],
    ids=["aliases", "merges", "keys", "items", "lists", "mappings", "dashes"],
)
def test_expensive_yaml_is_rejected_at_once(tmp_path, text, message):
    """Input that would take hours or all memory is rejected immediately; otherwise this test would not end."""
    with pytest.raises(UserError, match=message) as caught:
        parse_yaml(text, "f.yml")
    assert "\n" not in str(caught.value)
    path = tmp_path / "large.yml"
    path.write_text(text + "#" * (1 << 20))
    with pytest.raises(UserError, match=r"large\.yml: file is larger than 1,048,576 bytes; not a configuration file"):
        read_yaml(path)


def test_expensive_yaml_on_the_command_line_is_rejected():
    rounds = ", ".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 40))
    with pytest.raises(UserError, match=r"^command line: x: more than 10,000 values"):
        parse_scalar(f"[&a0 [1], {rounds}]", "command line: x")


def test_nesting_counts_expanded_aliases():
    """19 aliases inside 48 lists each are 912 levels, although no line has more than 50."""
    levels = 48
    lines = ["a0: &a0 [1]", *(f"a{i}: &a{i} {'[' * levels}*a{i - 1}{']' * levels}" for i in range(1, 20))]
    with pytest.raises(UserError, match=r"^f\.yml:3: nested too deeply for a configuration: more than 50 levels"):
        parse_yaml("\n".join(lines), "f.yml")


def test_a_large_configuration_is_read():
    text = (
        "base: &b {" + ", ".join(f"k{i}: {i}" for i in range(400)) + "}\n" + "".join(f"v{i}: *b\n" for i in range(10))
    )
    assert parse_yaml(text, "f.yml").values["v9"]["k399"] == 399


def test_line_ends_of_other_systems_count_as_lines(tmp_path):
    (tmp_path / "f.yml").write_bytes(b"a: 1\r\nb: 2\r\na: 3\r\n")
    with pytest.raises(UserError, match=r"f\.yml:3: key 'a' is given twice"):
        read_yaml(tmp_path / "f.yml")


def test_empty_file_is_an_empty_mapping():
    assert parse_yaml("", "f.yml").values == {}
    assert parse_yaml("# nothing\n", "f.yml").values == {}


def test_dates_are_strings():
    values = {"a": "2001-01-01", "b": [1, "2001-99-99", "2001-12-14 21:59:43.10"], "2001-01-01": "c"}
    text = "a: 2001-01-01\nb: [1, 2001-99-99, 2001-12-14 21:59:43.10]\n2001-01-01: c\n"
    assert parse_yaml(text, "f.yml").values == values
    assert parse_scalar("2001-01-01", "command line: a") == "2001-01-01"
    written = dump_yaml(values)
    assert parse_yaml(written, "f.yml").values == values
    assert "a: '2001-01-01'" in written  # a string for YAML 1.1 readers too


def test_a_huge_number_is_reported_for_users():
    with pytest.raises(UserError, match=r"^f\.yml:2: not valid YAML: Exceeds the limit .* value has 5000 digits$"):
        parse_yaml(f"a: 1\nb: {'1' * 5000}\n", "f.yml")


def test_binary_files_and_folders_are_rejected(tmp_path: Path):
    path = tmp_path / "binary.yml"
    path.write_bytes(b"a: \xff\xfe")
    with pytest.raises(UserError, match=r"binary\.yml: not a text file"):
        read_yaml(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)


letters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])  # text allowed in a configuration
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(letters),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(letters), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(letters, min_size=1), plain, max_size=4))
def test_dump_and_parse_are_inverse(values):
    text = dump_yaml(values)
    assert parse_yaml(text, "f.yml").values == values
