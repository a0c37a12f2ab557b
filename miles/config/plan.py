"""What a run will start, and where, in words."""

from __future__ import annotations

from collections.abc import Sequence

from miles.config.batch_math import batch_plan
from miles.config.eval_settings import eval_datasets
from miles.config.implied import implied
from miles.config.resources import (
    engine_backend,
    gpu_plan,
    num_engines,
    num_started_engines,
    num_train_ranks,
    only_evaluates,
    resolved_device,
    resolved_num_cpus,
    resolved_threads,
    weights_transport,
)
from miles.config.schema import RunConfig


def describe_plan(cfg: RunConfig) -> list[str]:
    """Lines that say which processes the run starts, what they take, and how its batches divide."""
    engines, ranks = num_engines(cfg), num_train_ranks(cfg)
    threads, cpus, gpus = resolved_threads(cfg), resolved_num_cpus(cfg), gpu_plan(cfg)
    rows = [
        ("driver", "1 process", "the loop; starts all others and ends them"),
        ("rollout manager", "1 Ray actor", _data(cfg)),
    ]
    if engines:
        port = f"port {cfg.router.port}" if cfg.router.port else "a free port"
        rows.append(("router", "1 process", f"loopback, {port}, in front of {_count(engines, 'engine')}"))
        rows.append(_external(cfg) if cfg.engine.external else _own(cfg, gpus.engines))
    if ranks:
        rows.append(
            ("trainer", _count(ranks, "rank"), f"{_place(cfg.train.backend, cfg, gpus.train)}, {_each(threads)}")
        )
    lines = [f"{name:<16} {number:<12} {text}" for name, number, text in rows]
    started = num_started_engines(cfg)
    taken = f"{started} + {ranks} = {started + ranks}" if started and ranks else str(started + ranks)
    lines.append(f"logical CPUs     {taken} taken of the {cpus} that Ray may hand out")
    if not only_evaluates(cfg):
        lines.append(f"each step        {batch_plan(cfg).describe()}")
    lines.append(f"length           {_length(cfg)}")
    lines += [f"implied          {one.describe()}" for one in implied(cfg)]
    lines.append(f"run folder       {cfg.run.dir or f'runs/{cfg.run.name}-TIME'}")
    return lines


def _own(cfg: RunConfig, gpus: Sequence[Sequence[str]]) -> tuple[str, str, str]:
    threads = resolved_threads(cfg) if engine_backend(cfg) == "torch" else None
    place = f"{_place(engine_backend(cfg), cfg, gpus)}, {_each(threads)}"
    return "engines", _count(num_engines(cfg), "process", "es"), place


def _external(cfg: RunConfig) -> tuple[str, str, str]:
    where = f"{', '.join(cfg.engine.external_addrs)}, started by somebody else"
    return "engines", _count(num_engines(cfg), "server"), f"{where}; weights go by {weights_transport(cfg)}"


def _place(what: str, cfg: RunConfig, gpus: Sequence[Sequence[str]]) -> str:
    if resolved_device(cfg) == "cpu":
        return f"{what} on CPU"
    return f"{what} on GPU {', '.join('+'.join(one) for one in gpus)}"


def _data(cfg: RunConfig) -> str:
    if only_evaluates(cfg):
        return ", ".join(f"{dataset.name} from {dataset.path}" for dataset in eval_datasets(cfg))
    if cfg.debug.load_rollout_data is not None:
        return f"saved samples from {cfg.debug.load_rollout_data}"
    return f"prompts from {' '.join(cfg.data.prompt_data) or cfg.data.source_path}"


def _length(cfg: RunConfig) -> str:
    if only_evaluates(cfg):
        return f"one evaluation of {_count(len(eval_datasets(cfg)), 'dataset')}, no training"
    if cfg.rollout.num_rollout is not None:
        steps = cfg.rollout.num_rollout
        if cfg.debug.rollout_only:
            return f"{_count(steps, 'rollout step')}, none of them trained on"
        updates = steps * batch_plan(cfg).num_steps_per_rollout
        return f"{_count(steps, 'rollout step')}, {_count(updates, 'optimizer step')}"
    return f"{_count(cfg.rollout.num_epoch or 0, 'epoch')} of rows // {cfg.rollout.batch_size} rollout steps"


def _each(threads: int | None) -> str:
    return "1 logical CPU each" if threads is None else f"1 logical CPU and {_count(threads, 'thread')} each"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + ("" if number == 1 else plural)
