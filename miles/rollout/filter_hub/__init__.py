"""Filters that keep or drop finished groups."""
