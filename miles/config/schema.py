"""The run's configuration tree. Each field says everything once: type, bound, default, flag, help."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from miles.config.base import ConfigModel, Flag
from miles.config.estimators import EstimatorName
from miles.config.objectives import CorrectionPreset, DenominatorName, ObjectiveName

Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]


class ClusterConfig(ConfigModel):
    """The machine: processes, threads, and how long waits may last."""

    num_cpus: Annotated[PositiveInt | None, Flag("--num-cpus")] = None
    """Logical CPUs that Ray may hand out; unset takes the machine's count."""
    train_ranks: Annotated[PositiveInt, Flag("--train-ranks")] = 1
    """Trainer processes; each takes one logical CPU."""
    rollout_engines: Annotated[PositiveInt, Flag("--rollout-engines")] = 1
    """Inference engines; each takes one logical CPU."""
    threads: Annotated[PositiveInt | None, Flag("--torch-threads")] = None
    """Threads that torch uses in each trainer and engine; unset takes the machine's cores. Training and generation take turns, so each may use all of them."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds a child process may take to start before the run stops."""
    wait_timeout_s: PositiveFloat = 3600.0
    """Seconds a wait on another process may last before the run stops with its name."""
    wait_report_s: PositiveFloat = 30.0
    """Seconds after which a wait is shown on the console by name, and again each time as many have passed."""


class FaultToleranceConfig(ConfigModel):
    """What happens when an engine or the router dies."""

    enabled: Annotated[bool, Flag("--use-fault-tolerance")] = True
    """Restart an engine or router that died, give the engine the current weights, and send its requests elsewhere; off ends the run."""
    max_restarts: PositiveInt = 3
    """Restarts of one engine, or of the router, without a finished step between them; one more ends the run."""


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


class RolloutConfig(ConfigModel):
    """How samples are generated."""

    batch_size: Annotated[PositiveInt, Flag("--rollout-batch-size")] = 32
    """Prompts per rollout step."""
    n_samples_per_prompt: Annotated[PositiveInt, Flag("--n-samples-per-prompt")] = 8
    """Samples of each prompt: the group whose rewards are compared."""
    num_rollout: Annotated[PositiveInt | None, Flag("--num-rollout")] = None
    """Rollout steps of the run, counted from step 0; wins over `--num-epoch`."""
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
    function_path: Annotated[str, Flag("--rollout-function-path")] = (
        "miles.rollout.inference_rollout.InferenceRolloutFn"
    )
    """Rollout class or function; see docs/user-guide/customization.md."""
    eval_function_path: Annotated[str | None, Flag("--eval-function-path")] = None
    """Rollout class or function used for evaluation; unset takes the rollout function."""
    custom_generate_function_path: Annotated[str | None, Flag("--custom-generate-function-path")] = None
    """Function that turns one prompt into one or more samples; unset generates one turn."""
    dynamic_sampling_filter_path: Annotated[str | None, Flag("--dynamic-sampling-filter-path")] = None
    """Function that keeps or drops a finished group: `fn(args, group) -> DynamicFilterOutput | bool`."""
    sample_filter_path: Annotated[str | None, Flag("--rollout-sample-filter-path")] = None
    """Function that may set `remove_sample` on samples of the collected batch: `fn(args, groups)`."""
    all_samples_process_path: Annotated[str | None, Flag("--rollout-all-samples-process-path")] = None
    """Function that sees every finished group, dropped ones too: `fn(args, all_groups, data_source)`."""


class EngineConfig(ConfigModel):
    """The inference engines."""

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


