"""Which test runs where, and the runner."""
