"""The configuration of a run: schema, checks, loader. Imports neither torch nor ray."""
