"""The engine's weights by Hugging Face name: checked and replaced bucket by bucket, and proven by checksums."""

from __future__ import annotations

import difflib
from typing import Any, NoReturn

import torch

from miles.backends.torch_engine.request import RequestRefused
from miles.backends.weight_sync.checksum import checksum_tensor
from miles.utils.expert_weights import places_as_named, places_of_experts

NamedTensors = list[tuple[str, torch.Tensor]]
_LISTED = 20
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class WeightStore:
    """Parameters of a transformers module, updated in place under the names that a model folder has for them."""

    def __init__(self, hf: Any) -> None:
        self._parameters: dict[str, torch.nn.Parameter] = dict(hf.named_parameters())
        find_places = places_of_experts if hf.config.model_type == "qwen3_moe" else places_as_named
        self._places = find_places({name: tuple(p.shape) for name, p in self._parameters.items()})
        self._tied = bool(hf.config.tie_word_embeddings) and _HEAD not in self._places
        self._snapshot: dict[str, str] | None = None
        self.received: set[str] = set()
        """Names replaced since the last complete update."""
        self.half_updated: str | None = None
        """Why the weights may be half of one version and half of another; None when they are whole."""
        self.released = False
        """Whether the parameters hold no memory."""
        self.absent: str | None = None
        """Why there are no weights to compute with, from a release until a complete update; None when there are."""

    @property
    def names(self) -> list[str]:
        """Names in the model folder; a head tied to the embedding is not one of them."""
        return list(self._places)

    def replace(self, named: NamedTensors, complete: bool) -> None:
        """Replace the named parameters, or none of them.

        `complete` says that this bucket ends an update. Raises RequestRefused that lists every tensor that does not
        fit by name, shape or dtype; the weights count as half updated from then on, until an update that ends with a
        complete bucket has sent every parameter.
        """
        self._require_memory()
        problems = self._problems(named)
        if problems:
            self.fail(_listed(problems))
        for name, tensor in named:
            self._target(name).copy_(tensor)
            self.received.add(name)
        if complete:
            missing = self._missing(self.received)
            if self.half_updated is None or not missing:
                self.half_updated = self.absent = None
            else:
                self.half_updated = (
                    f"weights are half updated: an update failed, and the next did not send {len(missing)} of "
                    f"{len(self._places)} parameters ({', '.join(missing[:3])}, ...)"
                )
            self.received = set()

    def fitted(self, named: NamedTensors) -> NamedTensors:
        """All tensors of a model in the engine's dtypes. Raises RequestRefused, without a trace, when they do not fit."""
        cast = [
            (name, tensor.to(self._target(name).dtype) if self._knows(name) and tensor.is_floating_point() else tensor)
            for name, tensor in named
        ]
        missing = self._missing({name for name, _ in named})
        problems = [*self._problems(cast), *(f"{name} is missing" for name in missing)]
        if problems:
            raise RequestRefused(f"nothing was loaded, the weights are as they were: {_listed(problems)}")
        return cast

    def fail(self, problem: str) -> NoReturn:
        """Note that a bucket could not be applied, and raise RequestRefused (400)."""
        self.received = set()
        self.half_updated = f"weights are half updated: a bucket was refused ({problem}); send a complete update with its weight_version"
        raise RequestRefused(f"nothing of this bucket was applied: {problem}")

    def checksums(self) -> dict[str, str]:
        """Checksum of every parameter by name."""
        self._require_memory()
        return {name: checksum_tensor(self._target(name)) for name in self._places}

    def release(self) -> None:
        """Give the memory of all parameters back; they keep their shapes. Repeating it does nothing."""
        if self.released:
            return
        for parameter in self._parameters.values():
            if not parameter.untyped_storage().resizable():
                parameter.data = parameter.data.clone()  # it lay in a mapped file
            parameter.untyped_storage().resize_(0)
        self.released = True
        self.received = set()
        self.absent = self.half_updated = (
            "the weights are released; POST /resume_memory_occupation, then send a complete update"
        )

    def restore(self) -> None:
        """Give the parameters memory again, filled with zeros. Nothing happens where nothing was released."""
        if not self.released:
            return
        for storage, size in self._storages():
            storage.resize_(size)
        for parameter in self._parameters.values():
            parameter.data.zero_()
        self.released = False
        self.absent = self.half_updated = (
            "the weights were released and are zeros until a complete update with its weight_version is sent"
        )

    def require_present(self) -> None:
        """Raise RequestRefused (503) when there are no weights to compute with."""
        if self.absent is not None:
            raise RequestRefused(self.absent, 503)

    def take_snapshot(self) -> int:
        """Remember the checksums of the present weights; returns how many."""
        self._snapshot = self.checksums()
        return len(self._snapshot)

    def fill_with_garbage(self, seed: int) -> None:
        """Overwrite every parameter with random numbers, so that one that is not sent again is noticed."""
        self._require_memory()
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._parameters.values():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator))

    def differing_from_snapshot(self) -> list[str]:
        """Names whose bytes are not those of the snapshot; raises RequestRefused when there is none."""
        if self._snapshot is None:
            raise RequestRefused("there is no snapshot to compare with; send the action snapshot first")
        return [name for name, value in self.checksums().items() if self._snapshot[name] != value]

    def _require_memory(self) -> None:
        if self.released:
            raise RequestRefused("the weights are released; POST /resume_memory_occupation with the tag weights first")

    def _storages(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Every storage once, with the bytes its parameters need: several may be slices of one."""
        sizes: dict[int, tuple[torch.UntypedStorage, int]] = {}
        for parameter in self._parameters.values():
            storage = parameter.untyped_storage()
            end = int(parameter.storage_offset() + parameter.numel()) * parameter.element_size()
            _, size = sizes.get(storage._cdata, (storage, 0))
            sizes[storage._cdata] = (storage, max(size, end))
        return list(sizes.values())

    def _missing(self, given: set[str]) -> list[str]:
        """Parameters that are not among the given names; a tied head stands for the embedding."""
        return sorted(set(self._places) - given - ({_EMBEDDING} if self._tied and _HEAD in given else set()))

    def _knows(self, name: str) -> bool:
        return name in self._places or (self._tied and name == _HEAD)

    def _target(self, name: str) -> torch.Tensor:
        place = self._places[_EMBEDDING if self._tied and name == _HEAD else name]
        return place.of(self._parameters[place.source].data)

    def _problems(self, named: NamedTensors) -> list[str]:
        problems: list[str] = []
        seen: dict[str, torch.Tensor] = {}
        for name, tensor in named:
            if not self._knows(name):
                near = difflib.get_close_matches(name, self._places, n=1)
                hint = f"nearest: {near[0]}" if near else f"one of the engine's: {next(iter(self._places))}"
                problems.append(f"{name} is not a parameter ({hint})")
                continue
            own = self._target(name)
            if tensor.shape != own.shape:
                problems.append(f"{name} has shape {list(tensor.shape)}, the engine's is {list(own.shape)}")
            elif tensor.dtype != own.dtype:
                problems.append(f"{name} has dtype {_short(tensor)}, the engine's is {_short(own)}")
            elif name in seen:
                problems.append(f"{name} comes twice")
            elif self._tied and (other := {_HEAD: _EMBEDDING, _EMBEDDING: _HEAD}.get(name)) is not None:
                first = seen.get(other, own if other in self.received else None)
                if first is not None and not torch.equal(first.to(tensor.device), tensor):
                    problems.append(
                        f"the model ties {_HEAD} to {_EMBEDDING}, but they were sent with different values"
                    )
            seen[name] = tensor
        return problems


def _listed(problems: list[str]) -> str:
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    return "; ".join(problems[:_LISTED]) + more


def _short(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
