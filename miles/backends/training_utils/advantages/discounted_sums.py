"""The scan behind returns and GAE, in chunks and without a loop over tokens."""

# N tokens of all sequences end to end, S sequences, C chunks, W tokens of a chunk

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 128


def discounted_sums(values_N: Tensor, lengths_S: Tensor, decay: float, chunk: int = CHUNK) -> Tensor:
    """out_t = values_t + decay x out_{t+1} within each sequence, and values_t at its last token; shape [N].

    Every sequence is cut into chunks of `chunk` tokens, which one matrix product scans at once. What flows into a
    chunk from its right is the same recurrence over chunks, with decay^chunk. No sequence is empty; `chunk` is 2 or more.
    """
    if not len(values_N):
        return values_N
    width = min(chunk, int(lengths_S.max()))
    device = values_N.device
    chunks_S = (lengths_S + width - 1) // width
    start_S = lengths_S.cumsum(0) - lengths_S
    place_N = torch.arange(len(values_N), device=device) - torch.repeat_interleave(start_S, lengths_S)
    first_chunk_N = torch.repeat_interleave(chunks_S.cumsum(0) - chunks_S, lengths_S)
    chunk_N, column_N = first_chunk_N + place_N // width, place_N % width

    values_CW = values_N.new_zeros(int(chunks_S.sum()), width)
    values_CW[chunk_N, column_N] = values_N
    powers_W = decay ** torch.arange(width + 1, dtype=values_N.dtype, device=device)
    distance_WW = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    scan_WW = torch.where(distance_WW >= 0, powers_W[distance_WW.clamp(min=0)], 0.0)
    sums_CW = values_CW @ scan_WW
    if len(sums_CW) > len(lengths_S):
        whole_C = discounted_sums(sums_CW[:, 0], chunks_S, float(powers_W[width]), chunk)
        inflow_C = torch.cat([whole_C[1:], whole_C.new_zeros(1)])
        inflow_C[chunks_S.cumsum(0) - 1] = 0
        sums_CW = sums_CW + inflow_C[:, None] * powers_W[1:].flip(0)
    return sums_CW[chunk_N, column_N]
