"""Supervised fine-tuning as a rollout: the data's own answers in place of generated ones. Starts no request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.core.ledger import Ledger
from miles.core.samples import Group, Sample
from miles.errors import DataError, HookError
from miles.rollout.base_types import (
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)
from miles.rollout.groups import excerpt
from miles.utils.chat_template_utils import Message, encode_prompt, encode_texts
from miles.utils.hf import context_length, load_tokenizer
from miles.utils.mask_utils import Conversation, MaskedTokens, end_token_ids, mask_conversation

logger = logging.getLogger(__name__)

FUNCTION_PATH = "miles.rollout.sft_rollout.generate_rollout"
TOO_LONG = "too_long"
MOST_DROPS_IN_A_ROW = 1000
"""Where the data source has no length; one that has stops after as many as it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SftFormat:
    """How rows become tokens and a mask."""

    mask_type: str = "template"
    apply_chat_template: bool = False
    """Write a string prompt as a user's message too."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


class SftRolloutFn:
    """`--rollout-batch-size` groups whose responses are the answers of the data.

    A row is a prompt with its answer under `--label-key`, or a list of chat messages that ends with the assistant's. A
    string prompt without `--apply-chat-template` is followed by the answer and the end-of-sequence token; everything
    else is written by the chat template and masked as `--loss-mask-type` says. The response begins at the first token
    that is trained on. There are no log-probs and no rewards.

    Conversations longer than `--rollout-max-context-len` are dropped and counted, and others drawn for them; without
    that flag one that the model cannot hold is an error, as is every row that cannot be trained on.
    """

    def __init__(self, input: RolloutFnConstructorInput) -> None:
        args = input.args
        self._source, self._ledger = input.data_source, input.ledger or Ledger()
        self._batch_size: int = args.rollout_batch_size
        self._tokenizer = load_tokenizer(args.hf_checkpoint, args.chat_template_path)
        self._ends = end_token_ids(self._tokenizer)
        self._dropping_limit: int | None = args.rollout_max_context_len
        self._model_limit = context_length(args.hf_checkpoint)
        self._format = SftFormat(
            mask_type=args.loss_mask_type,
            apply_chat_template=args.apply_chat_template,
            template_kwargs=args.apply_chat_template_kwargs,
        )
        self._has_warned = False

    def __call__(self, input: RolloutFnTrainInput | RolloutFnEvalInput) -> RolloutFnTrainOutput:
        """A batch of groups; all samples of a group are equal. Raises DataError for a row that cannot be trained on."""
        if input.evaluation:
            raise HookError(
                FUNCTION_PATH,
                "has no evaluation",
                "set --eval-function-path miles.rollout.inference_rollout.InferenceRolloutFn, or leave --eval-interval out",
            )
        kept: list[Group] = []
        dropped = in_a_row = 0
        while len(kept) < self._batch_size:
            for group in self._source.get_samples(self._batch_size - len(kept)):
                self._note(group, "start")
                if self._fill(group):
                    self._note(group, "finish")
                    kept.append(group)
                    in_a_row = 0
                else:
                    self._note(group, "drop")
                    dropped, in_a_row = dropped + 1, in_a_row + 1
                    self._refuse_starvation(in_a_row, group)
        return RolloutFnTrainOutput(samples=kept, metrics={"rollout/dropped_too_long": float(dropped)})

    def _note(self, group: Group, event: str) -> None:
        """Tell the ledger; groups that a data source did not number are numbered by nobody in SFT."""
        index = group[0].group_index
        if index is None:
            return
        if event == "drop":
            self._ledger.drop(index, TOO_LONG)
        else:
            getattr(self._ledger, event)(index)

    def _refuse_starvation(self, in_a_row: int, group: Group) -> None:
        held = len(self._source) if hasattr(self._source, "__len__") else MOST_DROPS_IN_A_ROW
        if in_a_row >= max(held, self._batch_size):
            raise self._error(
                group,
                f"{in_a_row} conversations in a row are longer than {self._dropping_limit} tokens, this one last",
                "raise --rollout-max-context-len, or shorten the data",
            )

    def _fill(self, group: Group) -> bool:
        """Give all samples of one prompt the same tokens and mask; False when they are too long to be kept."""
        try:
            masked = supervised_tokens(self._tokenizer, group[0], self._format)
        except ValueError as error:
            raise self._error(group, str(error), "mend the row, or remove it") from None
        length = len(masked.token_ids)
        if self._dropping_limit is not None and length > self._dropping_limit:
            return False
        if self._model_limit is not None and length > self._model_limit:
            raise self._error(
                group,
                f"prompt and answer have {length} tokens, but the context holds {self._model_limit}",
                f"shorten the row, or drop and count such rows with --rollout-max-context-len {self._model_limit}",
            )
        start = masked.response_start
        self._warn_of_missing_end(masked)
        response = str(self._tokenizer.decode(masked.token_ids[start:], clean_up_tokenization_spaces=False))
        for sample in group:
            sample.tokens = list(masked.token_ids)
            sample.response, sample.response_length = response, length - start
            sample.loss_mask = masked.loss_mask[start:]
            sample.status = Sample.Status.COMPLETED
        return True

    def _warn_of_missing_end(self, masked: MaskedTokens) -> None:
        if masked.token_ids[-1] not in self._ends and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "a conversation ends with %r, not with a special token: a model trained on it does not learn to stop. "
                "Let the chat template end the assistant's turn with the end-of-sequence token",
                self._tokenizer.decode(masked.token_ids[-8:]),
            )

    def _error(self, group: Group, problem: str, fix: str) -> DataError:
        """An error that names file and line where the data source knows them, and begins of the prompt otherwise."""
        sample = group[0]
        place_of = getattr(self._source, "place_of", None)
        path, line = place_of(sample) if place_of else ("the data source", None)
        return DataError(path, f"sample {sample.index} ({excerpt(sample)}): {problem}", fix, line=line)


generate_rollout = SftRolloutFn
"""The name that recipes use: `--rollout-function-path miles.rollout.sft_rollout.generate_rollout`."""


def supervised_tokens(tokenizer: Any, sample: Sample, format: SftFormat) -> MaskedTokens:
    """Tokens of prompt and answer, T, and the mask of what is trained on.

    Raises ValueError when the row has no answer, or the chat template does not fit the mask type.
    """
    if sample.label is not None and not isinstance(sample.label, str):
        raise ValueError(f"the label is {type(sample.label).__name__}, but an answer is text")
    if isinstance(sample.prompt, str) and not format.apply_chat_template:
        return _plain_text(tokenizer, sample, format)
    tools = sample.metadata.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f'metadata["tools"] is {type(tools).__name__}, and a list of tool declarations is wanted')
    conversation = Conversation(
        tokenizer=tokenizer, messages=_messages(sample), template_kwargs=format.template_kwargs, tools=tools or None
    )
    return mask_conversation(conversation, format.mask_type)


def _plain_text(tokenizer: Any, sample: Sample, format: SftFormat) -> MaskedTokens:
    """A string prompt, the answer, and the end of the sequence, without a template."""
    if sample.label is None:
        raise ValueError(
            "there is no answer: name its key with --label-key, or give lists of chat messages that end with the "
            "assistant's"
        )
    if format.mask_type != SftFormat().mask_type:
        raise ValueError(
            f"a string prompt has no turns to mask, and --loss-mask-type is {format.mask_type}; add "
            "--apply-chat-template, or leave --loss-mask-type out"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a response could not end; set eos_token")
    prompt_ids = list(sample.tokens) or encode_prompt(tokenizer, sample.prompt, format.template_kwargs)
    answer_ids = [*encode_texts(tokenizer, [sample.label], rendered=True)[0], int(tokenizer.eos_token_id)]
    return MaskedTokens(token_ids=prompt_ids + answer_ids, loss_mask=[0] * len(prompt_ids) + [1] * len(answer_ids))


def _messages(sample: Sample) -> Sequence[Message]:
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
