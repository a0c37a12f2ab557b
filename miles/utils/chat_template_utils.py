"""The one way from a prompt to text and token ids.

The rule: a *plain* string is tokenised as the tokenizer does by default, so that a base model gets its one BOS. Text
*rendered* by a chat template already holds its special tokens, so it is tokenised without adding any; the ids are
those of `apply_chat_template(tokenize=True)`. A prompt that reaches generation with `sample.tokens` filled was
tokenised by the data source and is used as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Prompt = str | list[Message]

_BATCH = 1000


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Chat messages as text that ends where the assistant's turn begins.

    `tools` are the schemas that the template shows to the model; `template_kwargs` go to the template and may overrule
    `add_generation_prompt`. Raises ValueError when the tokenizer has no template or the template refuses the messages.
    """
    import jinja2

    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template, which messages need; pass --chat-template-path")
    kwargs = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    if tools:
        kwargs["tools"] = list(tools)
    try:
        return str(tokenizer.apply_chat_template(list(messages), **kwargs))
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses these messages: {error}") from error


def prompt_text(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """The prompt as text: messages rendered, a string as it is. Raises ValueError as `render` does."""
    return prompt if isinstance(prompt, str) else render(tokenizer, prompt, template_kwargs, tools)


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    template_kwargs: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """Token ids of a plain string or of chat messages. Raises ValueError as `render` does."""
    text = prompt_text(tokenizer, prompt, template_kwargs, tools)
    return encode_texts(tokenizer, [text], rendered=not isinstance(prompt, str))[0]


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, rendered: bool) -> list[list[int]]:
    """Token ids of many texts; `rendered` says that a chat template made them and no special token is to be added."""
    ids: list[list[int]] = []
    for start in range(0, len(texts), _BATCH):
        batch = list(texts[start : start + _BATCH])
        encoded = tokenizer(batch, add_special_tokens=not rendered, return_attention_mask=False, verbose=False)
        ids.extend(encoded["input_ids"])
    return ids
