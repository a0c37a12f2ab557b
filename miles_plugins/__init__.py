"""Plug-ins that a setting names by path; nothing in `miles` imports this package."""
