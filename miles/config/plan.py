"""What a run will start, and where, in words."""

from __future__ import annotations

from miles.config.batch_math import batch_plan
from miles.config.resources import num_engines, num_train_ranks, resolved_num_cpus, resolved_threads
from miles.config.schema import RunConfig


def describe_plan(cfg: RunConfig) -> list[str]:
    """Lines that say which processes the run starts, what they take, and how its batches divide."""
    engines, ranks = num_engines(cfg), num_train_ranks(cfg)
    threads, cpus = resolved_threads(cfg), resolved_num_cpus(cfg)
    rows = [
        ("driver", "1 process", "the loop; starts all others and ends them"),
        ("rollout manager", "1 Ray actor", _data(cfg)),
    ]
    if engines:
        port = f"port {cfg.router.port}" if cfg.router.port else "a free port"
        rows.append(("router", "1 process", f"loopback, {port}, in front of {_count(engines, 'engine')}"))
        rows.append(("engines", _count(engines, "process", "es"), f"torch on CPU, {_each(threads)}"))
    if ranks:
        rows.append(("trainer", _count(ranks, "rank"), f"{cfg.train.backend} on CPU, {_each(threads)}"))
    lines = [f"{name:<16} {number:<12} {text}" for name, number, text in rows]
    taken = f"{engines} + {ranks} = {engines + ranks}" if engines and ranks else str(engines + ranks)
    lines.append(f"logical CPUs     {taken} taken of the {cpus} that Ray may hand out")
    lines.append(f"each step        {batch_plan(cfg).describe()}")
    lines.append(f"length           {_length(cfg)}")
    lines.append(f"run folder       {cfg.run.dir or f'runs/{cfg.run.name}-TIME'}")
    return lines


def _data(cfg: RunConfig) -> str:
    if cfg.debug.load_rollout_data is not None:
        return f"saved samples from {cfg.debug.load_rollout_data}"
    return f"prompts from {cfg.data.prompt_data}" if cfg.data.prompt_data else f"prompts from {cfg.data.source_path}"


def _length(cfg: RunConfig) -> str:
    if cfg.rollout.num_rollout is not None:
        steps = cfg.rollout.num_rollout
        if cfg.debug.rollout_only:
            return f"{_count(steps, 'rollout step')}, none of them trained on"
        updates = steps * batch_plan(cfg).num_steps_per_rollout
        return f"{_count(steps, 'rollout step')}, {_count(updates, 'optimizer step')}"
    return f"{_count(cfg.rollout.num_epoch or 0, 'epoch')} of rows // {cfg.rollout.batch_size} rollout steps"


def _each(threads: int) -> str:
    return f"1 logical CPU and {_count(threads, 'thread')} each"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + ("" if number == 1 else plural)
