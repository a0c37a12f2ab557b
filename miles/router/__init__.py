"""The HTTP router between the rollout and the engines of one served model."""
