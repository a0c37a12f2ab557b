"""A bigram model in fp64, and one optimizer step of it, cut into micro-batches as a test likes."""

import numpy as np
import torch

from miles.backends.training_utils.loss_hub.corrections import Correction, correct
from miles.backends.training_utils.loss_hub.denominators import Denominator
from miles.backends.training_utils.loss_hub.records import LossInputs, OtherTokens
from miles.backends.training_utils.metrics import StepMetrics
from miles.backends.training_utils.policy_columns import tokens_elsewhere

V, D = 9, 5


def make_samples(seed=0, trajectories=5, largest=7, spread=0.3):
    """Samples whose old and rollout log-probs are near the model's, so that some tokens are clipped and others not."""
    rng = np.random.default_rng(seed)
    logprobs = model_logprobs(*parameters()).detach().numpy()
    samples = []
    for number in range(trajectories):
        reward = float(rng.normal())
        for _ in range(int(rng.integers(1, 3))):
            tokens = rng.integers(0, V, int(rng.integers(1, 4)) + int(rng.integers(1, largest)))
            response = int(rng.integers(1, len(tokens))) if len(tokens) > 2 else 1
            now = logprobs[tokens[-response - 1 : -1], tokens[-response:]]
            samples.append(
                {
                    "tokens": tokens,
                    "mask": (rng.random(response) < 0.8).astype(np.float32),
                    "old": now + rng.normal(0, spread, response),
                    "rollout": now + rng.normal(0, spread, response),
                    "ref": now + rng.normal(0, spread, response),
                    "advantage": reward,
                    "trajectory": number,
                    "group": number // 2,
                }
            )
    return samples


def parameters():
    generator = torch.Generator().manual_seed(7)
    return tuple(torch.randn(V, D, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))


def model_logprobs(embed, head):
    return torch.log_softmax(embed @ head.T, -1)


def run(samples, loss_fn, denominator=None, correction=None, parts=None):
    """Loss, gradient and metrics of one optimizer step whose micro-batches are `parts`: lists of samples."""
    denominator = denominator or Denominator()
    correction = correction or Correction()
    parts = [list(range(len(samples)))] if parts is None else parts
    embed, head = parameters()
    table = model_logprobs(embed, head)
    lengths = np.array([len(s["mask"]) for s in samples])
    sample_R = np.repeat(np.arange(len(samples)), lengths)
    mask_R = np.concatenate([s["mask"] for s in samples])
    trajectory_B = np.array([s["trajectory"] for s in samples])
    trajectory_R = trajectory_B[sample_R]
    before_R = torch.tensor(np.concatenate([s["tokens"][-len(s["mask"]) - 1 : -1] for s in samples]))
    target_R = torch.tensor(np.concatenate([s["tokens"][-len(s["mask"]) :] for s in samples]))
    columns = {name: torch.tensor(np.concatenate([s[name] for s in samples])) for name in ("old", "rollout", "ref")}
    columns["advantage"] = torch.tensor(np.array([s["advantage"] for s in samples]))[sample_R]

    corrected = correct(
        columns["old"], columns["rollout"], torch.tensor(mask_R != 0), torch.tensor(trajectory_R), correction
    )
    mask_R = mask_R * corrected.keep_R.numpy()
    weights_R = torch.tensor(
        denominator.token_weights(
            mask_R,
            sample_R,
            trajectory_B,
            [np.arange(len(samples))],
            group_B=np.array([s["group"] for s in samples]),
        )
    )
    trainable = np.flatnonzero(np.concatenate([s["mask"] for s in samples]))
    entries = [trainable[np.isin(sample_R[trainable], part)] for part in parts]
    now_R = table.detach()[before_R, target_R]
    total, metrics = torch.zeros((), dtype=torch.float64), StepMetrics()
    for own, others in zip(entries, tokens_elsewhere(entries, trainable, trajectory_R), strict=True):
        rows = table[before_R[own]]
        output = loss_fn(
            LossInputs(
                logprobs_N=rows.gather(1, target_R[own][:, None]).squeeze(1),
                entropy_N=-(rows.exp() * rows).sum(1),
                weights_N=weights_R[own],
                trajectory_N=torch.tensor(trajectory_R)[own],
                sample_N=torch.tensor(sample_R)[own],
                old_logprobs_N=columns["old"][own],
                advantages_N=columns["advantage"][own],
                ref_logprobs_N=columns["ref"][own],
                rollout_logprobs_N=columns["rollout"][own],
                correction_N=corrected.weights_R[own] if correction.is_active else None,
                logits_NV=rows,
                targets_N=target_R[own],
                other=OtherTokens(
                    logprobs_M=now_R[others],
                    weights_M=weights_R[others],
                    old_logprobs_M=columns["old"][others],
                    advantages_M=columns["advantage"][others],
                    trajectory_M=torch.tensor(trajectory_R)[others],
                )
                if len(others)
                else None,
            )
        )
        total = total + output.loss
        metrics.add(output)
    total.backward()
    gradient = torch.cat([embed.grad.flatten(), head.grad.flatten()])
    return float(total.detach()), gradient, metrics.reduce() | corrected.metrics


def relative(one, other):
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-12))
