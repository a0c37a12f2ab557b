"""Where a run's numbers go: JSONL, TensorBoard, console, curve."""
