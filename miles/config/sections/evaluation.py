"""Settings of evaluation."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from miles.config.base import ConfigModel, Flag


class EvalDataset(ConfigModel):
    """One dataset of evaluation.

    A setting that is not given takes that of evaluation, then that of the rollout. One that is given as null is unset
    for this dataset, which is another thing; so what was not given stays out of every dump.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*$")]
    """Name in the metrics, `eval/NAME`, and of the folder of its samples: letters, digits, `_`, `-`, `+` and `.`."""
    path: str
    """File of prompts, as `--prompt-data` takes it."""
    n_samples_per_eval_prompt: PositiveInt | None = None
    """Samples per prompt."""
    max_prompts: PositiveInt | None = None
    """Evaluate only the first so many rows; unset takes all."""
    input_key: str | None = None
    """Key of the prompt in a row."""
    label_key: str | None = None
    """Key of the label; null loads none."""
    tool_key: str | None = None
    """Key of the tools that the chat template gets; null gives it none."""
    metadata_key: str | None = None
    """Key of the object kept as `sample.metadata`."""
    metadata_overrides: dict[str, Any] | None = None
    """Entries put over each row's metadata."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy; null is 1."""
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    """Nucleus sampling; null keeps the whole distribution."""
    top_k: Annotated[int | None, Field(ge=-1)] = None
    """Sample among the k most likely tokens; null keeps all."""
    stop: list[str] | None = None
    """Strings that end a response; null is none."""
    stop_token_ids: list[int] | None = None
    """Token ids that end a response, beside the model's own; null is none."""
    min_new_tokens: NonNegativeInt | None = None
    """Tokens before which no end-of-sequence id may be sampled; null is 0."""
    max_response_len: PositiveInt | None = None
    """Tokens a response may have; null leaves only the context as a limit."""
    max_prompt_len: PositiveInt | None = None
    """Prompts with more tokens are dropped and counted; null keeps all that fit."""
    max_context_len: PositiveInt | None = None
    """Tokens of prompt and response together; null takes the model's limit."""
    custom_generate_function_path: str | None = None
    """Function that generates; null generates one turn."""
    rm_type: str | None = None
    """Built-in reward; wins over a `--custom-rm-path` that the dataset does not name itself."""
    custom_rm_path: str | None = None
    """Reward function; null leaves the built-in reward."""
    reward_key: str | None = None
    """Entry of a reward object that is reported; null takes rewards that are numbers."""

    @model_serializer(mode="wrap")
    def _given_only(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}

    def gives(self, name: str) -> bool:
        """Whether the dataset says something about a setting, be it null."""
        return name in self.model_fields_set


class EvalConfig(ConfigModel):
    """Evaluation on held-out prompts; `--eval-config FILE.yaml` lists datasets in a file of their own."""

    interval: Annotated[PositiveInt | None, Flag("--eval-interval")] = None
    """Evaluate every so many steps and after the last; unset never evaluates, but for `--num-rollout 0`, which does nothing else."""
    before_train: Annotated[bool, Flag(inverted=("--skip-eval-before-train",))] = True
    """Evaluate once before the first step of a run that starts from step 0."""
    prompt_data: Annotated[list[str], Flag("--eval-prompt-data")] = []
    """Pairs of name and file: `--eval-prompt-data gsm test.jsonl aime aime.jsonl`."""
    datasets: list[EvalDataset] = []
    """Datasets with settings of their own; `--eval-config` or a recipe lists them."""
    custom_log_function_path: Annotated[str | None, Flag("--custom-eval-rollout-log-function-path")] = None
    """Function called with the results of each evaluation: `fn(rollout_id, args, data, extra_metrics)`. What it adds to `extra_metrics` is logged; True leaves the metrics of the evaluation out."""
    save_samples: Annotated[bool, Flag(inverted=("--eval-discard-samples",))] = True
    """Keep every sample of an evaluation in RUN_DIR/eval/NAME/; the results are in RUN_DIR/eval.jsonl in any case."""
    input_key: Annotated[str | None, Flag("--eval-input-key")] = None
    """Key of the prompt in evaluation data; unset takes `--input-key`."""
    label_key: Annotated[str | None, Flag("--eval-label-key")] = None
    """Key of the label in evaluation data; unset takes `--label-key`."""
    tool_key: Annotated[str | None, Flag("--eval-tool-key")] = None
    """Key of the tools in evaluation data; unset takes `--tool-key`."""
    n_samples_per_eval_prompt: Annotated[PositiveInt, Flag("--n-samples-per-eval-prompt")] = 1
    """Samples per prompt in evaluation."""
    temperature: Annotated[NonNegativeFloat | None, Flag("--eval-temperature")] = None
    """Sampling temperature in evaluation; unset takes `--rollout-temperature`."""
    top_p: Annotated[float | None, Flag("--eval-top-p"), Field(gt=0, le=1)] = None
    """Nucleus sampling in evaluation; unset takes `--rollout-top-p`."""
    top_k: Annotated[int | None, Flag("--eval-top-k"), Field(ge=-1)] = None
    """Top-k sampling in evaluation; unset takes `--rollout-top-k`."""
    min_new_tokens: Annotated[NonNegativeInt, Flag("--eval-min-new-tokens")] = 0
    """Tokens of an evaluation response before which no end-of-sequence id may be sampled."""
    max_response_len: Annotated[PositiveInt | None, Flag("--eval-max-response-len")] = None
    """Tokens an evaluation response may have; unset takes `--rollout-max-response-len`."""
    max_prompt_len: Annotated[PositiveInt | None, Flag("--eval-max-prompt-len")] = None
    """Evaluation prompts with more tokens are dropped and counted; unset takes `--rollout-max-prompt-len`."""
    max_context_len: Annotated[PositiveInt | None, Flag("--eval-max-context-len")] = None
    """Tokens of prompt and response together in evaluation; unset takes `--rollout-max-context-len`, then the model's limit."""
