"""Keys and values of running requests, one slot each, and of recent prompts.

Axes: L layers, 2 key and value, S slots, K key/value heads, C token places of a slot, D head size.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

_PLACE_STEP = 32


class SlotCache:
    """A preallocated [L, 2, S, K, C, D] cache. Used slots are always 0 to n - 1, so that a batch is a slice.

    It grows in slots and in length as requests need, and is laid out anew when one grows at the other's cost.
    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, budget_bytes: int
    ) -> None:
        self._layers, self._kv_heads, self._head_dim = layers, kv_heads, head_dim
        self.bytes_per_token = layers * 2 * kv_heads * head_dim * dtype.itemsize
        self.budget_tokens = max(1, budget_bytes // self.bytes_per_token)
        self._dtype, self._device = dtype, device
        self.drop()

    def drop(self) -> None:
        """Give all memory back; the cache grows again from nothing."""
        empty = (self._layers, 2, 0, self._kv_heads, 0, self._head_dim)
        self._kv = torch.zeros(empty, dtype=self._dtype, device=self._device)
        self._view_key = (0, 0)
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._flat: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._per_layer: list[tuple[torch.Tensor, torch.Tensor]] = []

    @property
    def slots(self) -> int:
        """Slots allocated."""
        return self._kv.shape[2]

    @property
    def places(self) -> int:
        """Token places allocated in each slot."""
        return self._kv.shape[4]

    def fits(self, slots: int, length: int) -> bool:
        """Whether `slots` sequences of `length` tokens stay within the budget; a single one always does."""
        return slots <= 1 or slots * length <= self.budget_tokens

    def ensure(self, slots: int, length: int, limit: int, used: int, longest: int) -> None:
        """Make room for `slots` sequences of `length` tokens, none of which will grow beyond `limit`.

        The first `used` slots keep their contents, of at most `longest` tokens.
        """
        if slots <= self.slots and length <= self.places:
            return
        places = self.places
        if length > places:
            places = min(-(-max(length, 2 * places) // _PLACE_STEP) * _PLACE_STEP, limit)
        if not self.fits(slots, places):
            places = limit
        wanted = max(self.slots, 1 << (slots - 1).bit_length())
        if not self.fits(wanted, places):
            wanted = max(slots, self.budget_tokens // places)
        fresh = self._kv.new_zeros((self._layers, 2, wanted, self._kv_heads, places, self._head_dim))
        if used:
            fresh[:, :, :used, :, :longest] = self._kv[:, :, :used, :, :longest]
        self._kv = fresh
        self._view_key = (0, 0)
        self._per_layer = [(kv[0], kv[1]) for kv in fresh.unbind(0)]
        self._flat = [(k.view(-1, self._head_dim), v.view(-1, self._head_dim)) for k, v in self._per_layer]

    def views(self, used: int, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values [used, K, length, D] of every layer; the same objects while the arguments stay."""
        if self._view_key != (used, length):
            self._views = [(k[:used, :, :length], v[:used, :, :length]) for k, v in self._per_layer]
            self._view_key = (used, length)
        return self._views

    def rows(self, places_B: torch.Tensor) -> torch.Tensor:
        """Rows of the flattened cache [S x K x C, D], slot by slot and head by head, at a place in slots 0 to B - 1."""
        heads = torch.arange(len(places_B) * self._kv_heads, device=places_B.device)
        return heads * self.places + places_B.repeat_interleave(self._kv_heads)

    def append(self, layer: int, rows: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> None:
        """Store one new key and value of slots 0 to B - 1 at `rows`."""
        keys, values = self._flat[layer]
        keys.index_copy_(0, rows, k_BKD.reshape(-1, self._head_dim))
        values.index_copy_(0, rows, v_BKD.reshape(-1, self._head_dim))

    def write(self, first_slot: int, prompts: list[torch.Tensor]) -> None:
        """Copy the KV [L, 2, K, T, D] of prompts into consecutive slots from `first_slot`."""
        for slot, kv in enumerate(prompts, first_slot):
            self._kv[:, :, slot, :, : kv.shape[3]] = kv

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy whole slots, of at most `length` tokens, onto others."""
        self._kv[:, :, targets, :, :length] = self._kv[:, :, sources, :, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot that held NaN: masked places are still multiplied, by zero."""
        self._kv[:, :, slot] = 0


@dataclass(frozen=True)
class PromptEntry:
    """A computed prompt: KV [L, 2, K, T, D] and the last position's final hidden state [H]."""

    kv: torch.Tensor
    hidden_H: torch.Tensor

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.kv.shape[3]


PromptKey = tuple[str | None, tuple[int, ...]]


class PromptCache:
    """The most recently used prompts, at most `capacity` tokens of them, keyed by (extra_key, token ids)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[PromptKey, PromptEntry] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: PromptKey) -> PromptEntry | None:
        """The entry of a prompt, marked as used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: PromptKey, entry: PromptEntry) -> None:
        """Keep a prompt; the longest unused ones give way."""
        if entry.tokens > self._capacity:
            return
        old = self._entries.pop(key, None)
        self.tokens += entry.tokens - (old.tokens if old else 0)
        self._entries[key] = entry
        while self.tokens > self._capacity:
            _, evicted = self._entries.popitem(last=False)
            self.tokens -= evicted.tokens

    def clear(self) -> None:
        """Forget all prompts."""
        self._entries.clear()
        self.tokens = 0
