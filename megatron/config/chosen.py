"""Options that a command was given, as a section of theirs."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from megatron.config.problems import describe
from megatron.options.section import Section
from megatron.utils.errors import UserError

Chosen = TypeVar("Chosen", bound=Section)


def chosen(section: type[Chosen], values: Mapping[str, Any]) -> Chosen:
    """A section by the names and values of its keys. Raises UserError, one line per problem, if it is none."""
    asked = create_model("Asked", __base__=Section, options=(section, ...))
    try:
        return asked.model_validate({"options": dict(values)}).options  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError("\n".join(describe(error, lambda _: "command line", known={}))) from error
