"""A decoder whose numbers for one sequence do not depend on what is computed beside it.

The same weights, tokens and seed give a request the same bits whether it runs alone or among others, in whatever slot
and order, whether its prompt was cached, and whether its tokens so far were decoded one by one or computed at once
after a retraction or a resubmission. That holds because every number of a token at position p is made by operations
whose shape, and whose way of adding up, depend on p alone:

- **Linears** (all that mixes rows in one matrix product) run on blocks of exactly `BLOCK_ROWS` rows, the last one
  padded with rows that nobody reads, from weights aligned as torch aligns its own memory. A product of one fixed shape
  takes one path through the library. In a product of one or two rows fp32 does add up in another order.
- **Attention** reads, for a token at position p, the first `span(p)` places of its sequence, a power of two; places
  beyond p are masked and weigh exactly nothing. Each (token, key/value head) is a unit of its own in torch's kernel.
  A prompt is computed as its tokens would have been decoded: every one has a query of its own over the span of its
  position, and its keys and values come from the same linears.
- **Everything else** (norms, rotation, activation, softmax, drawing) works row by row, and runs on one thread: torch
  would otherwise cut the flattened elements between threads, and the ends of a cut are computed by scalar instructions
  whose exp differs in its last bit from the vector ones. Rotary tables grow by pieces of one size.
- **Linears alone may use more threads**, a number that the size of the model and `--threads` fix at the start.
- **Draws** are keyed by (sampling_seed, position in the whole sequence), so that they are the same after a resumption.

That rows of one product, and units of one attention, are computed alike wherever they stand is a property of the
installed kernels. It is checked at the start with the model's own weights; an engine that fails refuses to serve. Other
hardware, another torch, `--threads`, dtype or `BLOCK_ROWS` may give other bits; `--max-running-requests`, the KV
budget and the prompt cache do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from miles.backends.torch_engine.decoder import SMALL_STEP_FLOP, Decoder
from miles.backends.torch_engine.kv_cache import SlotCache
from miles.errors import EngineError

BLOCK_ROWS = 32
_SHORTEST_SPAN = 64
_QUERIES_AT_ONCE = 512
_ALIGNMENT = 64


class DeterministicDecoder(Decoder):
    """A `Decoder` that gives a sequence the same bits alone and among others. Raises EngineError where it cannot."""

    def __init__(self, hf: Any, threads: int) -> None:
        if hf.device.type != "cpu":
            raise EngineError(
                f"--enable-deterministic-inference is built for the CPU, and --device is {hf.device}: leave one of "
                "them out"
            )
        for parameter in hf.parameters():
            if parameter.data_ptr() % _ALIGNMENT:  # a view of the file it was loaded from
                parameter.data = parameter.data.clone()
        super().__init__(hf, threads)
        small = BLOCK_ROWS * self._flop_per_token < SMALL_STEP_FLOP
        self._linear_threads = 1 if small else threads
        self._check_kernels()

    def places(self, tokens: int) -> int:
        """Token places that a slot of `tokens` tokens needs in the cache: the span of its last token."""
        return span(tokens - 1)

    def use_threads(self, rows: int) -> None:
        """One thread, for whatever is not a linear."""
        if self._threads_now != 1:
            torch.set_num_threads(1)
            self._threads_now = 1

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Next-token logits [B, V] in fp32 from final hidden states, whole blocks of rows at a time."""
        return super().logits(_padded(hidden_BH))[: len(hidden_BH)]

    def _linear(self, x_TH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._linear_threads > 1:
            torch.set_num_threads(self._linear_threads)
        if len(x_TH) == BLOCK_ROWS:
            y_TH = F.linear(x_TH, weight, bias)
        else:
            y_TH = torch.cat([F.linear(block, weight, bias) for block in x_TH.split(BLOCK_ROWS)])
        if self._linear_threads > 1:
            torch.set_num_threads(1)
        return y_TH

    def _rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        return _padded(x_TH)

    def _forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        count = len(ids_T)

        def attend_real_rows(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return _padded(attend(layer, q[:count], k[:count], v[:count]))

        return super()._forward(_padded(ids_T), _padded(positions_T), attend_real_rows)[:count]

    def _over_prompts(
        self, groups: list[tuple[int, int, int]]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        prompts = [(start + i * length, length) for start, count, length in groups for i in range(count)]
        longest = max(length for _, length in prompts)
        queries: list[tuple[int, int, torch.Tensor]] = []  # (first position, span, mask) of queries of one span
        first = 0
        while first < longest:
            places = span(first)
            end = min(places, first + _QUERIES_AT_ONCE)
            queries.append((first, places, self._mask(torch.arange(first, end), places)))
            first = end

        def attend(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            mixed_TND = torch.empty_like(q_TND)
            for start, length in prompts:
                kv = k_TKD.new_zeros((2, 1, self.kv_heads, span(length - 1), self.head_dim))
                kv[0, 0, :, :length] = k_TKD[start : start + length].transpose(0, 1)
                kv[1, 0, :, :length] = v_TKD[start : start + length].transpose(0, 1)
                for first, places, mask in queries:
                    if first >= length:
                        break
                    count = min(len(mask), length - first)
                    keys, values = kv[:, :, :, :places].expand(-1, count, -1, -1, -1)
                    part = slice(start + first, start + first + count)
                    mixed_TND[part] = self._attend(q_TND[part], keys, values, mask[:count]).reshape(q_TND[part].shape)
            return mixed_TND

        return attend

    def _over_slots(
        self, lengths_B: torch.Tensor, longest: int, cache: SlotCache
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        slots_of: dict[int, list[int]] = defaultdict(list)
        for slot, position in enumerate(lengths_B.tolist()):
            slots_of[span(position)].append(slot)
        parts = [
            (torch.tensor(slots), self._mask(lengths_B, places), cache.views(len(lengths_B), places))
            for places, slots in slots_of.items()
        ]

        def attend(layer: int, q_BND: torch.Tensor) -> torch.Tensor:
            mixed = None
            for slots, mask, views in parts:  # all slots, of which those of this span are kept
                found = self._attend(q_BND, *views[layer], mask)
                if mixed is None:
                    mixed = found
                else:
                    mixed[slots] = found[slots]
            assert mixed is not None  # a batch has a slot
            return mixed

        return attend

    def _attend(
        self, q_BND: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask_B11T: torch.Tensor
    ) -> torch.Tensor:
        """One query [N, D] of each row over its keys and values [B, K, T, D]; returns [B, K, G, D]."""
        q_BKGD = q_BND.reshape(len(q_BND), self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        return F.scaled_dot_product_attention(q_BKGD, keys, values, attn_mask=mask_B11T, scale=self.scale)

    def _mask(self, positions_B: torch.Tensor, places: int) -> torch.Tensor:
        beyond_BT = torch.arange(places) > positions_B[:, None]
        mask_BT = torch.zeros(beyond_BT.shape, dtype=self.dtype).masked_fill_(beyond_BT, float("-inf"))
        return mask_BT[:, None, None, :]

    def _check_kernels(self) -> None:
        """Compare a sequence that is computed alone, among others, and decoded. Raises EngineError where bits differ."""
        before = torch.get_num_threads()
        with torch.inference_mode():
            try:
                differing = self._differing()
            finally:
                torch.set_num_threads(before)
                self._threads_now = 0  # the engine's thread has its own number
        if differing is not None:
            raise EngineError(
                f"--enable-deterministic-inference cannot be kept here: {differing} gave other bits (torch "
                f"{torch.__version__}, {self.dtype}, {self._linear_threads} threads); try --threads 1, or leave it out"
            )

    def _differing(self) -> str | None:
        draw = torch.Generator().manual_seed(0)
        vocabulary, tokens = len(self._embedding), _SHORTEST_SPAN + 6
        ids, *others = (
            torch.randint(vocabulary, (count,), generator=draw).tolist() for count in (tokens, 5, tokens - 2, 1)
        )
        [alone], [hidden_TH] = self.prefill([ids])
        logits_TV = self.logits(hidden_TH)
        entries, hidden = self.prefill([*others, ids])
        if not (torch.equal(alone.kv, entries[-1].kv) and torch.equal(hidden_TH, hidden[-1])):
            return "a prompt among others"
        scores = [torch.cat(list(self.logprobs(some_TH, 0.7))) for some_TH in (hidden_TH, hidden_TH[-1:])]
        if not (torch.equal(logits_TV[-1:], self.logits(hidden_TH[-1:])) and torch.equal(scores[0][-1:], scores[1])):
            return "the log-probabilities after one token among others"
        first = _SHORTEST_SPAN - 3
        slots, width = len(others) + 1, self.places(tokens)
        cache = SlotCache(self.num_layers, self.kv_heads, self.head_dim, self.dtype, self.device, 1)
        cache.ensure(slots, width, width, 0, 0)
        cache.write(0, [*(e.kv for e in entries[:-1]), alone.kv[:, :, :, :first]])
        lengths_B = torch.tensor([*map(len, others), first])
        for position in range(first, tokens):
            tokens_B = torch.tensor([*(other[0] for other in others), ids[position]])
            found_BH = self.decode(tokens_B, lengths_B, int(lengths_B.max()), cache)
            if not torch.equal(found_BH[-1], hidden_TH[position]):
                return f"decoding position {position} after computing it in a prompt"
            lengths_B = lengths_B + (torch.arange(slots) == slots - 1)
        return None


def span(position: int) -> int:
    """Places that a token at `position` attends over: the smallest power of two that holds it, and at least 64."""
    return max(_SHORTEST_SPAN, 1 << position.bit_length())


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """`rows` with rows of zeros after them, up to whole blocks."""
    missing = -len(rows) % BLOCK_ROWS
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows.contiguous()
