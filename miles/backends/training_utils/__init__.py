"""What trainers share, in pure torch: log-probs, losses, advantages, schedules, metrics, parity."""
