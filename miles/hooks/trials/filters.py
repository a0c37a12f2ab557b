"""Contract tests of filters: of a group, of a batch, and of what sees all groups."""

from __future__ import annotations

import copy
from typing import Any

from miles.core.fakes import FakeDataSource
from miles.hooks.trial import CONTENT, IDENTITY, TRAINED, Snapshot, Trial
from miles.rollout.filter_hub.base_types import DynamicFilterOutput
from miles.rollout.groups import flatten

REWARDED = ("reward",)


async def dynamic_filter(trial: Trial) -> None:
    """`fn(args, group)`: a bool or `DynamicFilterOutput` for every finished group, of one sample too."""
    groups = trial.groups()
    groups.append(copy.deepcopy(groups[0][:1]))
    names = [f"group {i} of {len(group)}" for i, group in enumerate(groups[:-1])] + ["a group of one"]
    before = Snapshot(groups, (*IDENTITY, *CONTENT, *TRAINED, *REWARDED))
    wanted = "return DynamicFilterOutput(keep=..., reason=...) or a bool for every group"
    for name, group in zip(names, groups, strict=True):
        trial.report.begin(name)
        try:
            verdict = await trial.call(trial.args, group)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            trial.raised(error, wanted=wanted)
            continue
        if isinstance(verdict, DynamicFilterOutput) and isinstance(verdict.reason, str | None):
            reason = verdict.reason or "no reason given"
            trial.report.ok("keeps it" if verdict.keep else f"drops it: {reason}")
        elif isinstance(verdict, bool):
            trial.report.ok("keeps it" if verdict else "drops it, counted as `filtered`")
        else:
            trial.report.fails(f"returned {type(verdict).__name__} {verdict!r:.60}", wanted)
    mend = "only judge the group; --rollout-sample-filter-path may change samples"
    trial.unchanged(before, groups, mend=mend)


async def sample_filter(trial: Trial) -> None:
    """`fn(args, groups)`: may set `remove_sample` and masks; groups and samples stay."""
    groups = trial.groups()
    sizes = [len(group) for group in groups]
    before = Snapshot(groups, (*IDENTITY, *CONTENT, *REWARDED))
    trial.report.begin(f"a batch of {len(groups)} groups")
    wanted = "set sample.remove_sample, and return nothing"
    try:
        answer = await trial.call(trial.args, groups)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        trial.raised(error, wanted=wanted)
        return
    if answer is not None:
        trial.report.fails(f"returned {type(answer).__name__}, which nobody reads", wanted)
    elif [len(group) for group in groups] != sizes:
        trial.report.fails(f"groups had {sizes} samples, and have {[len(g) for g in groups]}", wanted)
    else:
        removed = sum(s.remove_sample for s in flatten(groups))
        trial.report.ok(f"removes {removed} of {sum(sizes)} samples")
    trial.unchanged(before, groups, mend=wanted)
    trial.sendable("a sample", groups)


async def all_samples(trial: Trial) -> None:
    """`fn(args, all_groups, data_source)`: looks on."""
    groups = trial.groups()
    source = FakeDataSource(num_prompts=len(groups), n_samples_per_prompt=len(groups[0]))
    before = Snapshot(groups, (*IDENTITY, *CONTENT, *TRAINED, *REWARDED))
    trial.report.begin(f"{len(groups)} groups")
    wanted = "return nothing"
    try:
        answer: Any = await trial.call(trial.args, groups, source)
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        trial.raised(error, wanted=wanted)
        return
    if answer is None:
        trial.report.ok()
    else:
        trial.report.fails(f"returned {type(answer).__name__}, which nobody reads", wanted)
    trial.unchanged(before, groups, mend="leave finished groups as they are: kept ones are about to be trained on")
