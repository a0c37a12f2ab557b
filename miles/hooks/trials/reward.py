"""Contract tests of rewards, of one sample and of a group, and of what is called before them."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from miles.core.samples import reward_value
from miles.hooks.trial import CONTENT, IDENTITY, TRAINED, LoopWatch, Snapshot, Trial
from miles.rollout.groups import flatten

WANTED = "return a finite number for every response: 0 for one that is wrong, empty or cut off"
PURE = "judge the sample as it is; what you want to keep goes into sample.metadata"
AT_ONCE = 8


async def reward(trial: Trial) -> None:
    """`fn(args, sample)`: a finite number for every sample, the same for equal ones, and the sample as it was."""
    cases = trial.cases()
    before = Snapshot([case.sample for case in cases], (*IDENTITY, *CONTENT, *TRAINED))
    values: dict[int, Any] = {}
    async with LoopWatch() as watch:
        for number, case in enumerate(cases):
            trial.report.begin(case.name)
            try:
                value = await trial.call(trial.args, case.sample)
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                trial.raised(error, may_refuse=not case.happens, wanted=WANTED)
                continue
            problem = _problem(trial, value)
            if problem is None:
                values[number] = value
                trial.report.ok(_shown(trial, value))
            else:
                trial.report.fails(problem, WANTED)
    watch.judge(trial.report)
    trial.unchanged(before, [case.sample for case in cases], mend=PURE)
    if values:
        await _at_the_same_time(trial, [(cases[i].sample, value) for i, value in values.items()])
    trial.sendable("a sample or its reward", ([case.sample for case in cases], list(values.values())))


async def _at_the_same_time(trial: Trial, known: list[tuple[Any, Any]]) -> None:
    trial.report.begin("gives the same again, many at the same time")
    chosen = (known * AT_ONCE)[:AT_ONCE]
    try:
        again = await asyncio.gather(*(trial.call(trial.args, copy.deepcopy(sample)) for sample, _ in chosen))
    except Exception as error:  # noqa: BLE001 - a user's function may raise anything
        trial.raised(error, wanted="keep no state between calls that another call disturbs")
        return
    other = [(old, new) for (_, old), new in zip(chosen, again, strict=True) if old != new]
    if other:
        trial.report.note(
            f"gave {other[0][0]!r} and then {other[0][1]!r} for the same sample; with --deterministic-mode a run needs the same"
        )
    else:
        trial.report.ok()


async def group_reward(trial: Trial) -> None:
    """`fn(args, samples)`: as many finite numbers as samples, in their order."""
    groups = trial.groups()
    subjects: list[tuple[str, list[Any]]] = [
        (f"group {i} of {len(g)}", list(flatten(g))) for i, g in enumerate(groups)
    ]
    subjects.append(("a group of one", copy.deepcopy(subjects[0][1][:1])))
    for _, samples in subjects:
        for sample in samples:
            sample.reward = None
    fields = (*IDENTITY, *CONTENT, *TRAINED)
    before = Snapshot([samples for _, samples in subjects], fields)
    wanted = "return a list with one finite number per sample, in the order of the samples"
    async with LoopWatch() as watch:
        for name, samples in subjects:
            trial.report.begin(name)
            handed = list(samples)
            try:
                values = await trial.call(trial.args, handed)
                problem = _list_problem(trial, values, len(samples))
            except Exception as error:  # noqa: BLE001 - a user's function may raise anything
                trial.raised(error, wanted=wanted)
                continue
            if problem is None and [id(s) for s in handed] != [id(s) for s in samples]:
                problem, wanted = "changed the list of samples it was given", "leave `samples` as it is; sort a copy"
            if problem is None:
                trial.report.ok(", ".join(_shown(trial, value) for value in values))
            else:
                trial.report.fails(problem, wanted)
    watch.judge(trial.report)
    trial.unchanged(before, [samples for _, samples in subjects], mend=PURE)


def _list_problem(trial: Trial, values: Any, count: int) -> str | None:
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__len__"):
        return f"returned {type(values).__name__} {values!r:.60} for {count} samples"
    if len(values) != count:
        return f"returned {len(values)} rewards for {count} samples"
    return next((problem for value in values if (problem := _problem(trial, value))), None)


def _problem(trial: Trial, value: Any) -> str | None:
    """What is wrong with one reward; None when nothing is."""
    reward_config = trial.config.reward
    keys = [key for key in (reward_config.reward_key, reward_config.eval_reward_key) if key is not None]
    try:
        for key in keys or [None]:
            reward_value(value, key)
    except ValueError as error:
        return str(error)
    return None


def _shown(trial: Trial, value: Any) -> str:
    return f"{reward_value(value, trial.config.reward.reward_key):g}"


async def sample_hook(trial: Trial) -> None:
    """`fn(args, sample, *, rollout_id, evaluation)`: may change what is judged and trained on, consistently."""
    cases = trial.cases()
    before = Snapshot([case.sample for case in cases], IDENTITY)
    wanted = "return nothing, and take every finished sample"
    for number, case in enumerate(cases):
        trial.report.begin(f"{case.name}{', in evaluation' if number % 2 else ''}")
        try:
            answer = await trial.call(trial.args, case.sample, rollout_id=number, evaluation=bool(number % 2))
            case.sample.validate()
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            trial.raised(error, may_refuse=not case.happens, wanted=wanted)
            continue
        if answer is None:
            trial.report.ok()
        else:
            trial.report.fails(f"returned {type(answer).__name__}, which nobody reads", "change the sample in place")
    trial.unchanged(
        before, [case.sample for case in cases], mend="leave the names, prompt and label of samples as they are"
    )
    trial.sendable("a sample", [case.sample for case in cases])