class RewardConfig(ConfigModel):
    """How samples are judged."""

    rm_type: Annotated[Literal["math", "exact"] | None, Flag("--rm-type")] = None
    """Built-in reward: `math` grades the last \\boxed{} or final answer with math-verify, `exact` compares text with the label."""
    custom_rm_path: Annotated[str | None, Flag("--custom-rm-path")] = None
    """Reward function by import path: `async fn(args, sample) -> float | dict`; wins over `--rm-type`."""
    group_rm: Annotated[bool, Flag("--group-rm")] = False
    """Give the reward function a whole group: `async fn(args, samples) -> list`."""
    reward_key: Annotated[str | None, Flag("--reward-key")] = None
    """Entry of a reward object that is trained on."""
    eval_reward_key: Annotated[str | None, Flag("--eval-reward-key")] = None
    """Entry of a reward object that evaluation reports; unset takes `--reward-key`."""
    timeout_s: PositiveFloat = 30.0
    """Seconds one reward call may take. A built-in grader that takes longer counts as wrong and is reported; a custom function that takes longer is an error."""
    num_workers: PositiveInt = 2
    """Worker processes of the built-in maths grader."""
    custom_post_process_path: Annotated[str | None, Flag("--custom-reward-post-process-path")] = None
    """Function in place of the group normalisation: `fn(args, samples) -> (raw, normalised)`."""
    overlong_buffer_len: Annotated[PositiveInt | None, Flag("--overlong-buffer-len")] = None
    """Tokens before `--rollout-max-response-len` over which a response loses reward, the more the longer it is; unset is off."""
    overlong_penalty_factor: Annotated[PositiveFloat, Flag("--overlong-penalty-factor")] = 1.0
    """Reward that a response of the greatest length loses."""


