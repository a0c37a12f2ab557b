"""The process that runs contract tests: whatever the function does, the owner survives it and can end it."""

from __future__ import annotations

import asyncio
import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles.config.dump import undump
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.hook_contracts import HOOKS
from miles.core.plugins import check_signature, is_async, load_function
from miles.core.run_facts import RunFacts
from miles.core.samples import Sample
from miles.errors import HookError, MilesError
from miles.hooks import samples
from miles.hooks.findings import DATA, LOADS, SIGNATURE, Report
from miles.hooks.places import place_of
from miles.hooks.trial import Trial

NUM_PROMPTS = 3


def main(folder: str) -> None:
    """Run the tests of FOLDER/task.json with FOLDER/config.yaml; findings go to FOLDER/findings.jsonl."""
    work = Path(folder)
    task = json.loads((work / "task.json").read_text(encoding="utf-8"))
    config = undump((work / "config.yaml").read_text(encoding="utf-8"))
    with (work / "findings.jsonl").open("a", encoding="utf-8") as file:
        run_tests(task, config, Report(file))


def run_tests(task: dict[str, Any], config: RunConfig, report: Report) -> None:
    """All contract tests of `task`: `path` and `flag` of the hook, `samples` (a file or None), and `timeout_s` of a call."""
    trial = _prepare(task, config, report)
    if trial is not None:
        _run(task["flag"], trial)
    report.end()


def _prepare(task: dict[str, Any], config: RunConfig, report: Report) -> Trial | None:
    path, contract = task["path"], HOOKS[task["flag"]]
    report.begin(LOADS)
    try:
        fn = load_function(path)
        report.ok(place_of(fn))
        report.begin(SIGNATURE)
        form = check_signature(fn, contract, path)
    except HookError as error:
        report.fails(f"{error.hook}: {error.problem}", error.fix)
        return None
    kind = "a class" if form == "class" else "async" if is_async(fn) else "plain"
    report.ok(f"{kind}; called as {contract.example.split('  or  ')[0] if form == 'class' else _call(contract, form)}")
    args: HookArgs = pickle.loads(pickle.dumps(HookArgs(config, RunFacts())))
    report.begin(DATA)
    try:
        given = samples.saved_groups(task["samples"]) if task["samples"] else None
        prompts = _prompts(config, args, own_source=task["flag"] == "--data-source-path")
    except MilesError as error:
        report.fails(str(error), "leave --prompt-data out, to try the function on made-up prompts")
        return None
    report.ok(_told(task, prompts, given))
    return Trial(
        path=path,
        contract=contract,
        fn=fn,
        form=form,
        config=config,
        args=args,
        report=report,
        time_limit_s=task["timeout_s"],
        prompts=prompts,
        given=given,
    )


def _call(contract: Any, form: str) -> str:
    return str(next(call for call in contract.calls if call.name == form))


def _prompts(config: RunConfig, args: HookArgs, *, own_source: bool) -> list[Sample]:
    """Prompts of the run's data where it names some, else made-up ones."""
    if own_source or not config.data.prompt_data or not config.model.hf_checkpoint:
        return samples.made_up_prompts(NUM_PROMPTS)
    groups = load_function(config.data.source_path)(args).get_samples(NUM_PROMPTS)
    return [group[0] for group in groups]


def _told(task: dict[str, Any], prompts: Sequence[Sample], given: Sequence[Any] | None) -> str:
    if given is not None:
        return f"samples of {task['samples']}"
    return f"prompts like {prompts[0].prompt_text[:50]!r}, with the label {prompts[0].label!r:.50}"


def _run(flag: str, trial: Trial) -> None:
    from miles.hooks.trials import TRIALS

    if flag in TRIALS:
        asyncio.run(TRIALS[flag](trial))
    else:
        trial.report.begin("trains with it")
        trial.report.not_run(
            "`miles doctor loss RECIPE.yaml` does, and proves that the loss does not depend on how work is split"
        )


if __name__ == "__main__":
    main(sys.argv[1])
