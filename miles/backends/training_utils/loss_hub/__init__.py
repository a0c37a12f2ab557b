"""The losses, one file each."""
