"""Options that a command was given, as a section of theirs."""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError, create_model

from megatron.config.problems import describe_validation_error
from megatron.options.section import ConfigSection
from megatron.utils.errors import UserError

SectionT = TypeVar("SectionT", bound=ConfigSection)


def section_from_cli(section: type[SectionT], values: Mapping[str, Any]) -> SectionT:
    """A section by the names and values of its keys. Raises UserError, one line per problem, if it is none."""
    asked = create_model("Asked", __base__=ConfigSection, options=(section, ...))
    try:
        return asked.model_validate({"options": dict(values)}).options  # type: ignore[attr-defined]
    except ValidationError as error:
        raise UserError("\n".join(describe_validation_error(error, lambda _: "command line", known={}))) from error