class AlgorithmConfig(ConfigModel):
    """The loss."""

    loss_type: Annotated[Literal["policy_loss", "sft_loss", "custom_loss"], Flag("--loss-type")] = "policy_loss"
    """`policy_loss` is the policy gradient; `sft_loss` is cross-entropy on the response; `custom_loss` is `--custom-loss-function-path`."""
    custom_loss_function_path: Annotated[str | None, Flag("--custom-loss-function-path")] = None
    """Loss of a micro-batch: `fn(args, batch, logits, reducer) -> (loss, metrics)`, with whole logits of its predicted tokens."""
    policy_objective: Annotated[ObjectiveName | None, Flag("--policy-objective")] = None
    """How the policy gradient forms its ratios and keeps them near 1; unset takes the one of `--advantage-estimator`, and `ppo` where that has none."""
    advantage_estimator: Annotated[EstimatorName, Flag("--advantage-estimator")] = "grpo"
    """How rewards become advantages; see docs/algorithms.md. `grpo` compares a sample with its group."""
    custom_advantage_function_path: Annotated[str | None, Flag("--custom-advantage-function-path")] = None
    """Function in place of the estimator's formula: `fn(args, rollout_data)` sets `advantages` in `rollout_data`. Rewards are compared as the estimator says."""
    rewards_normalization: Annotated[bool, Flag(inverted=("--disable-rewards-normalization",))] = True
    """Compare a reward with its group's, as the estimator says; off trains on the reward itself."""
    grpo_std_normalization: Annotated[bool, Flag(inverted=("--disable-grpo-std-normalization",))] = True
    """Divide by the group's standard deviation of rewards, where the estimator does so."""
    normalize_advantages: Annotated[bool, Flag("--normalize-advantages")] = False
    """Give advantages mean 0 and variance 1 over all trainable tokens of the rollout."""
    gamma: Annotated[float, Flag("--gamma"), Field(ge=0, le=1)] = 1.0
    """What a reward keeps of its worth for every trainable token between it and the token that is judged."""
    lambd: Annotated[float, Flag("--lambd"), Field(ge=0, le=1)] = 1.0
    """Lambda of GAE: 0 trusts the critic, 1 only what was really earned."""
    kl_coef: Annotated[NonNegativeFloat, Flag("--kl-coef")] = 0.0
    """Weight of the KL divergence from the reference model that is taken off the reward; `--kl-loss-coef` puts it into the loss instead."""
    eps_clip: Annotated[PositiveFloat, Flag("--eps-clip")] = 0.2
    """Lower clip of the probability ratio: 1 - eps_clip."""
    eps_clip_high: Annotated[PositiveFloat | None, Flag("--eps-clip-high")] = None
    """Upper clip of the probability ratio: 1 + eps_clip_high; unset takes `--eps-clip`."""
    eps_clip_c: Annotated[float | None, Flag("--eps-clip-c"), Field(gt=1)] = None
    """Dual clip: bounds the loss of negative advantages at this multiple; unset is off."""
    sapo_tau_pos: Annotated[PositiveFloat, Flag("--sapo-tau-pos")] = 1.0
    """How fast `sapo` fades tokens of positive advantage as their ratio leaves 1."""
    sapo_tau_neg: Annotated[PositiveFloat, Flag("--sapo-tau-neg")] = 1.05
    """The same for the other tokens."""
    dppo_divergence: Annotated[Literal["tv", "kl"], Flag("--dppo-divergence")] = "tv"
    """Divergence of the old from the current policy that `dppo` bounds at each token: total variation, or KL."""
    dppo_bound: Annotated[PositiveFloat, Flag("--dppo-bound")] = 0.15
    """Divergence beyond which `dppo` lets no token move further away."""
    use_opsm: Annotated[bool, Flag("--use-opsm")] = False
    """Leave out trajectories of negative advantage whose mean of old - current log-probabilities exceeds `--opsm-delta`."""
    opsm_delta: Annotated[NonNegativeFloat, Flag("--opsm-delta")] = 1e-4
    """Drift that `--use-opsm` allows, in nats per token."""
    use_kl_loss: Annotated[bool, Flag("--use-kl-loss")] = False
    """Add the KL divergence from the reference model to the loss."""
    kl_loss_coef: Annotated[NonNegativeFloat, Flag("--kl-loss-coef")] = 0.0
    """Weight of the KL loss; with 0 the divergence is only reported."""
    kl_loss_type: Annotated[Literal["k1", "k2", "k3", "low_var_kl"], Flag("--kl-loss-type")] = "k1"
    """Estimator of the KL divergence; `low_var_kl` is k3 with clamped terms. As a loss, k1 pulls nowhere on average and k3 along KL(reference || policy): see docs/algorithms.md."""
    use_unbiased_kl: Annotated[bool, Flag("--use-unbiased-kl")] = False
    """Multiply the KL loss by current / old probability, which makes value and gradient of k3 unbiased."""
    entropy_coef: Annotated[NonNegativeFloat, Flag("--entropy-coef")] = 0.0
    """Weight of the entropy bonus."""
    observe_training_entropy: Annotated[bool, Flag("--observe-training-entropy")] = False
    """Report the entropy without training on it, where `--entropy-coef` is 0."""
    calculate_per_token_loss: Annotated[bool, Flag("--calculate-per-token-loss")] = False
    """Weigh every trainable token alike, as `--loss-denominator tokens`."""
    loss_denominator: Annotated[DenominatorName | None, Flag("--loss-denominator")] = None
    """What weighs alike in an optimizer step: `trajectories`, `sequences` (samples), `prompts`, `tokens`; `constant` divides a trajectory's sum by `--loss-constant`. Unset takes that of `--advantage-estimator`, and `trajectories` where it has none."""
    loss_constant: Annotated[PositiveFloat | None, Flag("--loss-constant")] = None
    """Tokens by which the `constant` denominator divides; unset takes `--rollout-max-response-len`."""
    use_rollout_logprobs: Annotated[bool, Flag("--use-rollout-logprobs")] = False
    """Take the engine's log-probabilities for the old ones, in place of a pass of the trainer before the first optimizer step."""
    get_mismatch_metrics: Annotated[bool, Flag("--get-mismatch-metrics")] = False
    """With `--use-rollout-logprobs`, make the trainer's pass nevertheless and report how far the engine's are from it."""


