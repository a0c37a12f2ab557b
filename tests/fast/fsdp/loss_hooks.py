"""Functions that tests name by `--custom-loss-function-path`, `--custom-tis-function-path` and `--custom-advantage-function-path`."""

import torch
import torch.distributed as dist


def policy_gradient(args, batch, logits, reducer):
    logprobs = torch.log_softmax(logits, -1).gather(1, batch["targets"][:, None]).squeeze(1)
    ratio = (logprobs - batch["log_probs"]).exp()
    return reducer(-ratio * batch["advantages"]), {"mean_ratio": reducer(ratio.detach())}


def no_gradient(args, batch, logits, reducer):
    return reducer(batch["advantages"]), {}


def no_metrics(args, batch, logits, reducer):
    return reducer(logits[:, 0])


def odd_metric(args, batch, logits, reducer):
    return reducer(logits[:, 0]), {"many": logits[:, 0]}


def breaks(args, batch, logits, reducer):
    return batch["log_prob"], {}


def breaks_too(*, args, pg_loss, **kwargs):
    return kwargs["log_probs"], None, {}


def truncate(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    old, rollout = torch.cat(train_log_probs), torch.cat(rollout_log_probs)
    weights = (old - rollout).exp().clamp(max=args.tis_clip)
    return pg_loss * weights, None, {"hook_weight": weights, "hook_number": 2.0}


def reject(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, response_lengths, **kwargs):
    assert [len(m) for m in loss_masks] == response_lengths
    masks = [
        mask * ((old - rollout).exp() <= 1.2).to(mask.dtype)
        for mask, old, rollout in zip(loss_masks, train_log_probs, rollout_log_probs, strict=True)
    ]
    return (
        pg_loss * torch.cat([(o - r).exp() for o, r in zip(train_log_probs, rollout_log_probs, strict=True)]),
        masks,
        {},
    )


def forget_masks(*, args, pg_loss, **kwargs):
    return pg_loss, [], {}


def forget_metrics(*, args, pg_loss, **kwargs):
    return pg_loss


def advantages(args, rollout_data):
    rollout_data["advantages"] = [
        reward * torch.ones(length)
        for reward, length in zip(rollout_data["rewards"], rollout_data["response_lengths"], strict=True)
    ]


def nan_advantages(args, rollout_data):
    advantages(args, rollout_data)
    rollout_data["advantages"][2][0] = float("nan")


def nan_returns(args, rollout_data):
    advantages(args, rollout_data)
    rollout_data["returns"] = [row.clone() for row in rollout_data["advantages"]]
    rollout_data["returns"][2][0] = float("inf")


def huge_returns(args, rollout_data):
    advantages(args, rollout_data)
    rollout_data["returns"] = [row * 0 + 1e30 for row in rollout_data["advantages"]]


def nan_terms(*, args, pg_loss, **kwargs):
    return pg_loss * float("nan"), None, {}


def nan_masks(*, args, pg_loss, loss_masks, **kwargs):
    loss_masks[2][0] = float("nan")
    return pg_loss, loss_masks, {}


def nan_loss(args, batch, logits, reducer):
    return reducer(logits[:, 0]) * float("nan"), {}


def nan_beside_the_gradient(args, batch, logits, reducer):
    return reducer(logits[:, 0]) + float("nan"), {}


def nan_on_the_second_rank(args, batch, logits, reducer):
    return reducer(logits[:, 0]) * (float("nan") if dist.get_rank() == 1 else 1.0), {}
