"""The class-based rollout: collect groups for a training batch, and evaluate."""

from miles.rollout.inference_rollout.rollout_fn import InferenceRolloutFn
from miles.rollout.inference_rollout.state import GenerateState

__all__ = ["GenerateState", "InferenceRolloutFn"]