class CriticConfig(ConfigModel):
    """The critic of `--advantage-estimator ppo`: a second model in the trainer's processes, with a value in place of logits."""

    load: Annotated[str | None, Flag("--critic-load")] = None
    """Folder that the critic starts from: of a language model, whose values are all 0 then, or one that `--critic-save` wrote; unset takes `--hf-checkpoint`."""
    save: Annotated[str | None, Flag("--critic-save")] = None
    """Folder that gets the critic in Hugging Face format with every checkpoint, in place of the one before; unset keeps it in checkpoints alone."""
    lr: Annotated[NonNegativeFloat | None, Flag("--critic-lr")] = None
    """The critic's learning rate after warm-up; unset takes `--lr`. It decays in proportion to the policy's."""
    lr_warmup_iters: Annotated[NonNegativeInt, Flag("--critic-lr-warmup-iters")] = 0
    """Optimizer steps over which the critic's learning rate rises from 0."""
    value_clip: Annotated[PositiveFloat, Flag("--value-clip")] = 0.2
    """How far the steps of one rollout pull a value towards its return, in units of the reward."""
    num_only_steps: Annotated[NonNegativeInt, Flag("--num-critic-only-steps")] = 0
    """First rollout steps that train the critic alone and leave the policy as it is."""


class CorrectionConfig(ConfigModel):
    """Importance weights and rejections for samples of another policy than the trainer's: the engine's numerics, or stale weights."""

    preset: Annotated[CorrectionPreset, Flag("--correction-preset")] = "none"
    """`tis` truncates token weights; `mis` masks by sequence weights; `icepop` masks by token weights; `rejection` only rejects; `decoupled_ppo` does not bound token weights."""
    use_tis: Annotated[bool, Flag("--use-tis")] = False
    """The same as the preset `tis`."""
    level: Annotated[Literal["token", "sequence", "geometric"] | None, Flag("--tis-level")] = None
    """Weight of a token: its own ratio of old to engine's probability, its trajectory's product, or geometric mean; unset takes the preset's."""
    mode: Annotated[Literal["truncate", "clip", "mask"] | None, Flag("--tis-mode")] = None
    """Weights are at most the upper bound, or clipped into both, or rejected outside both; unset takes the preset's."""
    upper: Annotated[PositiveFloat | None, Flag("--tis-clip")] = None
    """Upper bound of weights; unset takes the preset's: 2, 5 for `icepop`, none for `decoupled_ppo`."""
    lower: Annotated[NonNegativeFloat | None, Flag("--tis-clip-low")] = None
    """Lower bound of weights; unset takes 0 to truncate, else 1 / upper; 0.5 for `icepop`."""
    batch_normalize: Annotated[bool, Flag("--tis-batch-normalize")] = False
    """Divide weights by their mean over the batch."""
    rejection_level: Annotated[Literal["token", "sequence", "geometric"] | None, Flag("--rs-level")] = None
    """Reject tokens whose ratio at this level is out of bounds: they leave the loss mask. Unset rejects none, but with the preset `rejection`, which takes `sequence`."""
    rejection_upper: Annotated[PositiveFloat, Flag("--rs-clip")] = 2.0
    """Largest ratio that is not rejected."""
    rejection_lower: Annotated[NonNegativeFloat | None, Flag("--rs-clip-low")] = None
    """Smallest ratio that is not rejected; unset takes 1 / upper."""
    veto_threshold: Annotated[float | None, Flag("--rs-veto-threshold"), Field(gt=0, lt=1)] = None
    """Reject a trajectory with a token whose ratio is below this; unset rejects none."""
    keep_denominator: Annotated[bool, Flag("--keep-rejected-in-denominator")] = False
    """Count rejected tokens in the loss's denominator, so that rejections make gradients smaller; off counts only what is left."""
    custom_tis_function_path: Annotated[str | None, Flag("--custom-tis-function-path")] = None
    """Function that corrects the policy gradient's terms in place of a preset: see docs/algorithms.md."""


