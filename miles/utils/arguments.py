"""The door for "add a flag": a flag is a field in `miles/config/sections`, and these are what reads it."""

from miles.config.cli import parse
from miles.config.load import load
from miles.config.schema import RunConfig

__all__ = ["RunConfig", "load", "parse"]
