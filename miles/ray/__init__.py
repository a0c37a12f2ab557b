"""Placement, actors and supervision on Ray."""
