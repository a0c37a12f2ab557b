"""The verb: read, count, tell."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from miles.config.reward_types import split_boxed
from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.data_check import report
from miles.data_check.labels import label_problems
from miles.data_check.options import HELP, USAGE, Options, read_options
from miles.data_check.scan import Found, Reader, scan
from miles.errors import DataError
from miles.rollout.dataset.rows import PromptFormat
from miles.rollout.sft_rollout import SftFormat
from miles.utils.hf import context_length, load_tokenizer
from miles.utils.verb import run_verb

UNGRADED = ("remote_rm", "random", "deterministic_random")
"""Rewards that no label stops, or that ask a server."""


def main(argv: Sequence[str]) -> int:
    """Run `miles data ...`; returns the exit status."""
    return run_verb(argv, read_options, check, help_text=HELP, word="check", usage=USAGE)


def check(options: Options) -> int:
    """Read all files and report; 0 when a run would take every row."""
    config = options.config
    args = HookArgs(config, RunFacts())
    reader = reader_of(config, args)
    results: list[dict[str, Any]] = []
    for path in config.data.prompt_data:
        found = _scanned(path, reader)
        results.append(report.result(found, _grade_labels(found, reader, args)))
    if options.json_path is not None:
        data = json.dumps({"files": results}, indent=2, ensure_ascii=False, default=str)
        options.json_path.write_text(data + "\n", encoding="utf-8", errors="backslashreplace")
    told = report.text(results, options.show, reader.tokenizer is not None)
    sys.stdout.write(told.encode("utf-8", "backslashreplace").decode("utf-8"))
    unusable = [one for one in results if one["num_problems"] or (one["rows"] and one["dropped"] == one["rows"])]
    return 1 if unusable else 0


def reader_of(config: RunConfig, args: HookArgs) -> Reader:
    """How a run with this configuration reads rows."""
    folder = config.model.hf_checkpoint
    tokenizer = load_tokenizer(folder, config.model.chat_template_path) if folder else None
    context = config.rollout.max_context_len or (context_length(folder) if folder else None)
    format = PromptFormat.of(args, context)
    sft = None
    if config.algorithm.loss_type == "sft_loss":
        sft = SftFormat(
            mask_type=config.data.loss_mask_type,
            apply_chat_template=config.data.apply_chat_template,
            template_kwargs=config.data.apply_chat_template_kwargs,
        )
        format = format.limited_to(config.rollout.max_context_len)
    return Reader(format=format, tokenizer=tokenizer, fine_tuning=sft, keep_labels=_grades(config))


def _grades(config: RunConfig) -> bool:
    """Whether a built-in reward compares with the labels of these rows."""
    kind = config.reward.rm_type
    named = config.data.label_key is not None and kind is not None and config.reward.custom_rm_path is None
    return named and split_boxed(str(kind))[1] not in UNGRADED and config.algorithm.loss_type != "sft_loss"


def _scanned(path: str, reader: Reader) -> Found:
    try:
        return scan(path, reader)
    except DataError as error:
        found = Found(path)
        found.add_problem(error)
        return found


def _grade_labels(found: Found, reader: Reader, args: HookArgs) -> int | None:
    if not reader.keep_labels or not found.labels:
        return None
    problems, looked_at = asyncio.run(label_problems(args, found.labels.values(), found.path))
    for problem in problems:
        found.add_problem(problem)
    return looked_at
