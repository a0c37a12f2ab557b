"""`HookArgs`: what users' functions get as `args`."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from miles.config.batch_math import batch_plan
from miles.config.estimators import whitens
from miles.config.nearest import nearest
from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.core.run_facts import RunFacts
from miles.errors import ConfigError, Issue


class HookArgs:
    """Every setting by its flag's name, the facts of the run, and the keys of `custom`, as read-only attributes.

    `args.rollout_batch_size` is `--rollout-batch-size`; settings that a run may leave unset and that follow from
    others have their value here: `eps_clip_high`, `normalize_advantages`, `eval_reward_key`, `over_sampling_batch_size`,
    `global_batch_size` and `num_steps_per_rollout`. A fact wins over the setting of its name, such as `run_dir`. Lists
    and mappings are copies. An unknown name raises AttributeError with the nearest names, so
    `getattr(args, "my_key", default)` works. Raises ConfigError when a key of `custom` is taken already.
    """

    __slots__ = ("_config", "_facts", "_values")
    _config: RunConfig
    _facts: RunFacts
    _values: dict[str, Any]

    def __init__(self, config: RunConfig, facts: RunFacts) -> None:
        values: dict[str, Any] = {}
        for leaf in leaves(RunConfig):
            value: Any = config
            names = leaf.path.split(".")
            for name in names:
                value = getattr(value, name)
            if leaf.negated:
                values[names[-1]] = value
            values[leaf.attribute] = not value if leaf.negated else value
        values |= {f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)}
        plan = batch_plan(config)
        values["eps_clip_high"] = _first(config.algorithm.eps_clip_high, config.algorithm.eps_clip)
        values["normalize_advantages"] = whitens(
            config.algorithm.advantage_estimator,
            config.algorithm.normalize_advantages,
            custom=config.algorithm.custom_advantage_function_path is not None,
        )
        values["eval_reward_key"] = _first(config.reward.eval_reward_key, config.reward.reward_key)
        values["over_sampling_batch_size"] = _first(config.rollout.over_sampling_batch_size, config.rollout.batch_size)
        values["global_batch_size"] = plan.global_batch_size
        values["num_steps_per_rollout"] = plan.num_steps_per_rollout
        if taken := sorted((values.keys() | set(dir(HookArgs))) & config.custom.keys()):
            raise ConfigError(
                [
                    Issue(path=f"custom.{name}", problem="is a name that args has already", fix="rename the key")
                    for name in taken
                ]
            )
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_facts", facts)
        object.__setattr__(self, "_values", values | config.custom)

    @property
    def config(self) -> RunConfig:
        """The configuration as a tree."""
        return self._config

    @property
    def facts(self) -> RunFacts:
        """What the run learnt when it started."""
        return self._facts

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """All names and values, as a copy; `vars(args)` gives the same."""
        return copy.deepcopy(self._values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in HookArgs.__slots__:
            raise AttributeError(name)
        if name in self._values:
            return copy.deepcopy(self._values[name])
        close = nearest(name, [(known, known) for known in self._values])
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise AttributeError(
            f"args has no {name!r}{hint}; settings of your own go into --custom-config-path FILE.yaml"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"args is read-only, so args.{name} cannot be set; put settings of your own into --custom-config-path "
            "FILE.yaml, and what belongs to one sample into sample.metadata"
        )

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"args is read-only, so args.{name} cannot be deleted")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._values})

    def __repr__(self) -> str:
        return f"HookArgs({', '.join(f'{k}={v!r}' for k, v in sorted(self._values.items()))})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (HookArgs, (self._config, self._facts))


def _first(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value
