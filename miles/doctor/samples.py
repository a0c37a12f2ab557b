"""A made-up rollout: ragged trajectories of two turns with masked observations, in groups, one without a trainable token."""

# T tokens of a trajectory (prompt and response)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miles.config.estimators import group_baseline
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.plugins import load_function
from miles.core.run_facts import RunFacts
from miles.core.samples import Sample
from miles.core.train_batch import TrainBatch
from miles.rollout.train_data_conversion import to_train_batch

STEPS = 2
"""Optimizer steps of the batch: from the second on the policy is not the one that sampled."""
TRAJECTORIES = 16
MAX_GROUP = 4
NOISE = 0.1
"""Standard deviation of the engine's log-probs around the trainer's, in nats; one token in 16 is off by far more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """Prompt, first turn, observation, second turn."""

    group: int
    number: int
    tokens: list[int]
    prompt: int
    """Tokens of the prompt; the first turn starts here."""
    observation: int
    """Where the observation starts."""
    second: int
    """Where the second turn starts."""
    trained: bool
    reward: float

    @property
    def mask(self) -> list[int]:
        """1 where a token is trained on, of all T."""
        before, turn = [0] * self.prompt, [int(self.trained)] * (self.observation - self.prompt)
        return before + turn + [0] * (self.second - self.observation) + [int(self.trained)] * self._left(self.second)

    def _left(self, start: int) -> int:
        return len(self.tokens) - start

    def samples(self, log_probs: Sequence[float] | None, *, split: bool) -> list[Sample]:
        """The trajectory as one sample, or `split` as one for each turn. `log_probs` has an entry for each of the T tokens."""
        ends = [(self.prompt, self.observation), (self.second, len(self.tokens))]
        found: list[Sample] = []
        for turn, (start, end) in enumerate(ends if split else [(self.prompt, len(self.tokens))]):
            sample = Sample(
                group_index=self.group,
                index=2 * self.number + turn,
                rollout_id=self.number,
                tokens=self.tokens[:end],
                response_length=end - start,
                loss_mask=self.mask[start:end],
                status=Sample.Status.COMPLETED,
            )
            if log_probs is not None:
                sample.rollout_log_probs = list(log_probs[start:end])
                sample.reward = self.reward
            found.append(sample)
        return found


def make_trajectories(vocab_size: int, *, per_group: int, seed: int) -> list[Trajectory]:
    """At least `TRAJECTORIES` of them in an even number of groups, so that an optimizer step has whole groups."""
    rng = np.random.default_rng(seed)
    per_group = min(per_group, MAX_GROUP)
    groups = STEPS * -(-TRAJECTORIES // (STEPS * per_group))
    found: list[Trajectory] = []
    for number in range(groups * per_group):
        prompt, first, seen, second = (int(rng.integers(*bounds)) for bounds in ((3, 9), (3, 15), (2, 6), (3, 15)))
        tokens = rng.integers(0, vocab_size, prompt + first + seen + second).tolist()
        found.append(
            Trajectory(
                group=number // per_group,
                number=number,
                tokens=tokens,
                prompt=prompt,
                observation=prompt + first,
                second=prompt + first + seen,
                trained=number != 1,
                reward=float(rng.normal()),
            )
        )
    return found


def engine_log_probs(scores: Sequence[Sequence[float]], *, seed: int) -> list[list[float]]:
    """What an engine that is not quite the trainer might report, of all T tokens, from log-probs of tokens 1 to T - 1."""
    rng = np.random.default_rng(seed + 1)
    found: list[list[float]] = []
    for row in scores:
        noise = rng.normal(0, NOISE, len(row)) + np.where(rng.random(len(row)) < 1 / 16, 1.0, 0.0)
        found.append([0.0, *np.minimum(np.asarray(row) + noise, -1e-4).tolist()])
    return found


def make_batch(
    config: RunConfig,
    made: Sequence[Trajectory],
    log_probs: Sequence[Sequence[float]],
    *,
    split_all: bool,
    shuffled: bool,
    seed: int,
) -> TrainBatch:
    """The train batch that the run would make of these trajectories.

    One trajectory is two samples; with `split_all` each one is. `shuffled` gives samples another order within each of the
    optimizer steps, of which each keeps its trajectories.
    """
    algorithm, supervised = config.algorithm, config.algorithm.loss_type == "sft_loss"
    samples = [
        sample
        for trajectory, row in zip(made, log_probs, strict=True)
        for sample in trajectory.samples(None if supervised else row, split=split_all or trajectory.number == 2)
    ]
    groups = [[s for s in samples if s.group_index == g] for g in sorted({t.group for t in made})]
    path = config.reward.custom_post_process_path
    post_process = None if path is None else load_function(path)
    args = HookArgs(config, RunFacts(run_dir=config.run.dir or ""))
    batch = to_train_batch(
        groups,
        baseline=group_baseline(
            algorithm.advantage_estimator,
            normalize=algorithm.rewards_normalization,
            divide_std=algorithm.grpo_std_normalization,
        ),
        require_rewards=not supervised,
        reward_post_process=None if post_process is None else lambda rows: post_process(args, rows),
        reward_post_process_path=path or "",
    )
    if not shuffled:
        return batch
    rng = np.random.default_rng(seed + 2)
    late = np.asarray([s.group_index for s in samples]) >= len(groups) // STEPS
    order = np.concatenate([rng.permutation(np.flatnonzero(half)) for half in (~late, late)])
    trajectory_B = np.asarray([s.trajectory for s in samples])[order]
    for number in range(len(made)):
        places = np.flatnonzero(trajectory_B == number)
        order[places] = np.sort(order[places])
    return batch.select(order.tolist())
