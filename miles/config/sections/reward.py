"""Settings of rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from miles.config.base import ConfigModel, Flag


class RewardConfig(ConfigModel):
    """How samples are judged."""

    rm_type: Annotated[str | None, Flag("--rm-type")] = None
    """Built-in reward: `math`, `dapo`, `deepscaler`, `gemma_math`, `exact`, `f1`, `gpqa`, `remote_rm`, `code`, `ifbench`, `random`, `deterministic_random`; `boxed_TYPE` judges only what the last \\boxed{} holds. A row's `rm_type` in its metadata wins over it. See docs/user-guide/rewards.md."""
    custom_rm_path: Annotated[str | None, Flag("--custom-rm-path")] = None
    """Reward function by import path: `async fn(args, sample) -> float | dict`; wins over `--rm-type`."""
    group_rm: Annotated[bool, Flag("--group-rm")] = False
    """Give the reward function a whole group: `async fn(args, samples) -> list`."""
    rm_url: Annotated[str | None, Flag("--rm-url")] = None
    """Address of the reward server of `remote_rm`; several, with commas between them, take turns."""
    remote_max_in_flight: PositiveInt = 64
    """Requests to reward servers at the same time."""
    remote_send_metadata: bool = False
    """Send a sample's metadata to the reward server, beside prompt, response and label."""
    reward_key: Annotated[str | None, Flag("--reward-key")] = None
    """Entry of a reward object that is trained on."""
    eval_reward_key: Annotated[str | None, Flag("--eval-reward-key")] = None
    """Entry of a reward object that evaluation reports; unset takes `--reward-key`."""
    timeout_s: PositiveFloat = 30.0
    """Seconds one reward call may take. A maths answer that takes a grader longer counts as wrong and is reported; a custom function or a reward server that takes longer, its retries included, is an error."""
    num_workers: PositiveInt = 2
    """Worker processes of a built-in reward that needs some: `math`, `code`, `ifbench`."""
    code_time_s: PositiveFloat = 5.0
    """Seconds of processor time that a program of the `code` reward may take for one test, or of wall time while it waits."""
    code_memory_mb: PositiveInt = 1024
    """Megabytes of memory of one such program."""
    code_partial_credit: bool = False
    """Reward the fraction of tests that pass, in place of 1 for all of them and else 0."""
    max_error_rate: Annotated[float, Flag("--max-reward-error-rate"), Field(ge=0, le=1)] = 0.1
    """Share of a step's reward calls that may end in an error before the run stops; an error is never a reward. 1 never stops."""
    custom_post_process_path: Annotated[str | None, Flag("--custom-reward-post-process-path")] = None
    """Function in place of the group normalisation: `fn(args, samples) -> (raw, normalised)`."""
    custom_convert_samples_path: Annotated[str | None, Flag("--custom-convert-samples-to-train-data-path")] = None
    """Function in place of the conversion of samples to columns of the train batch: `fn(args, samples) -> {name: rows}`; see docs/user-guide/customization.md."""
    overlong_buffer_len: Annotated[PositiveInt | None, Flag("--overlong-buffer-len")] = None
    """Tokens before `--rollout-max-response-len` over which a response loses reward, the more the longer it is; unset is off."""
    overlong_penalty_factor: Annotated[PositiveFloat, Flag("--overlong-penalty-factor")] = 1.0
    """Reward that a response of the greatest length loses."""
