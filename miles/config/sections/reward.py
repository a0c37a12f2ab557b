"""Settings of rewards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PositiveFloat, PositiveInt

from miles.config.base import ConfigModel, Flag


class RewardConfig(ConfigModel):
    """How samples are judged."""

    rm_type: Annotated[Literal["math", "exact"] | None, Flag("--rm-type")] = None
    """Built-in reward: `math` grades the last \\boxed{} or final answer with math-verify, `exact` compares text with the label."""
    custom_rm_path: Annotated[str | None, Flag("--custom-rm-path")] = None
    """Reward function by import path: `async fn(args, sample) -> float | dict`; wins over `--rm-type`."""
    group_rm: Annotated[bool, Flag("--group-rm")] = False
    """Give the reward function a whole group: `async fn(args, samples) -> list`."""
    reward_key: Annotated[str | None, Flag("--reward-key")] = None
    """Entry of a reward object that is trained on."""
    eval_reward_key: Annotated[str | None, Flag("--eval-reward-key")] = None
    """Entry of a reward object that evaluation reports; unset takes `--reward-key`."""
    timeout_s: PositiveFloat = 30.0
    """Seconds one reward call may take. A built-in grader that takes longer counts as wrong and is reported; a custom function that takes longer is an error."""
    num_workers: PositiveInt = 2
    """Worker processes of the built-in maths grader."""
    custom_post_process_path: Annotated[str | None, Flag("--custom-reward-post-process-path")] = None
    """Function in place of the group normalisation: `fn(args, samples) -> (raw, normalised)`."""
    overlong_buffer_len: Annotated[PositiveInt | None, Flag("--overlong-buffer-len")] = None
    """Tokens before `--rollout-max-response-len` over which a response loses reward, the more the longer it is; unset is off."""
    overlong_penalty_factor: Annotated[PositiveFloat, Flag("--overlong-penalty-factor")] = 1.0
    """Reward that a response of the greatest length loses."""
