"""Weight updates: one lifecycle, small transports, and the proof that an engine holds what the trainer has."""
