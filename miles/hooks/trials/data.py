"""Contract tests of data sources and of what takes groups out of their buffer."""

from __future__ import annotations

import json
from typing import Any

from miles.core.plugins import is_async
from miles.core.samples import Group
from miles.errors import HookError
from miles.hooks.trial import Trial
from miles.rollout.groups import flatten

ASKED = 3
METHODS = ("get_samples", "add_samples", "state_dict", "load_state_dict", "save", "load")


async def data_source(trial: Trial) -> None:
    """`cls(args)`: exactly as many groups as asked for, numbered or not at all, and a state that goes on where it was."""
    n = trial.config.rollout.n_samples_per_prompt
    trial.report.begin("is made as cls(args)")
    try:
        source = await trial.call(trial.args)
        awaited = [name for name in METHODS if is_async(getattr(source, name, None))]
        if awaited:
            trial.report.fails(f"{awaited[0]} is async, and is not awaited", "make it a plain method")
            return
        trial.report.ok()
        trial.report.begin(f"get_samples({ASKED}) gives as many groups of {n}")
        first: list[Group] = await trial.call(ASKED, fn=source.get_samples)
        if problem := _problem(first, ASKED, n):
            trial.report.fails(problem, f"return a list of exactly num_samples groups, lists of {n} new Samples")
            return
        trial.report.ok(f"prompts like {first[0][0].prompt_text[:60]!r}")
        await _numbering(trial, source, first)
        await _giving_back(trial, source, n)
        await _resuming(trial, source)
    except Exception as error:  # noqa: BLE001 - a user's class may raise anything
        trial.raised(error, wanted="mend the class")


def _problem(groups: Any, count: int, n: int) -> str | None:
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        return f"returned {type(groups).__name__}, not a list of lists"
    if len(groups) != count:
        return f"returned {len(groups)} groups"
    sizes = sorted({len(group) for group in groups} - {n})
    if sizes:
        return f"returned a group of {sizes[0]} samples"
    try:
        samples = list(flatten(groups))
    except HookError as error:
        return error.problem
    if len({id(s) for s in samples}) < len(samples):
        return "returned the same Sample object twice"
    if any(s.response_length or s.reward is not None for s in samples):
        return "returned samples that have a response or a reward already"
    return None


async def _numbering(trial: Trial, source: Any, first: list[Group]) -> None:
    trial.report.begin("numbers groups and samples, or leaves that to Miles")
    second = await trial.call(1, fn=source.get_samples)
    groups = [*first, *second]
    mend = "give each new group the next group_index and each sample the next index, or leave both None"
    numbers = [group[0].group_index for group in groups]
    indices = [s.index for s in flatten(groups)]
    if all(number is None for number in numbers):
        trial.report.ok("leaves it to Miles")
    elif None in numbers or numbers != sorted(set(numbers)):
        trial.report.fails(f"group_index of four groups: {numbers}", mend)
    elif any(len({s.group_index for s in group}) > 1 for group in groups):
        trial.report.fails("one group has several values of group_index", mend)
    elif None not in indices and len(set(indices)) < len(indices):
        trial.report.fails(f"index of their samples: {indices}", mend)
    else:
        trial.report.ok(f"group_index {numbers[0]} to {numbers[-1]}")


async def _giving_back(trial: Trial, source: Any, n: int) -> None:
    trial.report.begin("add_samples takes groups back, and issues them again")
    groups = await trial.call(2, fn=source.get_samples)
    prompts = [group[0].prompt for group in groups]
    await trial.call(groups, fn=source.add_samples)
    again = await trial.call(2, fn=source.get_samples)
    if [group[0].prompt for group in again] == prompts:
        trial.report.ok("first")
    else:
        trial.report.note("did not issue them next: on resume, groups given back must come again sooner or later")


async def _resuming(trial: Trial, source: Any) -> None:
    trial.report.begin("goes on where a checkpoint was made")
    if not hasattr(source, "state_dict"):
        trial.report.not_run("it keeps its state itself, with save() and load()")
        return
    state = await trial.call(fn=source.state_dict)
    wanted = (
        "let state_dict() return all that the next groups depend on, as JSON has it, and load_state_dict() take it"
    )
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        trial.report.fails(f"its state is not JSON: {error}", wanted)
        return
    expected = [s.prompt for s in flatten(await trial.call(ASKED, fn=source.get_samples))]
    resumed = await trial.call(trial.args)
    await trial.call(json.loads(text), fn=resumed.load_state_dict)
    found = [s.prompt for s in flatten(await trial.call(ASKED, fn=resumed.get_samples))]
    if found == expected:
        trial.report.ok(f"{len(text)} bytes of state")
    else:
        b = next(i for i, (a, c) in enumerate(zip(expected, found, strict=True)) if a != c)
        trial.report.fails(f"the resumed source gave {found[b]!r:.60} where {expected[b]!r:.60} was due", wanted)


async def buffer_filter(trial: Trial) -> None:
    """`fn(args, rollout_id, buffer, num_samples)`: at most as many groups as asked for, taken out of the buffer."""
    wanted = "return a list of at most num_samples groups, and remove them from `buffer`"
    for asked in (2, 1, 100):
        buffer = trial.groups()
        before = list(buffer)
        trial.report.begin(f"asked for {asked} of {len(buffer)} groups")
        try:
            taken: Any = await trial.call(trial.args, None, buffer, asked)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            trial.raised(error, wanted=wanted)
            continue
        if not isinstance(taken, list) or any(not isinstance(group, list) for group in taken):
            trial.report.fails(f"returned {type(taken).__name__}, not a list of groups", wanted)
        elif len(taken) > asked:
            trial.report.fails(f"returned {len(taken)} groups", wanted)
        elif any(group is kept for group in taken for kept in buffer):
            trial.report.fails("returned a group that is still in the buffer", wanted)
        elif any(all(group is not old for old in before) for group in [*taken, *buffer]):
            trial.report.fails("made a group that was not in the buffer", wanted)
        elif len(taken) + len(buffer) < len(before):
            trial.report.note(f"drops {len(before) - len(taken) - len(buffer)} groups for good")
        else:
            trial.report.ok(f"takes {len(taken)}, leaves {len(buffer)}")
