"""Trainers, engines, and what joins them."""
