"""Functions that tests name by `--custom-pg-loss-reducer-function-path`."""

import torch


def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Dr. GRPO: a response's sum over a constant."""
    mask_R = torch.cat(loss_masks)
    assert [len(mask) for mask in loss_masks] == response_lengths
    assert all(total > response for total, response in zip(total_lengths, response_lengths, strict=True))
    return lambda terms_R: (terms_R * mask_R).sum() / 20


def token_sum(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    assert calculate_per_token_loss
    return lambda terms_R: terms_R.sum()


def sample_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reduce(terms_R):
        rows = zip(terms_R.split(response_lengths), loss_masks, strict=True)
        return torch.stack([(terms * mask).sum() / mask.sum() for terms, mask in rows]).sum()

    return reduce


def no_function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return 1.0


def no_number(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda terms_R: terms_R


def no_gradient(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda terms_R: terms_R.detach().sum()


def breaks(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda terms_R: terms_R @ loss_masks[0][:0]
