"""The resolved configuration as YAML, and back."""

from __future__ import annotations

from miles.config.schema import RunConfig


def dump(cfg: RunConfig) -> str:
    """Every setting with its value; a recipe that gives an equal configuration."""
    from miles.config.yaml_text import write_yaml

    return write_yaml(cfg.model_dump(mode="json"))


def undump(text: str) -> RunConfig:
    """The configuration that `dump` wrote. Validated, but not checked again: it was when it was made."""
    from miles.config.yaml_text import read_yaml

    return RunConfig.model_validate(read_yaml(text))
