"""A tiny model folder, settings, and users' functions for the tests of this room."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.run_facts import RunFacts
from miles.rollout.base_types import GenerateFnInput, GenerateFnOutput, RolloutFnConstructorInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.inference_rollout import InferenceRolloutFn
from miles.utils import http_utils

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-=?:."
END = 1
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIALS = ["<unk>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def make_model_folder(folder: Path, context: int = 64) -> Path:
    """A folder with a character-level tokenizer and a model's config, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")  # pyright: ignore
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context, "eos_token_id": END}))
    return folder


def ids(text: str) -> list[int]:
    """Token ids of a text in the tiny tokenizer."""
    return [len(SPECIALS) + CHARACTERS.index(c) for c in text]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def make_args(folder: Path, url: str = "", rows: int = 8, **sections: dict[str, Any]) -> HookArgs:
    """`args` of a run with 2 prompts of 2 samples a step; `rollout={"batch_size": 4}` changes a section."""
    data = folder / "prompts.jsonl"
    if not data.exists():
        write_rows(data, [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(rows)])
    base: dict[str, dict[str, Any]] = {
        "model": {"hf_checkpoint": str(make_model_folder(folder / "model"))},
        "data": {"prompt_data": str(data), "label_key": "label"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "max_response_len": 8},
        "reward": {"custom_rm_path": "tests.fast.rollout.support.response_is_label"},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return HookArgs(RunConfig.model_validate(merged), RunFacts(router_url=url))


def make_rollout(args: HookArgs, data_source: Any = None, ledger: Any = None) -> InferenceRolloutFn:
    source = data_source or RolloutDataSourceWithBuffer(args)
    return InferenceRolloutFn(RolloutFnConstructorInput(args, source, ledger))


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run an async test and close the connections it used."""

    async def wrapped() -> None:
        try:
            await asyncio.wait_for(test, 20)
        finally:
            await http_utils.aclose()

    asyncio.run(wrapped())


# ---- users' functions


async def response_is_label(args: Any, sample: Any, **_: Any) -> float:
    return float(sample.response == sample.label)


async def broken_reward(args: Any, sample: Any, **_: Any) -> float:
    raise RuntimeError(f"no judge for {sample.label}")


def drop_even_groups(args: Any, group: Any, **_: Any) -> Any:
    return group[0].group_index % 2 == 1


def drop_everything(args: Any, group: Any, **_: Any) -> bool:
    return False


def broken_filter(args: Any, group: Any, **_: Any) -> bool:
    raise KeyError("score")


def remove_wrong(args: Any, groups: Any) -> None:
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.reward == 0


SEEN: list[list[int]] = []


def remember_all(args: Any, all_groups: Any, data_source: Any) -> None:
    SEEN.append([group[0].group_index for group in all_groups])


async def two_fragments(input: GenerateFnInput) -> GenerateFnOutput:
    import copy

    fragments = []
    for part in ("a", "b"):
        sample = copy.deepcopy(input.sample)
        sample.append_response(ids(part), [-1.0], part, "1")
        sample.status = sample.Status.COMPLETED
        sample.reward = float(input.sample.index % 2)
        fragments.append(sample)
    return GenerateFnOutput(samples=fragments)


async def gives_up(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    sample.status = sample.Status.ABORTED
    return sample


async def broken_generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    raise ConnectionError("the sandbox is gone")


async def forgets_to_return(input: GenerateFnInput) -> None:
    return None


async def cancels_itself(input: GenerateFnInput) -> None:
    raise asyncio.CancelledError
