"""The predicted memory in words: a table by phase and part, what does not fit, and which named change makes it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from miles.config.memory import GIB, Needs, Parts, Phase, Prediction, TrainerNeeds, held, on_the_host, predict
from miles.config.memory_needs import Room, needs_of, room_of
from miles.config.resources import (
    engine_dtype,
    host_memory,
    machine_gpus,
    num_started_engines,
    num_train_ranks,
    resolved_device,
)
from miles.config.schema import RunConfig
from miles.errors import Issue

MOST_WAYS = 3
LEAST_FRACTION = 0.05
ALL_THE_SAME = "--check-memory false, to start all the same"
Change = tuple[str, Needs]
"""A named change of settings, and what the run needs with it."""
Kind = Callable[[Needs, Room, int], Iterator[Change]]
"""Changes of one kind, the least first."""


def memory_suffices(cfg: RunConfig) -> Iterator[Issue]:
    """Whether every phase fits the GPUs, and the host's memory what it must hold; says nothing where sizes are unknown."""
    needs = needs_of(cfg) if cfg.cluster.check_memory else None
    for issue in () if needs is None else _lacks(cfg, needs):
        yield replace(issue, fix=f"{issue.fix}; or {ALL_THE_SAME}")


def _lacks(cfg: RunConfig, needs: Needs) -> Iterator[Issue]:
    if resolved_device(cfg) != "cuda":
        yield from _fits_a_cpu_machine(cfg, needs)
        return
    yield from _fits_the_host(needs)
    room = room_of(cfg)
    if room is not None and needs.wanted_gpus <= len(machine_gpus()):
        yield from _fits_the_gpus(needs, room, len(machine_gpus()))


# ---- GPUs


def _fits_the_gpus(needs: Needs, room: Room, gpus: int) -> Iterator[Issue]:
    failing = _lacking(needs, room)
    if failing is not None:
        prediction, phase = failing
        names = machine_gpus()[prediction.first : prediction.last + 1]
        has = f"it has {_gib(room.memory.total)}"
        if room.memory.used > GIB:
            has += f", of which other processes hold {_gib(room.memory.used)}"
        problem = (
            f"{phase} needs about {_gib(prediction.total(phase))} GiB on GPU {', '.join(names)} and {has}: "
            f"{_listed(prediction.phases[phase])}"
        )
        yield Issue("memory", problem, _ways_out(needs, room, gpus))
        return
    too_long = _request_without_room(needs, room)
    if too_long:
        yield Issue("memory", too_long, _ways_out(needs, room, gpus))


def _lacking(needs: Needs, room: Room) -> tuple[Prediction, Phase] | None:
    """Where most is missing; None when everything fits."""
    over: list[tuple[int, Prediction, Phase]] = [
        (prediction.total(phase) - room.free, prediction, phase)
        for prediction in predict(needs, room.memory.total)
        for phase in prediction.phases
        if prediction.total(phase) > room.free
    ]
    if not over:
        return None
    _, prediction, phase = max(over, key=lambda one: one[0])
    return prediction, phase


def _request_without_room(needs: Needs, room: Room) -> str:
    """What is wrong when an engine's KV would not hold its longest request; empty when it does."""
    engine = needs.engine
    if engine is None:
        return ""
    static = engine.static(room.memory.total)
    held_tokens = max(0, static - engine.weights) // engine.kv_per_token
    if held_tokens >= engine.longest:
        return ""
    return (
        f"an engine has {_gib(static)} GiB of GPU {room.gpu} for weights and KV, and its weights take "
        f"{_gib(engine.weights)}: room for {held_tokens} tokens, and a request may have {engine.longest}"
    )


def _ways_out(needs: Needs, room: Room, gpus: int) -> str:
    """Changes by which everything fits: single ones, or else pairs of them; weights in the CPU's memory last, which cost most."""

    def fits(changed: Needs) -> bool:
        return _lacking(changed, room) is None and not _request_without_room(changed, room)

    def singly(*kinds: Kind) -> list[str]:
        return [way for kind in kinds if (way := _first(kind(needs, room, gpus), fits))]

    def paired(pairs: Iterable[tuple[Kind, Kind]]) -> list[str]:
        found: list[str] = []
        for one, other in pairs:
            changes = (
                (f"{first} with {second}", both)
                for first, changed in one(needs, room, gpus)
                for second, both in other(changed, room, gpus)
            )
            if way := _first(changes, fits):
                found.append(way)
        return found

    kinds = (_recompute, _fewer_tokens, _smaller_engine, _bf16, _more_ranks, _offload, _more_tp, _smaller_context)
    found = singly(*kinds) or paired(combinations(kinds, 2))
    found = found or singly(_cpu_offload) or paired((_cpu_offload, kind) for kind in kinds)
    if found:
        return "; or ".join(found[:MOST_WAYS])
    return (
        f"a smaller model, or more GPUs or larger ones: no change of settings makes it fit {_count(gpus, 'such GPU')}"
    )