class TrainConfig(ConfigModel):
    """How a rollout batch becomes optimizer steps."""

    backend: Annotated[Literal["fsdp"], Flag("--train-backend")] = "fsdp"
    """Which trainer runs the optimizer steps."""
    bf16: Annotated[bool, Flag("--bf16")] = False
    """Compute in bfloat16 over fp32 master weights, moments and gradient sums; off computes in fp32."""
    global_batch_size: Annotated[PositiveInt | None, Flag("--global-batch-size")] = None
    """Samples per optimizer step, over all ranks; derived when `--num-steps-per-rollout` is given, and one step per rollout when neither is."""
    num_steps_per_rollout: Annotated[PositiveInt | None, Flag("--num-steps-per-rollout")] = None
    """Optimizer steps made from one rollout batch."""
    allow_partial_train_step: Annotated[bool, Flag("--allow-partial-train-step")] = False
    """Train on what `--global-batch-size` leaves over of a rollout in a smaller last step; off refuses such a rollout."""
    use_dynamic_global_batch_size: Annotated[bool, Flag("--use-dynamic-global-batch-size")] = False
    """Cut each rollout into `--num-steps-per-rollout` steps of about equal size, however many samples it returned."""
    max_tokens_per_gpu: Annotated[PositiveInt, Flag("--max-tokens-per-gpu")] = 8192
    """Tokens that one rank processes in one micro-batch; there is no padding. The result does not depend on it."""
    balance_data: Annotated[bool, Flag("--balance-data")] = False
    """Share micro-batches out so that ranks have about equally many tokens; off deals them in turn, the largest first."""
    balance_by_flops: Annotated[bool, Flag("--balance-by-flops")] = False
    """As `--balance-data`, by the operations that a model of this size needs, which grow faster than tokens do."""
    seed: Annotated[int, Flag("--seed")] = 1234
    """Seed of the trainer's random state."""
    max_skipped_steps: NonNegativeInt = 3
    """Optimizer steps in a row that may be skipped because the gradient norm is not finite; one more stops the run."""


class OptimizerConfig(ConfigModel):
    """AdamW and its learning rate."""

    lr: Annotated[NonNegativeFloat, Flag("--lr")] = 1e-6
    """Learning rate after warm-up."""
    min_lr: Annotated[NonNegativeFloat, Flag("--min-lr")] = 0.0
    """Learning rate at the end of the decay."""
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine"], Flag("--lr-decay-style")] = "constant"
    """Shape of the decay."""
    lr_decay_iters: Annotated[PositiveInt | None, Flag("--lr-decay-iters")] = None
    """Optimizer steps until the decay ends, warm-up included; unset takes the run's length."""
    lr_warmup_iters: Annotated[NonNegativeInt, Flag("--lr-warmup-iters")] = 0
    """Optimizer steps over which the learning rate rises from 0."""
    weight_decay: Annotated[NonNegativeFloat, Flag("--weight-decay")] = 0.0
    """Decoupled weight decay of AdamW; not applied to biases and norms."""
    adam_beta1: Annotated[Fraction, Flag("--adam-beta1")] = 0.9
    """AdamW's decay of the gradient mean."""
    adam_beta2: Annotated[Fraction, Flag("--adam-beta2")] = 0.95
    """AdamW's decay of the squared gradient."""
    adam_eps: Annotated[PositiveFloat, Flag("--adam-eps")] = 1e-8
    """AdamW's term against division by zero."""
    clip_grad: Annotated[NonNegativeFloat, Flag("--clip-grad")] = 1.0
    """Largest global gradient norm; 0 does not clip."""


class EvalDataset(ConfigModel):
    """One dataset of evaluation."""

    name: str
    """Name in the metrics: `eval/NAME`."""
    path: str
    """JSONL file of prompts."""
    n_samples_per_eval_prompt: PositiveInt = 1
    """Samples per prompt."""
    temperature: NonNegativeFloat | None = None
    """Sampling temperature; 0 is greedy; unset takes `eval.temperature`."""
    max_response_len: PositiveInt | None = None
    """Tokens a response may have; unset takes `eval.max_response_len`."""
    max_prompts: PositiveInt | None = None
    """Evaluate only the first so many rows; unset takes all."""


