"""Supervised fine-tuning as a rollout: the data's own answers in place of generated ones. Starts no request."""

from __future__ import annotations

import functools
from typing import Any

from miles.core.ports import DataSource
from miles.core.samples import Group, Sample
from miles.errors import HookError, TrainingError
from miles.rollout.base_types import RolloutFnTrainOutput
from miles.rollout.groups import excerpt
from miles.utils.chat_template_utils import Message, encode_prompt, encode_texts, render
from miles.utils.hf import context_length, load_tokenizer

FUNCTION_PATH = "miles.rollout.sft_rollout.generate_rollout"


def generate_rollout(
    args: Any, rollout_id: int, data_source: DataSource, evaluation: bool = False
) -> RolloutFnTrainOutput:
    """`--rollout-batch-size` groups whose responses are the answers of the data.

    A row is a prompt with its answer under `--label-key`, or a list of chat messages that ends with the assistant's.
    A string prompt without `--apply-chat-template` is followed by the answer and the end-of-sequence token; everything
    else is written by the chat template, applied once. Every token of the answer up to the end of sequence is trained
    on. There are no log-probs and no rewards.
    """
    if evaluation:
        raise HookError(
            FUNCTION_PATH,
            "has no evaluation",
            "set --eval-function-path miles.rollout.inference_rollout.InferenceRolloutFn, or leave --eval-interval out",
        )
    tokenizer = _tokenizer(args.hf_checkpoint, args.chat_template_path)
    limit = args.rollout_max_context_len or context_length(args.hf_checkpoint)
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        _fill(group, tokenizer, limit, args.apply_chat_template, args.apply_chat_template_kwargs)
    return RolloutFnTrainOutput(samples=groups)


_tokenizer = functools.lru_cache(maxsize=2)(load_tokenizer)


def _fill(
    group: Group, tokenizer: Any, limit: int | None, use_template: bool, template_kwargs: dict[str, Any]
) -> None:
    """Give all samples of one prompt the same tokens and mask."""
    first = group[0]
    try:
        prompt_ids, answer_ids, answer = supervised_ids(tokenizer, first, use_template, template_kwargs)
    except ValueError as error:
        raise TrainingError(f"sample {first.index} ({excerpt(first)}): {error}") from None
    length = len(prompt_ids) + len(answer_ids)
    if limit is not None and length > limit:
        raise TrainingError(
            f"sample {first.index} ({excerpt(first)}): prompt and answer have {length} tokens, but the context holds "
            f"{limit}; shorten this row, or raise --rollout-max-context-len if the model can"
        )
    for sample in group:
        sample.tokens = prompt_ids + answer_ids
        sample.response, sample.response_length = answer, len(answer_ids)
        sample.loss_mask = [1] * len(answer_ids)
        sample.status = Sample.Status.COMPLETED


def supervised_ids(
    tokenizer: Any, sample: Sample, use_template: bool, template_kwargs: dict[str, Any]
) -> tuple[list[int], list[int], str]:
    """Token ids of prompt and answer, and the answer's text.

    Raises ValueError when the row has no answer, or when the chat template writes the conversation with the answer
    differently from the prompt followed by the answer.
    """
    if sample.label is not None and not isinstance(sample.label, str):
        raise ValueError(f"the label is {type(sample.label).__name__}, but an answer is text")
    if isinstance(sample.prompt, str) and not use_template:
        if sample.label is None:
            raise ValueError(
                "there is no answer: name its key with --label-key, or give lists of chat messages that end with the "
                "assistant's"
            )
        prompt_ids = sample.tokens or encode_prompt(tokenizer, sample.prompt, template_kwargs)
        answer_ids = [*encode_texts(tokenizer, [sample.label], rendered=True)[0], _end_id(tokenizer)]
        return list(prompt_ids), answer_ids, sample.label
    return _templated_ids(tokenizer, _conversation(sample), template_kwargs)


def _conversation(sample: Sample) -> list[Message]:
    """Prompt and answer as messages; raises ValueError unless there is exactly one answer, at the end."""
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    ends_with_answer = bool(messages) and messages[-1].get("role") == "assistant"
    if sample.label is None and not ends_with_answer:
        raise ValueError(
            "the last message is not the assistant's, so there is no answer: end with it, or name the answer's key "
            "with --label-key"
        )
    if sample.label is not None and ends_with_answer:
        raise ValueError("the last message is the assistant's and there is a label too; leave --label-key out")
    return messages if sample.label is None else [*messages, {"role": "assistant", "content": sample.label}]


def _templated_ids(
    tokenizer: Any, messages: list[Message], template_kwargs: dict[str, Any]
) -> tuple[list[int], list[int], str]:
    prompt = render(tokenizer, messages[:-1], template_kwargs)
    whole = render(tokenizer, messages, {**template_kwargs, "add_generation_prompt": False})
    prompt_ids, whole_ids = encode_texts(tokenizer, [prompt, whole], rendered=True)
    if not whole.startswith(prompt) or whole_ids[: len(prompt_ids)] != prompt_ids:
        raise ValueError(
            "the chat template writes the prompt differently once the answer follows, so the answer's tokens are not "
            f"defined; the prompt alone ends with {prompt[-60:]!r}. Pass a --chat-template-path that only appends"
        )
    answer_ids = _until_end(whole_ids[len(prompt_ids) :], tokenizer.eos_token_id)
    if not answer_ids:
        raise ValueError("the assistant's message has no tokens")
    return prompt_ids, answer_ids, whole[len(prompt) :]


def _end_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a response could not end; set eos_token")
    return int(tokenizer.eos_token_id)


def _until_end(answer_ids: list[int], end_id: int | None) -> list[int]:
    """Without what the template writes after the end-of-sequence token: a model stops there and never writes it."""
    if end_id is None or end_id not in answer_ids:
        return answer_ids
    return answer_ids[: len(answer_ids) - answer_ids[::-1].index(end_id)]