def _first(changes: Iterator[Change], fits: Callable[[Needs], bool]) -> str:
    return next((text for text, changed in changes if fits(changed)), "")


def _smaller_engine(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    if needs.engine:
        hundredths = range(95, 0, -1)
        for fraction in (n / 100 for n in hundredths if n / 100 >= LEAST_FRACTION):
            changed = replace(needs, engine=replace(needs.engine, fraction=fraction))
            yield f"--sglang-mem-fraction-static {fraction:.2f}", changed


def _recompute(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    trainer = needs.trainer
    if trainer and trainer.recompute == "none":
        yield "--recompute selective", _with(needs, replace(trainer, recompute="selective"))
    if trainer and trainer.recompute != "full":
        yield "--recompute full", _with(needs, replace(trainer, recompute="full"))


def _fewer_tokens(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    trainer = needs.trainer
    if trainer is None:
        return
    tokens = 1 << max(0, trainer.tokens - 1).bit_length()
    while (tokens := tokens // 2) >= max(trainer.longest, 256):
        yield f"--max-tokens-per-gpu {tokens}", _with(needs, replace(trainer, tokens=tokens, several=True))


def _bf16(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    if needs.trainer and not needs.trainer.bf16:
        yield "--bf16", _with(needs, replace(needs.trainer, bf16=True))


def _cpu_offload(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    if needs.trainer and not needs.trainer.cpu_offload:
        changed, there = replace(needs.trainer, cpu_offload=True), host_memory()
        if there is None or on_the_host(changed) <= there:
            yield "--fsdp-cpu-offload", _with(needs, changed)


def _offload(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    if not needs.shares or not needs.trainer or not needs.engine:
        return
    if not needs.offloads_train:
        yield "--offload-train true", replace(needs, offloads_train=True)
    if len(needs.given_up) < 2:
        away = replace(
            needs, given_up=frozenset({"kv_cache", "weight"}), engine=replace(needs.engine, saves_memory=True)
        )
        yield "--offload-rollout true --offload-rollout-level kv_cache weight", away


def _more_ranks(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    trainer = needs.trainer
    ranks = trainer.ranks * 2 if trainer else 0
    while trainer and ranks <= (gpus if needs.shares else gpus - needs.engine_gpus):
        yield f"--train-ranks {ranks}", _with(needs, replace(trainer, ranks=ranks))
        ranks *= 2


def _more_tp(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    engine = needs.engine
    for tp in (2, 4, 8):
        if engine and tp > engine.tp and engine.model.heads % tp == 0:
            changed = replace(needs, engine=replace(engine, tp=tp))
            if changed.wanted_gpus <= gpus:
                yield f"--rollout-num-gpus-per-engine {tp}", changed


def _smaller_context(needs: Needs, room: Room, gpus: int) -> Iterator[Change]:
    engine = needs.engine
    length = engine.longest if engine else 0
    while engine and (length := length // 2) >= 1024:
        yield (
            f"requests of at most {length} tokens (--rollout-max-context-len, --rollout-max-response-len)",
            replace(needs, engine=replace(engine, longest=length)),
        )


def _with(needs: Needs, trainer: TrainerNeeds) -> Needs:
    return replace(needs, trainer=trainer)


# ---- the host, and machines without GPUs


def _fits_the_host(needs: Needs) -> Iterator[Issue]:
    there, trainer = host_memory(), needs.trainer
    if there is None or trainer is None:
        return
    loading = trainer.ranks * 4 * trainer.policy.parameters
    if trainer.cpu_offload and (trainer.reference or trainer.critic):  # they load when the policy is there
        loading += on_the_host(replace(trainer, reference=None, critic=None, several=False))
    pinned = on_the_host(trainer) if needs.offloads_train or trainer.cpu_offload else 0
    if loading > there:
        yield Issue(
            "memory",
            f"{_count(trainer.ranks, 'trainer rank')} load {_gib(loading)} GiB of weights in fp32 at the same time, and this "
            f"machine has {_gib(there)} GiB of memory",
            "fewer --train-ranks, or a machine with more memory",
        )
    elif pinned > there and trainer.cpu_offload:
        yield Issue(
            "memory",
            f"--fsdp-cpu-offload keeps {_gib(pinned)} GiB in this machine's memory, of which there are {_gib(there)}",
            "a machine with more memory",
        )
    elif pinned > there:
        yield Issue(
            "memory",
            f"a trainer that leaves its GPU takes {_gib(pinned)} GiB of this machine's memory, of which there are "
            f"{_gib(there)}",
            "--offload-train false, if the engines fit beside it, or a machine with more memory",
        )


def least_of_a_cpu_machine(cfg: RunConfig, needs: Needs) -> Parts:
    """What trainer and engines hold at least in memory that they share: all ranks together, without what passes make."""
    parts: Parts = {}
    if needs.trainer:
        whole = replace(needs.trainer, ranks=1)
        parts |= {f"trainer: {name}": number for name, number in held(whole, gradients=True).items()}
        size = {"float32": 4}.get(engine_dtype(cfg), 2)
        parts["engines: weights"] = num_started_engines(cfg) * size * needs.trainer.policy.parameters
    return {name: number for name, number in parts.items() if number}


def _fits_a_cpu_machine(cfg: RunConfig, needs: Needs) -> Iterator[Issue]:
    there, parts = host_memory(), least_of_a_cpu_machine(cfg, needs)
    if there is not None and sum(parts.values()) > there:
        yield Issue(
            "memory",
            f"the run holds at least {_gib(sum(parts.values()))} GiB, and this machine has {_gib(there)}: {_listed(parts)}",
            "a smaller model, or a machine with more memory",
        )


# ---- the table


def describe_memory(cfg: RunConfig) -> list[str]:
    """Lines that say what the run will take of each kind of GPU by phase, or of the machine's memory."""
    needs = needs_of(cfg)
    if needs is None:
        return ["not predicted: the model's config.json does not say how large its parts are"]
    if resolved_device(cfg) != "cuda":
        parts, there = least_of_a_cpu_machine(cfg, needs), host_memory()
        if not parts:
            return ["not predicted: nothing is trained"]
        has = f" of the {_gib(there)} that this machine has" if there else ""
        return [f"at least {_gib(sum(parts.values()))} GiB{has}: {_listed(parts)}"]
    room = room_of(cfg)
    if room is None:
        return ["not predicted: nvidia-smi does not tell how much memory the GPUs have"]
    lines: list[str] = []
    for prediction in predict(needs, room.memory.total):
        names = ", ".join(machine_gpus()[prediction.first : prediction.last + 1])
        lines += _table(f"GPU {names}, {_gib(room.free)} GiB free", prediction)
    if needs.engine:
        tokens = max(0, needs.engine.static(room.memory.total) - needs.engine.weights) // needs.engine.kv_per_token
        lines.append(f"KV of {tokens} tokens an engine, unless the GPU is not empty when it starts")
    if needs.trainer and (needs.offloads_train or needs.trainer.cpu_offload) and num_train_ranks(cfg):
        there = host_memory()
        has = f" of {_gib(there)}" if there else ""
        when = "" if needs.trainer.cpu_offload else " when it is away"
        lines.append(f"{_gib(on_the_host(needs.trainer))} GiB{has} of the machine's memory for the trainer{when}")
    return lines


def _table(title: str, prediction: Prediction) -> list[str]:
    phases = list(prediction.phases)
    names = list(dict.fromkeys(name for parts in prediction.phases.values() for name in parts))
    names.sort(key=lambda name: name.startswith("engine"))
    lines = [f"{title:<34}{''.join(f'{phase:>10}' for phase in phases)}"]
    for name in names:
        cells = [_cell(prediction.phases[phase].get(name)) for phase in phases]
        lines.append(f"  {name:<32}{''.join(cells)}")
    return [*lines, f"  {'together':<32}{''.join(_cell(prediction.total(phase)) for phase in phases)}"]


def _cell(number: int | None) -> str:
    return f"{'-' if number is None else _gib(number):>10}"


def _listed(parts: Parts) -> str:
    """`weights 7.5, gradients 15.0`: the largest first, what is below 0.05 GiB left out where there is more."""
    ordered: Sequence[tuple[str, int]] = sorted(parts.items(), key=lambda part: -part[1])
    shown = [part for part in ordered if part[1] >= GIB / 20] or ordered[:1]
    return ", ".join(f"{name} {_gib(number)}" for name, number in shown)


def _gib(number: float) -> str:
    return f"{number / GIB:.1f}" if number >= GIB / 20 or not number else f"{number / GIB:.2g}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
