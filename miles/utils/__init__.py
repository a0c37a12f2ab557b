"""Leaves that any room may use."""
