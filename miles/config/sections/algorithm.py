"""Settings of the loss: objective, advantages, critic, corrections."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from miles.config.base import ConfigModel, Flag
from miles.config.estimators import EstimatorName
from miles.config.objectives import CorrectionPreset, DenominatorName, ObjectiveName


class AlgorithmConfig(ConfigModel):
    """The loss."""

    loss_type: Annotated[Literal["policy_loss", "sft_loss", "custom_loss"], Flag("--loss-type")] = "policy_loss"
    """`policy_loss` is the policy gradient; `sft_loss` is cross-entropy on the response; `custom_loss` is `--custom-loss-function-path`."""
    custom_pg_loss_reducer_function_path: Annotated[str | None, Flag("--custom-pg-loss-reducer-function-path")] = None
    """Function that makes the sum of a micro-batch's policy-gradient terms: `fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)` returns one from terms to a number. The sums of an optimizer step are divided by its trajectories, or tokens with `--calculate-per-token-loss`."""
    custom_loss_function_path: Annotated[str | None, Flag("--custom-loss-function-path")] = None
    """Loss of a micro-batch: `fn(args, batch, logits, reducer) -> (loss, metrics)`, with whole logits of its predicted tokens."""
    policy_objective: Annotated[ObjectiveName | None, Flag("--policy-objective")] = None
    """How the policy gradient forms its ratios and keeps them near 1; unset takes the one of `--advantage-estimator`, and `ppo` where that has none."""
    advantage_estimator: Annotated[EstimatorName, Flag("--advantage-estimator")] = "grpo"
    """How rewards become advantages; see docs/algorithms.md. `grpo` compares a sample with its group."""
    custom_advantage_function_path: Annotated[str | None, Flag("--custom-advantage-function-path")] = None
    """Function in place of the estimator's formula: `fn(args, rollout_data)` sets `advantages` in `rollout_data`. Rewards are compared as the estimator says."""
    data_postprocess_path: Annotated[str | None, Flag("--rollout-data-postprocess-path")] = None
    """Function that changes a batch between its log-probs and its advantages: `fn(args, rollout_data)` may set `rewards` and clear `loss_masks`."""
    rewards_normalization: Annotated[bool, Flag(inverted=("--disable-rewards-normalization",))] = True
    """Compare a reward with its group's, as the estimator says; off trains on the reward itself."""
    grpo_std_normalization: Annotated[bool, Flag(inverted=("--disable-grpo-std-normalization",))] = True
    """Divide by the group's standard deviation of rewards, where the estimator does so."""
    normalize_advantages: Annotated[bool | None, Flag("--normalize-advantages")] = None
    """Give advantages mean 0 and variance 1 over all trainable tokens of the rollout. Unset does so where `--advantage-estimator` is only defined that way."""
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
    use_rollout_entropy: Annotated[bool, Flag("--use-rollout-entropy")] = False
    """Report the entropy of the policy before the first optimizer step, from the pass that makes old log-probabilities."""
    calculate_per_token_loss: Annotated[bool, Flag("--calculate-per-token-loss")] = False
    """Weigh every trainable token alike, as `--loss-denominator tokens`."""
    loss_denominator: Annotated[DenominatorName | None, Flag("--loss-denominator")] = None
    """What weighs alike in an optimizer step: `trajectories`, `sequences` (samples), `prompts`, `tokens`; `constant` divides a trajectory's sum by `--loss-constant`. Unset takes that of `--advantage-estimator`, and `trajectories` where it has none."""
    loss_constant: Annotated[PositiveFloat | None, Flag("--loss-constant")] = None
    """Tokens by which the `constant` denominator divides; unset takes `--rollout-max-response-len`."""
    use_rollout_logprobs: Annotated[bool, Flag("--use-rollout-logprobs")] = False
    """Take the engine's log-probabilities for the old ones, in place of a pass of the trainer before the first optimizer step."""
    skip_actor_forward_only: Annotated[bool, Flag("--skip-actor-forward-only")] = False
    """Take the current log-probabilities, without gradient, for the old ones, which saves the pass before the optimizer step; for runs of one optimizer step per rollout."""
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