class EvalConfig(ConfigModel):
    """Evaluation on held-out prompts."""

    interval: Annotated[PositiveInt | None, Flag("--eval-interval")] = None
    """Evaluate every so many steps and after the last; unset never evaluates."""
    before_train: Annotated[bool, Flag(inverted=("--skip-eval-before-train",))] = True
    """Evaluate once before the first step of a run that starts from step 0."""
    prompt_data: Annotated[list[str], Flag("--eval-prompt-data")] = []
    """Pairs of name and JSONL file: `--eval-prompt-data gsm test.jsonl aime aime.jsonl`."""
    datasets: list[EvalDataset] = []
    """Datasets with settings of their own; recipes list them."""
    n_samples_per_eval_prompt: Annotated[PositiveInt, Flag("--n-samples-per-eval-prompt")] = 1
    """Samples per prompt of the datasets named by `--eval-prompt-data`."""
    temperature: Annotated[NonNegativeFloat | None, Flag("--eval-temperature")] = None
    """Sampling temperature in evaluation; unset takes `--rollout-temperature`."""
    top_p: Annotated[float | None, Flag("--eval-top-p"), Field(gt=0, le=1)] = None
    """Nucleus sampling in evaluation; unset takes `--rollout-top-p`."""
    top_k: Annotated[int | None, Flag("--eval-top-k"), Field(ge=-1)] = None
    """Top-k sampling in evaluation; unset takes `--rollout-top-k`."""
    max_response_len: Annotated[PositiveInt | None, Flag("--eval-max-response-len")] = None
    """Tokens an evaluation response may have; unset takes `--rollout-max-response-len`."""


class CheckpointConfig(ConfigModel):
    """Saving and resuming."""

    save: Annotated[str | None, Flag("--save")] = None
    """Folder of checkpoints; unset takes RUN_DIR/checkpoints. One that holds another run's is refused."""
    save_interval: Annotated[PositiveInt | None, Flag("--save-interval")] = None
    """Save every so many steps and after the last; unset saves only when `--save-trigger-sentinel` asks for it."""
    save_trigger_sentinel: Annotated[str | None, Flag("--save-trigger-sentinel")] = None
    """File by which a checkpoint is asked for: when it exists after a step's training, the run saves and deletes it."""
    keep_last: Annotated[PositiveInt | None, Flag("--keep-last")] = None
    """Complete checkpoints to keep: each save removes older ones beyond so many, but never the one that the run was loaded from; unset keeps all."""
    save_hf: Annotated[bool, Flag("--save-hf")] = True
    """Put the model in Hugging Face format into every checkpoint, under `hf/`."""
    async_save: Annotated[bool, Flag("--async-save")] = False
    """Write checkpoints while the run goes on, from a copy in memory; one that was not finished when the run died is ignored."""
    load: Annotated[str | None, Flag("--load")] = None
    """Checkpoint to resume from: a folder of checkpoints (its latest complete one) or one `iter_*` folder."""


class WeightsConfig(ConfigModel):
    """How weights reach the engines."""

    transport: Annotated[Literal["tensor", "broadcast", "disk"], Flag("--update-weight-transfer-mode")] = "tensor"
    """`tensor` shares memory with engines of this machine, `broadcast` sends through a process group, `disk` through a folder that both sides see."""
    disk_dir: Annotated[str | None, Flag("--update-weight-disk-dir")] = None
    """Folder of the `disk` transport and of the check through disk; unset takes RUN_DIR/weights."""
    mode: Annotated[Literal["drain", "in_place", "retract"], Flag("--pause-generation-mode")] = "drain"
    """Requests in flight during an update: `drain` ends and resubmits them with their tokens so far, `in_place` keeps their KV, `retract` computes it anew."""
    buffer_size: Annotated[PositiveInt, Flag("--update-weight-buffer-size")] = 512 * 1024**2
    """Bytes of weights sent to an engine at a time."""
    verify: bool = True
    """Prove that engines hold what the trainer has: every parameter is sent (at start), names, bytes and checksums agree (each update), a second load path agrees (`reload_interval`)."""
    reload_interval: NonNegativeInt = 10
    """Updates between two proofs by which one engine loads the same weights another way (from disk; from memory with the `disk` transport) and must report equal checksums; 0 never does."""


