"""`miles parity`: how far engines and trainer are apart, for every pair of their settings."""
