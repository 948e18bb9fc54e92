"""Commands that pages of the documentation show."""

import re
import shlex


def list_commands(text: str) -> list[list[str]]:
    """List the project's commands in the fenced and indented blocks of a page, as words without comments."""
    lines, is_fenced = [], False
    for line in text.replace("\\\n", " ").splitlines():
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif is_fenced or line.startswith("    "):
            lines.append(line.strip().removeprefix("$ "))
    found = (re.search(r"(?:^|\s)(\./deepy\.py .*|make [a-z].*|\.venv/bin/python .*)$", line) for line in lines)
    return [shlex.split(match[1], comments=True) for match in found if match]
