"""Which tokens of a conversation are trained on: one short function for each kind of chat template.

In all kinds a token is trained on when the model itself would have written it: what an assistant's turn adds to the
generation prompt, up to and including its end of turn. A turn whose message has `step_loss_mask` other than 1 is not
trained on. What the template writes after the last turn's end is left out: a model stops there.
"""

# T tokens of the conversation

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles.utils.chat_template_utils import Message, encode_texts, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STEP_MASK = "step_loss_mask"
_DUMMY: Message = {"role": "user", "content": "x"}
_OTHER_KINDS = (
    "--loss-mask-type qwen3 for a template that drops the thinking of earlier turns (Qwen3), qwen for one that writes "
    "every message by itself (Qwen2, Qwen2.5), distill_qwen to train on the last turn alone (DeepSeek-R1-Distill-Qwen), "
    "or a --chat-template-path that only appends"
)

_COMPANY = (
    "the chat template writes a message differently in other company, so one message's tokens are not defined; use "
    "another --loss-mask-type"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages that end with the assistant's, and what renders them."""

    tokenizer: PreTrainedTokenizerBase
    messages: Sequence[Message]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: Sequence[Mapping[str, Any]] | None = None
    """Declarations of tools, which the template writes into the prompt."""

    def text(self, messages: Sequence[Message], *, prompt: bool, tools: bool = True) -> str:
        """`messages` rendered; `prompt` adds the generation prompt, without `tools` none are declared."""
        kwargs = {**self.template_kwargs, "add_generation_prompt": prompt}
        if tools and self.tools is not None:
            kwargs["tools"] = list(self.tools)
        shown = [{key: value for key, value in message.items() if key != STEP_MASK} for message in messages]
        return render(self.tokenizer, shown, kwargs)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of rendered texts."""
        return encode_texts(self.tokenizer, texts, rendered=True)

    def turns(self) -> list[int]:
        """Positions of the assistant's messages, in order."""
        return [i for i, message in enumerate(self.messages) if message.get("role") == "assistant"]

    def name(self, position: int) -> str:
        """A message, for errors."""
        return f"message {position} ({self.messages[position].get('role')})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedTokens:
    """Token ids of a conversation, and 1 where one is trained on; both of length T."""

    token_ids: list[int]
    loss_mask: list[int]

    @property
    def response_start(self) -> int:
        """Position of the first token that is trained on."""
        return self.loss_mask.index(1)


Masker = Callable[[Conversation], list[tuple[list[int], bool]]]
"""A conversation as pieces in order: token ids, and whether an assistant wrote them. Only the last may lack a next turn."""


def template(conversation: Conversation) -> list[tuple[list[int], bool]]:
    """For any template that only appends: a shorter conversation's tokens begin those of a longer one.

    Renders the messages up to each of the assistant's turns, with generation prompt, and with the turn, and takes the
    differences. Raises ValueError naming the turn where one is not the beginning of the next.
    """
    messages, turns = conversation.messages, conversation.turns()
    texts: list[str] = []
    for i in turns:
        texts += [conversation.text(messages[:i], prompt=True), conversation.text(messages[: i + 1], prompt=False)]
    return _joined_pieces(conversation, texts) or _prefixes(conversation, texts)


def _joined_pieces(conversation: Conversation, texts: Sequence[str]) -> list[tuple[list[int], bool]] | None:
    """What each text adds to the one before, tokenised by itself; None unless that gives the tokens of the whole.

    Reads each character twice, where comparing the tokens of all `texts` reads it once for every turn that follows.
    """
    added: list[str] = []
    before = ""
    for text in texts:
        if not text.startswith(before):
            return None
        added.append(text[len(before) :])
        before = text
    *ids, whole = conversation.encode([*added, before])
    if [token for piece in ids for token in piece] != whole:
        return None
    return [(piece, number % 2 == 1) for number, piece in enumerate(ids)]


def _prefixes(conversation: Conversation, texts: Sequence[str]) -> list[tuple[list[int], bool]]:
    """What the tokens of each text add to those of the one before; raises ValueError where they are no beginning."""
    pieces: list[tuple[list[int], bool]] = []
    done: list[int] = []
    for number, after in enumerate(conversation.encode(texts)):
        if after[: len(done)] != done:
            raise ValueError(_not_appended(conversation, conversation.turns()[number // 2], number, texts))
        pieces.append((after[len(done) :], number % 2 == 1))
        done = after
    return pieces


def _not_appended(conversation: Conversation, turn: int, number: int, texts: Sequence[str]) -> str:
    before, after = texts[number - 1], texts[number]
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    changed = f"{before[same:][:40]!r} becomes {after[same:][:40]!r}" if same < len(before) else "its tokens merge"
    if number % 2:
        what = f"{conversation.name(turn)} does not follow its generation prompt: {changed}"
    else:
        earlier = conversation.turns()[number // 2 - 1]
        what = f"{conversation.name(earlier)} is written differently once {conversation.name(turn)} follows: {changed}"
    return (
        f"the chat template does not only append, so the tokens of a turn are not defined. {what}. Try {_OTHER_KINDS}"
    )


def qwen(conversation: Conversation) -> list[tuple[list[int], bool]]:
    """For templates that write each message by itself and begin with a system message of their own (Qwen2, Qwen2.5).

    The text of a message is what the template makes of it alone, without that system message; the first message keeps
    it, and the tools. Results of tools in a row form one unit, as the template writes them.
    """
    synthetic, _ = _around_dummy(conversation)

    def text_of(unit: Sequence[Message], is_first: bool) -> str:
        text = conversation.text(unit, prompt=False, tools=is_first)
        return text if is_first or unit[0].get("role") == "system" else text.removeprefix(synthetic)

    return _message_by_message(conversation, text_of)


def qwen3(conversation: Conversation) -> list[tuple[list[int], bool]]:
    """For templates that drop the thinking of turns before the last user's message (Qwen3).

    Each unit is rendered right after a made-up user message, whose text is taken off again: so every turn is the last,
    and keeps its thinking. The first unit is rendered before it, for the sake of system message and tools.
    """
    synthetic, dummy = _around_dummy(conversation)

    def text_of(unit: Sequence[Message], is_first: bool) -> str:
        if is_first:
            text = conversation.text([*unit, _DUMMY], prompt=False)
            fits, text = text.endswith(dummy), text.removesuffix(dummy)
        else:
            text = conversation.text([_DUMMY, *unit], prompt=False, tools=False)
            fits, text = text.startswith(synthetic + dummy), text.removeprefix(synthetic + dummy)
        if not fits:
            raise ValueError(_COMPANY)
        return text

    return _message_by_message(conversation, text_of)


def _around_dummy(conversation: Conversation) -> tuple[str, str]:
    """What the template writes before a first user's message that is alone, and the message."""
    one = conversation.text([_DUMMY], prompt=False, tools=False)
    two = conversation.text([_DUMMY, _DUMMY], prompt=False, tools=False)
    dummy = two.removeprefix(one)
    if two != one + dummy or not one.endswith(dummy):
        raise ValueError(_COMPANY)
    return one.removesuffix(dummy), dummy


def _message_by_message(
    conversation: Conversation, text_of: Callable[[Sequence[Message], bool], str]
) -> list[tuple[list[int], bool]]:
    without = conversation.text([_DUMMY], prompt=False, tools=False)
    generation_prompt = conversation.text([_DUMMY], prompt=True, tools=False).removeprefix(without)
    texts: list[str] = []
    written: list[bool] = []
    for start, unit in _units(conversation.messages):
        text = text_of(unit, start == 0)
        if unit[0].get("role") != "assistant":
            texts.append(text)
            written.append(False)
            continue
        if not text.startswith(generation_prompt):
            raise ValueError(
                f"{conversation.name(start)} is written as {text[:60]!r}, which does not begin with the generation "
                f"prompt {generation_prompt!r}; check --apply-chat-template-kwargs, or try {_OTHER_KINDS}"
            )
        texts += [generation_prompt, text[len(generation_prompt) :]]
        written += [False, True]
    return list(zip(conversation.encode(texts), written, strict=True))


def _units(messages: Sequence[Message]) -> list[tuple[int, list[Message]]]:
    """Messages with their position; results of tools in a row are together."""
    units: list[tuple[int, list[Message]]] = []
    for position, message in enumerate(messages):
        if units and message.get("role") == "tool" and units[-1][1][0].get("role") == "tool":
            units[-1][1].append(message)
        else:
            units.append((position, [message]))
    return units


def distill_qwen(conversation: Conversation) -> list[tuple[list[int], bool]]:
    """For templates that drop thinking even from the last turn (DeepSeek-R1-Distill-Qwen): trains on the last turn alone.

    The prompt is rendered; the last message's content follows as it stands, then the end of sequence. Where the prompt
    opens the thinking already, the content's own `<think>` is left out.
    """
    *before, last = conversation.messages
    content = last.get("content")
    if not isinstance(content, str) or not content:
        raise ValueError(
            f"{conversation.name(len(before))} has no text, and --loss-mask-type distill_qwen takes just that"
        )
    prompt = conversation.text(before, prompt=True)
    if prompt.rstrip().endswith("<think>") and content.lstrip().startswith("<think>"):
        content = content.lstrip().removeprefix("<think>").lstrip("\n")
    prompt_ids, answer_ids = conversation.encode([prompt, content])
    return [(prompt_ids, False), (answer_ids + _missing_end(conversation.tokenizer, answer_ids), True)]


def _missing_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    end: Any = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer has no end-of-sequence token, so a response could not end; set eos_token")
    return [] if ids and ids[-1] == end else [int(end)]


LOSS_MASK_TYPES: dict[str, Masker] = {
    "template": template,
    "qwen": qwen,
    "qwen3": qwen3,
    "distill_qwen": distill_qwen,
}
"""Every `--loss-mask-type`."""


def mask_conversation(conversation: Conversation, kind: str) -> MaskedTokens:
    """Tokens of a conversation that ends with the assistant's turn, and the mask of what is trained on.

    Raises ValueError when the messages do not begin with a prompt and end with an answer, when no token is trained on,
    or when the template does not fit `kind`.
    """
    messages = conversation.messages
    if not messages or messages[-1].get("role") != "assistant":
        raise ValueError("the last message is not the assistant's, so there is no answer")
    if messages[0].get("role") == "assistant":
        raise ValueError("the first message is the assistant's, so there is no prompt")
    ends = end_token_ids(conversation.tokenizer)
    trained = iter(_trained_turns(conversation, kind))
    token_ids: list[int] = []
    loss_mask: list[int] = []
    pieces = LOSS_MASK_TYPES[kind](conversation)
    for number, (ids, is_written) in enumerate(pieces):
        length = _until_end(conversation.tokenizer, ids, ends) if is_written else 0
        mask = [int(is_written and next(trained))] * length
        if number < len(pieces) - 1:
            mask += [0] * (len(ids) - length)
        token_ids += ids[: len(mask)]
        loss_mask += mask
    if 1 not in loss_mask:
        raise ValueError(f"no token is trained on: every turn of the assistant is empty or has {STEP_MASK} 0")
    return MaskedTokens(token_ids=token_ids, loss_mask=loss_mask)


def _trained_turns(conversation: Conversation, kind: str) -> list[bool]:
    turns = conversation.turns()[-1:] if LOSS_MASK_TYPES[kind] is distill_qwen else conversation.turns()
    return [conversation.messages[i].get(STEP_MASK, 1) == 1 for i in turns]


def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that may end a turn: the end of sequence, and all special tokens."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    end: Any = tokenizer.eos_token_id
    return frozenset(added if end is None else {*added, int(end)})


def _until_end(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], ends: frozenset[int]) -> int:
    """Length of a turn with its end-of-turn token, without the white space that the template writes after it."""
    last = next((i for i in reversed(range(len(ids))) if ids[i] in ends), None)
    if last is None or str(tokenizer.decode(list(ids[last + 1 :]))).strip():
        return len(ids)
    return last + 1