class ParityConfig(ConfigModel):
    """The gate that compares the log-probabilities of trainer and engine."""

    enabled: bool = True
    """Stop the run when trainer and engine assign different log-probabilities to the same tokens."""
    max_mean_diff: PositiveFloat | None = None
    """Largest mean absolute difference of log-probabilities; unset takes 1e-3 when trainer and engines compute in fp32, 0.03 otherwise."""
    max_p99_diff: PositiveFloat | None = None
    """Largest 99th percentile of the absolute difference; unset takes 1e-2 in fp32, 0.3 otherwise."""
    num_probes: PositiveInt = 4
    """Fixed probe sequences scored by engine and trainer after a publish."""
    interval: PositiveInt = 10
    """Publishes between two probe comparisons; the first is always compared."""


class DebugConfig(ConfigModel):
    """Half a run at a time: generate without a trainer, or train without engines."""

    save_rollout_data: Annotated[str | None, Flag("--save-debug-rollout-data")] = None
    """File that keeps the samples of each step, to be trained on again: `data/{rollout_id}.jsonl`, where `{rollout_id}` becomes the step's number."""
    load_rollout_data: Annotated[str | None, Flag("--load-debug-rollout-data")] = None
    """Train on the samples that `--save-debug-rollout-data` wrote to this file; starts no engines, as with `--debug-train-only`."""
    rollout_only: Annotated[bool, Flag("--debug-rollout-only")] = False
    """Generate and evaluate with the weights of `--hf-checkpoint`; starts no trainer and publishes no weights."""
    train_only: Annotated[bool, Flag("--debug-train-only")] = False
    """Start neither engines nor router; the samples come from `--load-debug-rollout-data` or a rollout function that needs no engines."""


class CiConfig(ConfigModel):
    """Checks of the learning core while it trains, for tests."""

    test: Annotated[bool, Flag("--ci-test")] = False
    """Stop the run when a check below fails."""
    kl_checker: Annotated[bool, Flag(inverted=("--ci-disable-kl-checker",))] = True
    """The first optimizer step of a rollout has no divergence from the old policy and clips nothing; the run's first has none from the reference."""
    logprobs_checker: Annotated[bool, Flag(inverted=("--ci-disable-logprobs-checker",))] = True
    """Trainer's and engine's log-probabilities differ by no more than the parity gate allows, also when that is off."""
    save_grad_norm: Annotated[str | None, Flag("--ci-save-grad-norm")] = None
    """File to which the gradient norm of each optimizer step is appended, a JSON object a line."""
    load_grad_norm: Annotated[str | None, Flag("--ci-load-grad-norm")] = None
    """File of `--ci-save-grad-norm` whose gradient norms this run must repeat."""
    grad_norm_tolerance: PositiveFloat = 1e-3
    """Largest relative difference from the gradient norms of `--ci-load-grad-norm`."""


class RunSectionConfig(ConfigModel):
    """The run's name and folder."""

    dir: Annotated[str | None, Flag("--run-dir")] = None
    """Folder of this run; unset makes runs/NAME-TIME. A folder that holds another run is refused."""
    name: Annotated[str, Flag("--run-name")] = "miles"
    """Name shown on the console and in the run folder."""
    deterministic: Annotated[bool, Flag("--deterministic-mode")] = False
    """The same recipe gives the same bits again, also when it was killed and resumed: fixed shapes in the engines, groups in order of issue. Slower."""
    use_tensorboard: Annotated[bool, Flag("--use-tensorboard")] = True
    """Write TensorBoard events to RUN_DIR/tensorboard."""


class RunConfig(ConfigModel):
    """Every setting of a run."""

    run: RunSectionConfig = RunSectionConfig()
    cluster: ClusterConfig = ClusterConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    reward: RewardConfig = RewardConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    correction: CorrectionConfig = CorrectionConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    weights: WeightsConfig = WeightsConfig()
    parity: ParityConfig = ParityConfig()
    debug: DebugConfig = DebugConfig()
    ci: CiConfig = CiConfig()
    custom: dict[str, Any] = {}
    """Open section for your own functions, read as `args.NAME`; `--custom-config-path FILE.yaml` fills it."""
