"""Units of measure: their names, dimensions and exact sizes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

_F = Fraction
_TABLE: dict[str, tuple[str, Fraction]] = {}


def _add(dimension: str, size: Fraction | int, names: str) -> None:
    for name in names.split():
        _TABLE[name] = (dimension, Fraction(size))


_add("length", _F(1, 1000), "mm millimeter millimetre")
_add("length", _F(1, 100), "cm centimeter centimetre")
_add("length", _F(1, 10), "dm decimeter decimetre")
_add("length", 1, "m meter metre")
_add("length", 1000, "km kilometer kilometre")
_add("length", _F(254, 10000), "in inch inches")
_add("length", _F(3048, 10000), "ft foot feet")
_add("length", _F(9144, 10000), "yd yard")
_add("length", _F(1609344, 1000), "mi mile")
_add("mass", _F(1, 1000), "mg milligram")
_add("mass", 1, "g gram")
_add("mass", 1000, "kg kilogram")
_add("mass", _F(45359237, 100000), "lb lbs pound")
_add("mass", _F(45359237, 1600000), "oz ounce")
_add("time", 1, "s sec second")
_add("time", 60, "min minute")
_add("time", 3600, "h hr hour")
_add("time", 86400, "day")
_add("time", 604800, "week")
_add("volume", _F(1, 1000), "L l liter litre")
_add("volume", _F(1, 1000000), "mL ml milliliter millilitre")
_add("money", 1, "dollar USD")
_add("money", _F(1, 100), "cent")
_add("angle", 1, "degree deg")
_add("force", 1, "N newton")
_add("energy", 1, "J joule")
_add("power", 1, "W watt")
_add("voltage", 1, "V volt")
_add("frequency", 1, "Hz hertz")
_add("unit", 1, "unit")

_FULL_NAMES_TAKE_S = 3


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: powers of dimensions and an exact size; an opaque one, such as `apple`, is a dimension by its own name."""

    powers: tuple[tuple[str, int], ...]
    size: Fraction = Fraction(1)
    is_degree: bool = False


PERCENT = Unit((("percent", 1),), Fraction(1, 100))
DEGREE = Unit((("angle", 1),), Fraction(1), is_degree=True)


def is_unit_name(word: str) -> bool:
    """Whether a word is the name of a unit, singular or plural."""
    return _lookup(word) is not None


def _lookup(word: str) -> tuple[str, Fraction] | None:
    if word in _TABLE:
        return _TABLE[word]
    low = word.lower()
    if len(low) >= _FULL_NAMES_TAKE_S and low in _TABLE:
        return _TABLE[low]
    singular = low.removesuffix("s")
    if len(singular) >= _FULL_NAMES_TAKE_S and singular in _TABLE:
        return _TABLE[singular]
    return None


def unit_of(parts: list[tuple[str, int]]) -> Unit:
    """The unit of (name, power) pairs. An unknown word is a dimension of its own; `percent` is a hundredth."""
    if len(parts) == 1 and parts[0][0].casefold() in ("percent", "%"):
        return PERCENT
    powers: dict[str, int] = {}
    size = Fraction(1)
    for name, power in parts:
        known = _lookup(name)
        if known is None:
            dimension = name.casefold().removesuffix("s")
        else:
            dimension = known[0]
            size *= known[1] ** power
        if dimension == "volume":
            dimension, power = "length", 3 * power
        if dimension != "unit":
            powers[dimension] = powers.get(dimension, 0) + power
    return Unit(tuple(sorted((name, power) for name, power in powers.items() if power)), size, [*powers] == ["angle"])
