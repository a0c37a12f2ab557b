"""What the trainer has to know of an architecture beyond what transformers says of it: one file each in `specs`."""
