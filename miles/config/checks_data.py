"""Rules about the prompts' settings; `checks.py` runs them."""

from __future__ import annotations

from collections.abc import Iterator

from miles.config.known import Check
from miles.config.schema import DataConfig, RolloutConfig, RunConfig
from miles.errors import Issue

BUILTIN_SOURCE = DataConfig().source_path
INFERENCE_ROLLOUTS = (RolloutConfig().function_path, "miles.rollout.sglang_rollout.generate_rollout")
SFT_ROLLOUT = "miles.rollout.sft_rollout.generate_rollout"
MEDIA_KINDS = ("image", "video", "audio")
"""What `<image>`, `<video>` and `<audio>` in a prompt stand for."""


def weights_are_those_of_the_files(cfg: RunConfig) -> Iterator[Issue]:
    weights, files = cfg.data.prompt_data_weights, cfg.data.prompt_data
    if weights and len(weights) != len(files):
        problem = f"there are {len(weights)} weights for {len(files)} files of --prompt-data"
        yield Issue("data.prompt_data_weights", problem, "give one number per file, in their order")
    for weight in weights:
        if weight <= 0:
            fix = "give numbers above 0; leave a file out of --prompt-data to take nothing from it"
            yield Issue("data.prompt_data_weights", f"{weight:g} is no share", fix)


def blank_prompts_are_filled_in(cfg: RunConfig) -> Iterator[Issue]:
    data, rollout = cfg.data, cfg.rollout
    if data.global_dataset or data.source_path != BUILTIN_SOURCE:
        return
    flag = "--disable-rollout-global-dataset"
    if data.prompt_data:
        problem = f"{flag} reads no prompts, and --prompt-data names {' '.join(data.prompt_data)}"
        yield Issue("data.global_dataset", problem, f"leave out {flag} or --prompt-data")
    if rollout.function_path in (*INFERENCE_ROLLOUTS, SFT_ROLLOUT) and rollout.custom_generate_function_path is None:
        problem = f"with {flag} samples are blank, and nothing fills in their prompts"
        yield Issue("data.global_dataset", problem, "--custom-generate-function-path package.module.function")
    if rollout.num_rollout is None and rollout.num_epoch is not None:
        problem = f"--num-epoch counts passes over the prompts, and with {flag} there are none"
        yield Issue("rollout.num_epoch", problem, "--num-rollout STEPS")


def media_have_a_reader(cfg: RunConfig) -> Iterator[Issue]:
    data, rollout = cfg.data, cfg.rollout
    for kind in data.multimodal_keys:
        if kind not in MEDIA_KINDS:
            fix = f"use {', '.join(MEDIA_KINDS[:-1])} or {MEDIA_KINDS[-1]}: " + """'{"image": "images"}'"""
            yield Issue("data.multimodal_keys", f"there is no kind {kind!r}", fix)
    builtin = rollout.function_path in (*INFERENCE_ROLLOUTS, SFT_ROLLOUT)
    generates = rollout.custom_generate_function_path is not None and rollout.function_path != SFT_ROLLOUT
    if data.multimodal_keys and data.source_path == BUILTIN_SOURCE and builtin and not generates:
        yield Issue(
            "data.multimodal_keys",
            "engine and trainer read text alone, so images, videos and audio of the rows would be left out in silence",
            "--custom-generate-function-path with a function that opens them (docs/user-guide/data.md), or leave out "
            "--multimodal-keys",
        )


DATA_CHECKS: tuple[Check, ...] = (
    weights_are_those_of_the_files,
    blank_prompts_are_filled_in,
    media_have_a_reader,
)
