"""Contract tests of what turns samples into training data."""

from __future__ import annotations

from typing import Any

from miles.hooks.trial import CONTENT, IDENTITY, TRAINED, Snapshot, Trial
from miles.rollout.custom_conversion import convert_by_hook
from miles.rollout.groups import flatten
from miles.rollout.train_data_conversion import to_train_batch


async def reward_post_process(trial: Trial) -> None:
    """`fn(args, samples)`: raw and normalised rewards, finite, one each per sample."""
    groups = trial.groups()
    samples = list(flatten(groups))
    before = Snapshot(samples, (*IDENTITY, *CONTENT, *TRAINED, "reward"))
    trial.report.begin(f"{len(samples)} samples in {len(groups)} groups")
    wanted = "return (raw, normalised), two lists of finite numbers, one each per sample, in order"
    try:
        answer: Any = await trial.call(trial.args, samples)
        batch = to_train_batch(groups, reward_post_process=lambda _: answer, reward_post_process_path=trial.path)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        trial.raised(error, wanted=wanted)
        return
    rewards = batch["reward"].values
    trial.report.ok(f"normalised rewards from {min(rewards):g} to {max(rewards):g}")
    trial.unchanged(before, samples, mend="return the rewards; sample.reward stays as it is")


async def convert_samples(trial: Trial) -> None:
    """`fn(args, samples)`: columns that make a train batch."""
    groups = trial.groups()
    samples = list(flatten(groups))
    before = Snapshot(samples, (*IDENTITY, *CONTENT, *TRAINED, "reward"))
    trial.report.begin(f"{len(samples)} samples in {len(groups)} groups")
    supervised = trial.config.algorithm.loss_type == "sft_loss"
    try:
        answer: Any = await trial.call(trial.args, samples)
        batch = convert_by_hook(lambda _: answer, trial.path, groups, require_rewards=not supervised)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        trial.raised(error, wanted="return a dict of columns with one row per sample")
        return
    trial.report.ok(f"columns {', '.join(name for name, _ in batch.all_columns())}")
    trial.unchanged(before, samples, mend="only read the samples")
    trial.sendable("the columns", batch)
