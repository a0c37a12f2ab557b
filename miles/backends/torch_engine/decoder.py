"""A lean forward pass over the weights of a transformers model.

Axes: B sequences, T packed tokens, H hidden, N query heads, K key/value heads, G = N / K, D head size, V vocabulary,
E experts, I their intermediate size, C experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from miles.backends.torch_engine.kv_cache import PromptEntry, SlotCache
from miles.errors import EngineError

_LENGTH_STEP = 16
_ROTARY_STEP = 256
_ROWS_AT_ONCE = 256
SMALL_STEP_FLOP = 2.5e8
"""A step below this many operations runs on one thread."""
_FREE_ROWS = 8
"""Reading the weights takes as long as about this many rows' products."""


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    router: torch.Tensor | None
    """Weights [E, H] of what chooses experts; `gate_up` is then [E, 2 I, H] and `down` [E, H, I]."""
    attention: Any
    mlp: Any


class Decoder:
    """Prefill and decode of a Llama, Qwen2, Qwen3 or Qwen3-MoE.

    The query, key and value projections of a layer become slices of one matrix, as do gate and up; the module's own
    parameters are those slices, so an in-place update of a parameter is an update of the decoder.
    """

    def __init__(self, hf: Any, threads: int) -> None:
        inner, config = hf.model, hf.config
        attention = inner.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.scale: float = attention.scaling
        self.eps: float = config.rms_norm_eps
        self.num_layers = len(inner.layers)
        self.device = hf.device
        self.dtype: torch.dtype = hf.dtype
        mlp = inner.layers[0].mlp
        self._activation: Callable[[torch.Tensor], torch.Tensor] = getattr(mlp, "experts", mlp).act_fn
        self._chosen: int = getattr(config, "num_experts_per_tok", 0)
        self._renormalises: bool = getattr(config, "norm_topk_prob", False)
        self._rotary = inner.rotary_emb
        self._embedding: torch.Tensor = inner.embed_tokens.weight
        self._final_norm: torch.Tensor = inner.norm.weight
        self._head: torch.Tensor = hf.lm_head.weight
        self._layers = [_prepare(layer) for layer in inner.layers]
        self._threads = threads
        self._threads_now = 0
        self._flop_per_token = 2 * sum(p.numel() for p in inner.layers.parameters())
        self._cos = self._sin = torch.empty(0)
        self._extend_rotary(_ROTARY_STEP)
        if self._cos.shape[-1] != self.head_dim:
            raise EngineError(
                f"the model rotates {self._cos.shape[-1]} of {self.head_dim} head dimensions; the torch engine "
                "rotates all or none"
            )
        self.refresh()

    def refresh(self) -> None:
        """Recompute what is derived from weights; call after an update.

        Parameters that were given memory of their own meanwhile become slices of one matrix again.
        """
        for layer in self._layers:
            if layer.attention.q_proj.weight.data_ptr() != layer.qkv.data_ptr():
                layer.qkv, layer.qkv_bias = _fuse_attention(layer.attention)
            if layer.router is None and layer.mlp.gate_proj.weight.data_ptr() != layer.gate_up.data_ptr():
                layer.gate_up, layer.gate_up_bias = _fuse([layer.mlp.gate_proj, layer.mlp.up_proj])
            if layer.qk_norm is not None:
                q, k = layer.attention.q_norm.weight, layer.attention.k_norm.weight
                layer.qk_norm = torch.cat([q.expand(self.heads, -1), k.expand(self.kv_heads, -1)])

    def prefill(self, prompts: list[list[int]]) -> tuple[list[PromptEntry], list[torch.Tensor]]:
        """Compute prompts, packed without padding.

        Returns, per prompt in the given order, its entry and its final hidden states [T, H].
        """
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        lengths = [len(prompts[i]) for i in order]
        total = sum(lengths)
        self.use_threads(total)
        self._extend_rotary(lengths[-1])
        ids_T = torch.tensor(list(chain.from_iterable(prompts[i] for i in order)), device=self.device)
        positions_T = torch.cat([torch.arange(n) for n in lengths]).to(self.device)
        groups: list[tuple[int, int, int]] = []
        start = 0
        for length, same in groupby(lengths):
            count = len(list(same))
            groups.append((start, count, length))
            start += count * length
        shape = (self.num_layers, 2, self.kv_heads, total, self.head_dim)
        kv = torch.empty(shape, dtype=self.dtype, device=self.device)
        over_prompts = self._over_prompts(groups)

        def attend(layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            kv[layer, 0] = k_TKD.transpose(0, 1)
            kv[layer, 1] = v_TKD.transpose(0, 1)
            return over_prompts(q_TND, k_TKD, v_TKD).flatten(1)

        hidden_TH = self._forward(ids_T, positions_T, attend)
        entries: list[PromptEntry | None] = [None] * len(prompts)
        hidden: list[torch.Tensor] = [hidden_TH] * len(prompts)
        start = 0
        for index, length in zip(order, lengths, strict=True):
            end = start + length
            entries[index] = PromptEntry(kv[:, :, :, start:end].contiguous(), hidden_TH[end - 1].clone())
            hidden[index] = hidden_TH[start:end]
            start = end
        return [entry for entry in entries if entry is not None], hidden

    def decode(self, tokens_B: torch.Tensor, lengths_B: torch.Tensor, longest: int, cache: SlotCache) -> torch.Tensor:
        """Advance slots 0 to B - 1 by one token each.

        `lengths_B` tokens of each slot are in the cache, at most `longest`; the new token takes the next place.
        Returns final hidden states [B, H].
        """
        self.use_threads(len(tokens_B))
        self._extend_rotary(longest + 1)
        rows = cache.rows(lengths_B)
        over_slots = self._over_slots(lengths_B, longest, cache)

        def attend(layer: int, q_BND: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor) -> torch.Tensor:
            cache.append(layer, rows, k_BKD, v_BKD)
            return over_slots(layer, q_BND).flatten(1)

        return self._forward(tokens_B, lengths_B, attend)

    def _over_prompts(
        self, groups: list[tuple[int, int, int]]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Causal attention of packed prompts: queries [T, N, D], keys and values [T, K, D] to [T, N, D].

        A group is (first row, prompts, tokens of each).
        """

        def attend(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
            mixed_TND = torch.empty_like(q_TND)
            for start, count, length in groups:
                part = slice(start, start + count * length)
                q, k, v = (x[part].unflatten(0, (count, length)).transpose(1, 2) for x in (q_TND, k_TKD, v_TKD))
                mixed = F.scaled_dot_product_attention(
                    q, k, v, is_causal=length > 1, scale=self.scale, enable_gqa=self.heads != self.kv_heads
                )
                mixed_TND[part] = mixed.transpose(1, 2).flatten(0, 1)
            return mixed_TND

        return attend

    def _over_slots(
        self, lengths_B: torch.Tensor, longest: int, cache: SlotCache
    ) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Attention of one new token of every slot, whose keys are stored: layer and queries [B, N, D] to [B, K, G, D]."""
        batch = len(lengths_B)
        span = min(-(-(longest + 1) // _LENGTH_STEP) * _LENGTH_STEP, cache.places)
        beyond = torch.arange(span, device=self.device) > lengths_B[:, None]
        mask_B11T = torch.zeros(beyond.shape, dtype=self.dtype, device=self.device)
        mask_B11T = mask_B11T.masked_fill_(beyond, float("-inf"))[:, None, None, :]
        views = cache.views(batch, span)
        grouped = (batch, self.kv_heads, self.heads // self.kv_heads, self.head_dim)

        def attend(layer: int, q_BND: torch.Tensor) -> torch.Tensor:
            keys, values = views[layer]
            return F.scaled_dot_product_attention(
                q_BND.reshape(grouped), keys, values, attn_mask=mask_B11T, scale=self.scale
            )

        return attend

    def places(self, tokens: int) -> int:
        """Token places that a slot of `tokens` tokens needs in the cache."""
        return tokens

    def logits(self, hidden_BH: torch.Tensor) -> torch.Tensor:
        """Next-token logits [B, V] in fp32 from final hidden states."""
        self.use_threads(len(hidden_BH))
        return self._linear(hidden_BH, self._head).float()

    def logprobs(self, hidden_TH: torch.Tensor, temperature: float) -> Iterator[torch.Tensor]:
        """Log-probabilities [rows, V] in fp32 at a temperature after each hidden state, some rows at a time."""
        for chunk_CH in hidden_TH.split(_ROWS_AT_ONCE):
            logits_CV = self.logits(chunk_CH).div_(temperature)
            peak_C1 = logits_CV.amax(1, keepdim=True)  # the operations of `sample`, in its order
            logits_CV = logits_CV.sub_(peak_C1)
            yield logits_CV.sub_(logits_CV.exp().sum(1, keepdim=True).log_())

    def use_threads(self, rows: int) -> None:
        """Choose the number of CPU threads for a step of `rows` tokens (of the calling thread)."""
        wanted = 1 if max(rows, _FREE_ROWS) * self._flop_per_token < SMALL_STEP_FLOP else self._threads
        if wanted != self._threads_now:
            torch.set_num_threads(wanted)
            self._threads_now = wanted

    def _forward(
        self,
        ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        cos, sin = self._cos[positions_T][:, None], self._sin[positions_T][:, None]
        half, both, every = self.head_dim // 2, self.heads + self.kv_heads, self.heads + 2 * self.kv_heads
        norm_H, norm_D = (self._embedding.shape[1],), (self.head_dim,)
        x = F.embedding(ids_T, self._embedding)
        for index, layer in enumerate(self._layers):
            normed = F.rms_norm(x, norm_H, layer.input_norm, self.eps)
            qkv = self._linear(normed, layer.qkv, layer.qkv_bias).view(-1, every, self.head_dim)
            qk = qkv[:, :both]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, norm_D, None, self.eps) * layer.qk_norm
            qk = torch.addcmul(qk * cos, qk.roll(half, -1), sin)
            mixed = attend(index, qk[:, : self.heads], qk[:, self.heads :], qkv[:, both:])
            x = x + self._linear(mixed, layer.out, layer.out_bias)
            normed = F.rms_norm(x, norm_H, layer.post_norm, self.eps)
            if layer.router is None:
                x = x + self._mlp(normed, layer.gate_up, layer.gate_up_bias, layer.down, layer.down_bias)
            else:
                x = x + self._experts(normed, layer.router, layer.gate_up, layer.down)
        return F.rms_norm(x, norm_H, self._final_norm, self.eps)

    def _mlp(
        self,
        x_TH: torch.Tensor,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        gate, up = self._linear(x_TH, gate_up, gate_up_bias).chunk(2, -1)
        return self._linear(self._activation(gate).mul_(up), down, down_bias)

    def _experts(
        self, x_TH: torch.Tensor, router_EH: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
    ) -> torch.Tensor:
        """What the experts chosen for each token make of it, by their weights from a softmax in fp32.

        A token's sum goes by the number of the expert, whatever tokens are beside it.
        """
        weights_TE = torch.softmax(self._linear(x_TH, router_EH).float(), dim=-1)
        weights_TC, experts_TC = weights_TE.topk(self._chosen, dim=-1)
        if self._renormalises:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
        weights_TC = weights_TC.to(x_TH.dtype)
        made_TH = torch.zeros_like(x_TH)
        for expert in experts_TC.unique().tolist():
            rows, places = (experts_TC == expert).nonzero(as_tuple=True)
            found = self._mlp(self._rows(x_TH[rows]), gate_up[expert], None, down[expert], None)[: len(rows)]
            made_TH[rows] += found * weights_TC[rows, places, None]
        return made_TH

    def _rows(self, x_TH: torch.Tensor) -> torch.Tensor:
        """As many rows as `_linear` takes."""
        return x_TH

    def _linear(self, x_TH: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x_TH, weight, bias)

    def _extend_rotary(self, length: int) -> None:
        """Keep cosines, and sines whose first half is negated, of at least `length` positions, from the model.

        They are computed for as many positions at a time whatever the length, so that those of one never change.
        """
        if length <= len(self._cos):
            return
        like = torch.empty(0, dtype=self.dtype, device=self.device)
        positions = torch.arange(max(_ROTARY_STEP, 1 << (length - 1).bit_length()), device=self.device)
        parts = [self._rotary(like, some[None]) for some in positions.split(_ROTARY_STEP)]
        cos, sin = (torch.cat([part[i][0] for part in parts]) for i in (0, 1))
        sign = torch.ones(sin.shape[-1], dtype=sin.dtype, device=self.device)
        sign[: sin.shape[-1] // 2] = -1
        self._cos, self._sin = cos, sin * sign


def _prepare(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv, qkv_bias = _fuse_attention(attention)
    if hasattr(mlp, "experts"):
        feed_forward = {
            "gate_up": mlp.experts.gate_up_proj,
            "gate_up_bias": None,
            "down": mlp.experts.down_proj,
            "down_bias": None,
            "router": mlp.gate.weight,
        }
    else:
        gate_up, gate_up_bias = _fuse([mlp.gate_proj, mlp.up_proj])
        feed_forward = {
            "gate_up": gate_up,
            "gate_up_bias": gate_up_bias,
            "down": mlp.down_proj.weight,
            "down_bias": mlp.down_proj.bias,
            "router": None,
        }
    return _Layer(
        input_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        qk_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        out=attention.o_proj.weight,
        out_bias=attention.o_proj.bias,
        post_norm=layer.post_attention_layernorm.weight,
        **feed_forward,
        attention=attention,
        mlp=mlp,
    )


def _fuse_attention(attention: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    return _fuse([attention.q_proj, attention.k_proj, attention.v_proj])


def _fuse(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight (and bias) for several linears, whose own parameters become slices of it."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    weight = _share([linear.weight for linear in linears])
    return weight, _share(biases) if biases else None


def _share(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
