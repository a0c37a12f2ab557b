"""The sections of the schema, one file for settings that belong together."""
