"""The verb: grade again, compare, tell."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Sequence
from typing import Any

from miles.core.hook_args import HookArgs
from miles.core.hook_contracts import GROUP_REWARD, HOOKS
from miles.core.plugins import check_signature, load_function
from miles.core.run_facts import RunFacts
from miles.errors import ConfigError, MilesError
from miles.reward_check import report
from miles.reward_check.compare import Graded, differ
from miles.reward_check.options import HELP, USAGE, Options, read_options
from miles.reward_check.samples import Saved, read_saved
from miles.rollout.rm_hub.hub import RewardHub
from miles.utils.http_utils import aclose
from miles.utils.verb import run_verb


def main(argv: Sequence[str]) -> int:
    """Run `miles reward ...`; returns the exit status."""
    return run_verb(argv, read_options, check, help_text=HELP, word="check", usage=USAGE)


def check(options: Options) -> int:
    """Grade and report; 0 when every reward is as it is stored."""
    groups = read_saved(options.path)
    began = time.perf_counter()
    graded, metrics = asyncio.run(grade(options, groups))
    found = report.result(options, graded, time.perf_counter() - began, metrics)
    if options.json_path is not None:
        options.json_path.write_text(json.dumps(found, indent=2, default=str) + "\n", encoding="utf-8")
    sys.stdout.write(report.text(found, options.show))
    if found["errors"]:
        return 1
    return 1 if found["differences"] and not options.allow_differences else 0


async def grade(options: Options, groups: Sequence[Sequence[Saved]]) -> tuple[list[Graded], dict[str, float]]:
    """Every sample's outcome, in the order of the file, and the counts of the hub.

    Raises HookError when the custom function does not import or cannot be called, ConfigError when no reward is named.
    """
    reward = options.config.reward
    if reward.custom_rm_path is not None:
        contract = HOOKS[GROUP_REWARD if reward.group_rm else "--custom-rm-path"]
        check_signature(load_function(reward.custom_rm_path), contract, reward.custom_rm_path)
    hub = RewardHub(HookArgs(options.config, RunFacts(run_dir=options.config.run.dir or "")))
    places = asyncio.Semaphore(options.in_flight)
    try:
        if reward.group_rm:
            jobs = [_grade_group(options, hub, places, group) for group in groups]
        else:
            jobs = [_grade_group(options, hub, places, [saved]) for group in groups for saved in group]
        outcomes = await asyncio.gather(*jobs)
        return [graded for outcome in outcomes for graded in outcome], hub.metrics()
    finally:
        await hub.close()
        await aclose()


async def _grade_group(
    options: Options, hub: RewardHub, places: asyncio.Semaphore, group: Sequence[Saved]
) -> list[Graded]:
    """Samples that are graded by one call. An error of a reward is each one's outcome; one of the settings is raised."""
    samples = [saved.sample for saved in group]
    async with places:
        began = time.perf_counter()
        job: Awaitable[Any] = hub.grade_group(samples) if options.config.reward.group_rm else hub.grade(samples[0])
        try:
            await job
        except ConfigError:
            raise
        except MilesError as error:
            return [Graded(saved=saved, error=str(error), seconds=time.perf_counter() - began) for saved in group]
        seconds = time.perf_counter() - began
    key = options.config.reward.reward_key
    return [
        Graded(
            saved=saved,
            now=saved.sample.reward,
            seconds=seconds,
            differs=differ(saved.stored, saved.sample.reward, key, options.tolerance),
        )
        for saved in group
    ]
