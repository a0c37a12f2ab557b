"""AdamW over the local shards of sharded parameters, and the global gradient norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from miles.config.schema import OptimizerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedAdamW:
    """AdamW (Loshchilov and Hutter 2019) that updates each rank's shards in place.

    It works on plain tensors that share memory with the shards: operations on lists of DTensors cost a hundred times the
    update itself on a small model. Biases and norms, which have one axis, are not decayed.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], config: OptimizerConfig, *, cpu_threads: int | None = None
    ) -> None:
        """`cpu_threads` is given where shards are in the CPU's memory beside a GPU: how many threads the work here gets."""
        self._cpu_threads = cpu_threads
        self._sums: dict[str, DTensor] = {}
        """Gradients of the micro-batches so far, of shards in the CPU's memory."""
        self.parameters = {name: cast(DTensor, p) for name, p in parameters.items()}
        self._local = {name: nn.Parameter(p.to_local().detach()) for name, p in self.parameters.items()}
        self._clip = config.clip_grad
        decayed = [self._local[n] for n, p in self.parameters.items() if p.ndim > 1]
        plain = [self._local[n] for n, p in self.parameters.items() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        for local in self._local.values():
            self._adamw.state[local] = {
                "step": torch.zeros((), dtype=torch.float32, device=local.device),
                **{moment: torch.zeros_like(local) for moment in MOMENTS},
            }

    def zero_grad(self) -> None:
        """Drop all gradients."""
        self._sums = {}
        for p in self.parameters.values():
            p.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """Call it after every backward pass: gradients in the CPU's memory beside a GPU are added up here.

        Where FSDP finds a gradient, it copies the next one to memory that is not pinned, and the GPU waits while one thread
        adds the two.
        """
        if self._cpu_threads is None:
            return
        found = {name: cast(DTensor, p.grad) for name, p in self.parameters.items() if p.grad is not None}
        for name in found:
            self.parameters[name].grad = None
        both = [(self._sums[name].to_local(), grad.to_local()) for name, grad in found.items() if name in self._sums]
        if both:
            sums, addends = map(list, zip(*both, strict=True))
            with self._threads():
                torch._foreach_add_(sums, addends)  # pyright: ignore[reportPrivateImportUsage]
        self._sums = {**found, **self._sums}

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """More threads where the CPU has more to do than beside a GPU."""
        if self._cpu_threads is None:
            yield
            return
        before = torch.get_num_threads()
        torch.set_num_threads(self._cpu_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def clip(self) -> float:
        """Scale gradients so that their global norm is at most `clip_grad` (0: leave them); returns the norm before.

        Collective. Gradients stay as they are when the norm is not finite.
        """
        for name, grad in self._sums.items():
            self.parameters[name].grad = grad
        self._sums = {}
        with self._threads():
            return self._clipped([grad for grad in self._grads().values() if grad is not None])

    def _clipped(self, grads: list[Tensor]) -> float:
        square = torch.nn.utils.get_total_norm(_with_short_sums(grads)).square()
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        norm = float(square.sqrt())
        if self._clip and self._clip < norm < float("inf"):
            torch._foreach_mul_(grads, self._clip / norm)  # pyright: ignore[reportPrivateImportUsage]
        return norm

    @torch.no_grad()
    def _grads(self) -> dict[str, Tensor | None]:
        """This rank's shards of the gradients."""
        return {n: None if p.grad is None else cast(DTensor, p.grad).to_local() for n, p in self.parameters.items()}

    def step(self, lr: float) -> None:
        """Update with the gradients that the parameters hold."""
        for name, grad in self._grads().items():
            self._local[name].grad = grad
        for group in self._adamw.param_groups:
            group["lr"] = lr
        with self._threads():
            self._adamw.step()
        for local in self._local.values():
            local.grad = None

    @property
    def num_updates(self) -> int:
        """Updates made; steps that were skipped do not count."""
        return int(torch.stack([self._adamw.state[local]["step"] for local in self._local.values()]).max())

    def set_num_updates(self, updates: int) -> None:
        """Go on from so many updates, after the moments were loaded."""
        for local in self._local.values():
            self._adamw.state[local]["step"].fill_(updates)

    def moments(self) -> dict[str, DTensor]:
        """`exp_avg.NAME` and `exp_avg_sq.NAME` of every parameter, sharded like it and sharing memory with the state."""
        return {
            # Not `from_local`: it would copy what is in the CPU's memory to the mesh's device.
            f"{moment}.{name}": DTensor(self._adamw.state[self._local[name]][moment], p._spec, requires_grad=False)
            for moment in MOMENTS
            for name, p in self.parameters.items()
        }


def _with_short_sums(grads: Sequence[Tensor]) -> list[Tensor]:
    """What has the norm of `grads`: on a CPU the norms of their rows.

    There torch sums squares in as many fp32 numbers as a register holds: of 600 million numbers it lost a tenth.
    """
    return [torch.linalg.vector_norm(g, dim=-1) if g.device.type == "cpu" and g.ndim > 1 else g for g in grads]
