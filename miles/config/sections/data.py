"""Settings of the model and the prompts."""

from __future__ import annotations

from typing import Annotated, Any

from miles.config.base import ConfigModel, Flag


class ModelConfig(ConfigModel):
    """The model that is trained, and its reference."""

    hf_checkpoint: Annotated[str, Flag("--hf-checkpoint")] = ""
    """Folder of the model in Hugging Face format: config.json, safetensors, tokenizer. Engines and trainer start from it."""
    ref_load: Annotated[str | None, Flag("--ref-load")] = None
    """Folder of the frozen reference model of the KL terms; unset takes `--hf-checkpoint`."""
    chat_template_path: Annotated[str | None, Flag("--chat-template-path")] = None
    """Jinja file used in place of the tokenizer's own chat template."""
    gradient_checkpointing: Annotated[bool, Flag("--gradient-checkpointing")] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class DataConfig(ConfigModel):
    """The prompts."""

    prompt_data: Annotated[str, Flag("--prompt-data")] = ""
    """JSONL file of prompts, one object a line."""
    input_key: Annotated[str, Flag("--input-key")] = "input"
    """Key of the prompt: a string, or a list of chat messages."""
    label_key: Annotated[str | None, Flag("--label-key")] = None
    """Key of the label that rewards compare with; unset loads none."""
    metadata_key: Annotated[str, Flag("--metadata-key")] = "metadata"
    """Key of an object kept as `sample.metadata`; a row may lack it."""
    apply_chat_template: Annotated[bool, Flag("--apply-chat-template")] = False
    """Render prompts with the chat template; a string prompt becomes one user message."""
    apply_chat_template_kwargs: Annotated[dict[str, Any], Flag("--apply-chat-template-kwargs")] = {}
    """Further arguments of the chat template, as JSON: `{"enable_thinking": false}`."""
    shuffle: Annotated[bool, Flag("--rollout-shuffle")] = False
    """Shuffle prompts anew in every epoch, seeded by `--rollout-seed` + epoch."""
    source_path: Annotated[str, Flag("--data-source-path")] = "miles.rollout.data_source.RolloutDataSourceWithBuffer"
    """Class that issues prompt groups: `cls(args)`."""
    buffer_filter_path: Annotated[str | None, Flag("--buffer-filter-path")] = None
    """Function that takes groups from the buffer: `fn(args, rollout_id, buffer, num_samples) -> groups`; unset takes the oldest."""
