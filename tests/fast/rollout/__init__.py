"""Tests of the rollout room."""
