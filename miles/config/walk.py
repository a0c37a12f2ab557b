"""One walk of the schema, shared by the loader, `--help`, the reference page, the hooks' arguments and the tests."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from miles.config.base import Flag
from miles.config.schema import EvalDataset, RunConfig

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_PLURALS = {"int": "whole numbers", "float": "numbers", "str": "texts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One setting: everything that its field says."""

    path: str
    """Dotted path in recipes: `rollout.batch_size`."""
    type_name: str
    """`int`, `float`, `bool`, `str`, `dict`, `list[...]`, or the name of a model; choices count as `str`."""
    optional: bool
    """Whether it may be null, which means unset."""
    choices: tuple[str, ...]
    """The only values it takes; empty when there is no such list."""
    bounds: str
    """Limits of a number in words, such as `1 or more`; empty when there are none."""
    required: bool
    """Whether there is no default; only in entries of lists."""
    default: Any
    """None when required."""
    doc: str
    flags: tuple[str, ...]
    """Every flag that sets it: the dotted one first, then the field's own names."""
    inverted: tuple[str, ...]
    """Flags that set it to false."""
    attribute: str
    """Name by which users' functions read it from `args`."""
    negated: bool
    """Whether `args` shows the opposite of the value, as for `args.disable_rewards_normalization`."""

    @property
    def section(self) -> str:
        """First part of the path."""
        return self.path.partition(".")[0]

    @property
    def is_list(self) -> bool:
        return self.type_name.startswith("list[")

    @property
    def item_type(self) -> str:
        """Type of one item of a list; the type itself for anything else."""
        return self.type_name[5:-1] if self.is_list else self.type_name

    @property
    def flag(self) -> str:
        """The flag to show to people: the field's own name if it has one, else the dotted one."""
        return self.flags[min(1, len(self.flags) - 1)]

    @property
    def wants(self) -> str:
        """What a value must be, in words: `a whole number, 1 or more, or null`."""
        if self.choices:
            words = self.choices[0] if len(self.choices) == 1 else "one of " + ", ".join(self.choices)
        elif self.is_list:
            words = f"a list of {_PLURALS.get(self.item_type, 'mappings')}"
        else:
            words = _WORDS.get(self.type_name, "a mapping")
        words += f", {self.bounds}" if self.bounds else ""
        return words + (", or null to unset it" if self.optional else "")


@cache
def leaves(model: type[BaseModel] = RunConfig) -> tuple[Leaf, ...]:
    """All settings of `model`, in the order of the schema."""
    return tuple(_walk(model, ""))


def item_leaves(leaf: Leaf) -> tuple[Leaf, ...]:
    """The settings of each entry of a list of mappings; none for any other setting."""
    model = {"EvalDataset": EvalDataset}.get(leaf.item_type)
    return leaves(model) if model else ()


@cache
def sections() -> dict[str, str]:
    """Name and one-sentence description of each section, in the order of the schema."""
    found: dict[str, str] = {}
    for name, field in RunConfig.model_fields.items():
        model = section_model(field)
        found[name] = (model.__doc__ or "").strip() if model else field.description or ""
    return found


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is itself a section; None for a setting."""
    annotation: Any = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Leaf]:
    for name, field in model.model_fields.items():
        nested = section_model(field)
        if nested is not None:
            yield from _walk(nested, f"{prefix}{name}.")
        else:
            yield _leaf(f"{prefix}{name}", field)


def _leaf(path: str, field: FieldInfo) -> Leaf:
    shape = _Shape(field)
    marks = [mark for mark in field.metadata if isinstance(mark, Flag)]
    names = tuple(name for mark in marks for name in mark.names)
    inverted = tuple(name for mark in marks for name in mark.inverted)
    negated = not names and bool(inverted)
    source = (names or inverted or (path.replace(".", "_"),))[0]
    return Leaf(
        path=path,
        type_name=shape.name,
        optional=shape.optional,
        choices=shape.choices,
        bounds=f"as in {shape.pattern}"
        if shape.pattern
        else _bounds_in_words(shape.bounds, integer=shape.name == "int"),
        required=field.is_required(),
        default=None if field.is_required() else field.get_default(call_default_factory=True, validated_data={}),
        doc=" ".join((field.description or "").split()),
        flags=("--" + path.replace("_", "-"), *names),
        inverted=inverted,
        attribute=source.removeprefix("--").replace("-", "_"),
        negated=negated,
    )


class _Shape:
    """What a field's annotation says, read through `Annotated`, `| None` and `list[...]`."""

    def __init__(self, field: FieldInfo) -> None:
        self.optional = False
        self.choices: tuple[str, ...] = ()
        self.bounds: list[Any] = []
        self.pattern = ""
        self._add_marks(tuple(field.metadata))
        self.name = self._read(field.annotation)

    def _read(self, annotation: Any) -> str:
        origin, args = get_origin(annotation), get_args(annotation)
        if origin is Annotated:
            self._add_marks(args[1:])
            return self._read(args[0])
        if origin in (Union, types.UnionType):
            self.optional = self.optional or type(None) in args
            return " | ".join(self._read(a) for a in args if a is not type(None))
        if origin is Literal:
            self.choices = tuple(str(a) for a in args)
            return "str"
        if origin is list:
            return f"list[{self._read(args[0])}]"
        return (origin or annotation).__name__

    def _add_marks(self, marks: tuple[Any, ...]) -> None:
        for mark in marks:
            if isinstance(mark, FieldInfo):
                self._add_marks(tuple(mark.metadata))
            elif isinstance(mark, Ge | Gt | Le | Lt):
                self.bounds.append(mark)
            elif pattern := getattr(mark, "pattern", None):
                self.pattern = str(pattern)


def _bounds_in_words(bounds: list[Any], *, integer: bool) -> str:
    low = next((b for b in bounds if isinstance(b, Ge | Gt)), None)
    high = next((b for b in bounds if isinstance(b, Le | Lt)), None)
    words: list[str] = []
    if isinstance(low, Ge) and isinstance(high, Le):
        return f"from {low.ge} to {high.le}"
    if isinstance(low, Ge):
        words.append(f"{low.ge} or more")
    if isinstance(low, Gt) and integer:
        words.append(f"{int(str(low.gt)) + 1} or more")
    elif isinstance(low, Gt):
        words.append(f"over {low.gt}")
    if isinstance(high, Le):
        words.append(f"at most {high.le}")
    if isinstance(high, Lt):
        words.append(f"below {high.lt}")
    return " and ".join(words)
