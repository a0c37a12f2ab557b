"""Which settings that shape training differ from those with which a checkpoint was saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

from miles.config.schema import RunConfig
from miles.config.walk import leaves

SECTIONS = {"model", "data", "rollout", "reward", "algorithm", "critic", "train", "optimizer"}
SINGLE = {"run.deterministic", "engine.dtype"}
WITHOUT_EFFECT = {
    "model.gradient_checkpointing",
    "rollout.max_group_retries",
    "rollout.group_timeout_s",
    "rollout.max_filtered_batches",
    "rollout.log_passrate",
    "reward.timeout_s",
    "reward.num_workers",
    "critic.save",
    "train.compile_layers",
    "train.cpu_offload",
    "train.recompute",
    "train.max_tokens_per_gpu",
    "train.balance_data",
    "train.balance_by_flops",
    "train.max_skipped_steps",
}
"""Settings of those sections that change time, memory or patience, and not what is learned."""
LENGTH = {"rollout.num_rollout", "rollout.num_epoch"}
_SHOWN = 80


def changed_settings(saved: Mapping[str, Any], cfg: RunConfig) -> list[str]:
    """One line for each setting of `cfg` that shapes training and is another in `saved`, the settings of a checkpoint.

    A setting that `saved` does not know had its default. The run's length counts when the learning rate decays to it.
    """
    decays = cfg.optimizer.lr_decay_style != "constant" and cfg.optimizer.lr_decay_iters is None
    lines: list[str] = []
    for name, path, old, new in _values(saved, cfg.model_dump(mode="json")):
        if old == new or (path in LENGTH and not decays):
            continue
        effect = "; the learning rate now decays to the new end" if path in LENGTH else ""
        lines.append(f"changed since the checkpoint: {name} is {_text(new)}, was {_text(old)}{effect}")
    return lines


def _values(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Any]]:
    """Name to show, path, value then, value now, of each setting that shapes training."""
    for leaf in leaves():
        if (leaf.section in SECTIONS or leaf.path in SINGLE) and leaf.path not in WITHOUT_EFFECT:
            yield leaf.flag, leaf.path, _at(saved, leaf.path, leaf.default), _at(now, leaf.path, None)
    then, own = saved.get("custom", {}), now["custom"]
    for name in sorted({*then, *own}):
        yield f"custom.{name}", f"custom.{name}", then.get(name), own.get(name)


def _at(tree: Mapping[str, Any], path: str, default: Any) -> Any:
    value: Any = tree
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = cast(Mapping[str, Any], value)[part]
    return value


def _text(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
