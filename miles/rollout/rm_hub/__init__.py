"""Rewards: built-in graders, and the hub that applies them or a user's function. Imports nothing: worker processes load parts of it."""
