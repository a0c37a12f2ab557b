"""`miles.utils.types.Sample`: the import path that users' functions know."""

from miles.core.samples import Sample

__all__ = ["Sample"]
