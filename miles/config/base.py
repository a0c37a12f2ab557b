"""The base every configuration section shares."""

from __future__ import annotations

from typing import Any, cast, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError


class ConfigModel(BaseModel):
    """Frozen, closed, self-documenting: a field's docstring is its help text everywhere."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1; a recipe that says `batch_size: yes` is a mistake."""
        values = cast(list[Any], value) if isinstance(value, list) else [value]
        if any(isinstance(v, bool) for v in values):
            annotation = cls.model_fields[info.field_name or ""].annotation
            if annotation is not bool and bool not in get_args(annotation):
                raise PydanticCustomError("not_a_switch", "Input should not be true or false")
        return cast(Any, value)


class Flag:
    """Further command-line spellings of a field: `Annotated[str, Flag("--rm-type")]`.

    `inverted` names switches that set a boolean field to false, such as `--disable-rewards-normalization`.
    """

    def __init__(self, *names: str, inverted: tuple[str, ...] = ()) -> None:
        self.names = names
        self.inverted = inverted
