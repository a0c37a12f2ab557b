"""Settings of the model and the prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import field_validator

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

    prompt_data: Annotated[list[str], Flag("--prompt-data")] = []
    """Files of prompts, `.jsonl` or `.parquet`; `FILE@[a:b]` takes rows a to b as a Python slice does."""
    prompt_data_weights: Annotated[list[float], Flag("--prompt-data-weights")] = []
    """One number per file: its share of the prompts is the number over their sum; unset reads the files one after another."""
    global_dataset: Annotated[bool, Flag(inverted=("--disable-rollout-global-dataset",))] = True
    """Take prompts from `--prompt-data`; without, samples are blank and a generate function brings the prompts."""
    accept_changed_data: Annotated[bool, Flag("--accept-changed-data")] = False
    """On resume with other data or another order than the checkpoint's, start at their first row instead of refusing."""
    input_key: Annotated[str, Flag("--input-key")] = "input"
    """Key of the prompt: a string, or a list of chat messages."""
    label_key: Annotated[str | None, Flag("--label-key")] = None
    """Key of the label that rewards compare with; unset loads none."""
    metadata_key: Annotated[str, Flag("--metadata-key")] = "metadata"
    """Key of an object kept as `sample.metadata`; a row may lack it."""
    tool_key: Annotated[str, Flag("--tool-key")] = "tools"
    """Key of the tools that the chat template shows, a list or the JSON text of one; kept as `sample.metadata["tools"]`; a row may lack it."""
    multimodal_keys: Annotated[dict[str, str], Flag("--multimodal-keys")] = {}
    """Key of a row's images, videos or audio by kind, as JSON: `{"image": "images"}`; `<image>` in the prompt stands for the next one."""
    apply_chat_template: Annotated[bool, Flag("--apply-chat-template")] = False
    """Render prompts with the chat template; a string prompt becomes one user message."""
    apply_chat_template_kwargs: Annotated[dict[str, Any], Flag("--apply-chat-template-kwargs")] = {}
    """Further arguments of the chat template, as JSON: `{"enable_thinking": false}`."""
    loss_mask_type: Annotated[Literal["template", "qwen", "qwen3", "distill_qwen"], Flag("--loss-mask-type")] = (
        "template"
    )
    """How supervised fine-tuning finds the assistant's tokens: `template` for any template that only appends; else by family. See docs/user-guide/sft.md."""
    shuffle: Annotated[bool, Flag("--rollout-shuffle")] = False
    """Shuffle prompts anew in every epoch, seeded by `--rollout-seed` + epoch."""
    source_path: Annotated[str, Flag("--data-source-path")] = "miles.rollout.data_source.RolloutDataSourceWithBuffer"
    """Class that issues prompt groups: `cls(args)`."""
    buffer_filter_path: Annotated[str | None, Flag("--buffer-filter-path")] = None
    """Function that takes groups from the buffer: `fn(args, rollout_id, buffer, num_samples) -> groups`; unset takes the oldest."""

    @field_validator("prompt_data", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        """A recipe may name one file as plain text."""
        return ([value] if value else []) if isinstance(value, str) else value
