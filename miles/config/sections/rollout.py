"""Settings of generation: what is sampled, by which engines, behind which router."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from miles.config.base import ConfigModel, Flag

Port = Annotated[int, Field(ge=0, le=65535)]


class RolloutConfig(ConfigModel):
    """How samples are generated."""

    batch_size: Annotated[PositiveInt, Flag("--rollout-batch-size")] = 32
    """Prompts per rollout step."""
    n_samples_per_prompt: Annotated[PositiveInt, Flag("--n-samples-per-prompt")] = 8
    """Samples of each prompt: the group whose rewards are compared."""
    num_rollout: Annotated[NonNegativeInt | None, Flag("--num-rollout")] = None
    """Rollout steps of the run, counted from step 0; wins over `--num-epoch`. With 0 the run evaluates `--hf-checkpoint` once and ends."""
    num_epoch: Annotated[PositiveInt | None, Flag("--num-epoch")] = None
    """Passes over the prompts; gives rows // `--rollout-batch-size` steps each."""
    seed: Annotated[int, Flag("--rollout-seed")] = 42
    """Seed of the prompt order and, with the sample's index, of every sampled token."""
    temperature: Annotated[PositiveFloat, Flag("--rollout-temperature")] = 1.0
    """Sampling temperature. The trainer divides logits by it too."""
    top_p: Annotated[float, Flag("--rollout-top-p"), Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; 1 keeps the whole distribution."""
    top_k: Annotated[int, Flag("--rollout-top-k"), Field(ge=-1)] = -1
    """Sample among the k most likely tokens; -1 keeps all."""
    max_response_len: Annotated[PositiveInt, Flag("--rollout-max-response-len")] = 1024
    """Tokens a response may have; a longer one is truncated."""
    max_prompt_len: Annotated[PositiveInt | None, Flag("--rollout-max-prompt-len")] = None
    """Prompts with more tokens are dropped at load and counted; unset keeps all that fit the context."""
    max_context_len: Annotated[PositiveInt | None, Flag("--rollout-max-context-len")] = None
    """Tokens of prompt and response together; unset takes the model's limit."""
    stop: Annotated[list[str], Flag("--rollout-stop")] = []
    """Strings that end a response."""
    stop_token_ids: Annotated[list[int], Flag("--rollout-stop-token-ids")] = []
    """Token ids that end a response, beside the model's end-of-sequence ids."""
    skip_special_tokens: Annotated[bool, Flag("--rollout-skip-special-tokens")] = False
    """Leave special tokens out of `sample.response`. Training uses token ids and does not change."""
    over_sampling_batch_size: Annotated[PositiveInt | None, Flag("--over-sampling-batch-size")] = None
    """Prompt groups started at a time while a batch is collected; unset takes `--rollout-batch-size`. Groups left over return to the data source."""
    max_group_retries: NonNegativeInt = 2
    """Times a group whose generation or reward failed is tried again before the run stops with its error."""
    group_timeout_s: Annotated[PositiveFloat | None, Flag("--rollout-group-timeout")] = None
    """Seconds that a group may take from its start, waits and rewards included; then it is cancelled and counts as failed. Unset has no limit of its own."""
    function_path: Annotated[str, Flag("--rollout-function-path")] = (
        "miles.rollout.inference_rollout.InferenceRolloutFn"
    )
    """Rollout class or function; see docs/user-guide/customization.md."""
    eval_function_path: Annotated[str | None, Flag("--eval-function-path")] = None
    """Rollout class or function used for evaluation; unset takes the rollout function."""
    custom_generate_function_path: Annotated[str | None, Flag("--custom-generate-function-path")] = None
    """Function that turns one prompt into one or more samples; unset generates one turn."""
    sample_hook_path: Annotated[list[str], Flag("--rollout-sample-hook-path")] = []
    """Functions called with each finished sample before its reward: `fn(args, sample, *, rollout_id, evaluation)`."""
    dynamic_sampling_filter_path: Annotated[list[str], Flag("--dynamic-sampling-filter-path")] = []
    """Functions that keep or drop a finished group: `fn(args, group) -> DynamicFilterOutput | bool`. Asked in this order; the first that drops it decides."""
    filter_max_response_len: Annotated[PositiveInt | None, Flag("--filter-max-response-len")] = None
    """Response tokens beyond which `check_response_length` takes a trajectory for too long; unset lets it look for truncation alone."""
    max_filtered_batches: Annotated[PositiveInt, Flag("--max-filtered-batches")] = 20
    """The run stops when the filters drop this many times `--rollout-batch-size` groups in a row and keep none."""
    log_passrate: Annotated[bool, Flag("--log-passrate")] = False
    """Report pass@k of the training groups: the chance that one of k samples has reward 1."""
    sample_filter_path: Annotated[str | None, Flag("--rollout-sample-filter-path")] = None
    """Function that may set `remove_sample` on samples of the collected batch: `fn(args, groups)`."""
    all_samples_process_path: Annotated[str | None, Flag("--rollout-all-samples-process-path")] = None
    """Function that sees every finished group, dropped ones too: `fn(args, all_groups, data_source)`."""
    recompute_logprobs_via_prefill: Annotated[bool, Flag("--recompute-logprobs-via-prefill")] = False
    """Train with log-probabilities of a second pass: engines score each finished response as a prompt, in place of what they said while they sampled it."""
    custom_log_function_path: Annotated[str | None, Flag("--custom-rollout-log-function-path")] = None
    """Function called with each collected batch: `fn(rollout_id, args, samples, extra_metrics, rollout_time)`. What it adds to `extra_metrics` is logged; True leaves the metrics of the rollout out."""

    @field_validator("dynamic_sampling_filter_path", mode="before")
    @classmethod
    def _one_filter_is_a_list(cls, value: Any) -> Any:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value


class EngineConfig(ConfigModel):
    """The inference engines."""

    backend: Annotated[Literal["auto", "torch", "sglang"], Flag("--engine-backend")] = "auto"
    """`sglang` starts the installed SGLang, `torch` the engine that comes with Miles; `auto` is SGLang on GPUs and torch on CPU."""
    gpus_per_engine: Annotated[PositiveInt, Flag("--rollout-num-gpus-per-engine")] = 1
    """GPUs that share one engine's model (tensor parallelism)."""
    sglang: dict[str, Any] = {}
    """Server arguments of SGLang by their names, such as `mem_fraction_static: 0.6`; on the command line `--sglang-mem-fraction-static 0.6`."""
    external: Annotated[bool, Flag("--rollout-external")] = False
    """Attach to servers that somebody else started, at `--rollout-external-engine-addrs`; they go on when the run ends."""
    external_addrs: Annotated[list[str], Flag("--rollout-external-engine-addrs")] = []
    """Addresses of those servers, `HOST:PORT` each; IPv6 as `[HOST]:PORT`."""
    external_admin_key_env: Annotated[str | None, Flag("--rollout-external-admin-key-env")] = None
    """Name of the environment variable that holds the servers' admin key; unset sends none."""
    concurrency: Annotated[PositiveInt, Flag("--sglang-server-concurrency")] = 512
    """Requests that may be in flight per engine."""
    max_running_requests: PositiveInt = 256
    """Requests an engine decodes at a time; further ones wait in its queue."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], Flag("--sglang-dtype")] = "auto"
    """Data type in which engines hold weights, activations and KV; `auto` is that of `--hf-checkpoint`."""


class RouterConfig(ConfigModel):
    """The router in front of the engines."""

    port: Annotated[Port, Flag("--router-port")] = 0
    """Port of the router; 0 takes a free one."""
    health_check_interval_s: Annotated[PositiveFloat, Flag("--rollout-health-check-interval")] = 10.0
    """Seconds between health checks of each engine."""
    health_check_timeout_s: Annotated[PositiveFloat, Flag("--rollout-health-check-timeout")] = 30.0
    """Seconds an engine may take to answer a health check."""
    failure_threshold: Annotated[PositiveInt, Flag("--miles-router-health-check-failure-threshold")] = 3
    """Failed health checks in a row after which an engine gets no more requests, until it answers again."""
