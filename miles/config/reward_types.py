"""Names of the built-in rewards, as settings and rows of data give them. What they do is in `miles.rollout.rm_hub`."""

from __future__ import annotations

from miles.config.nearest import nearest

REWARD_TYPES: tuple[str, ...] = (
    "math",
    "dapo",
    "deepscaler",
    "gemma_math",
    "exact",
    "f1",
    "gpqa",
    "remote_rm",
    "code",
    "ifbench",
    "random",
    "deterministic_random",
)
"""Every `--rm-type`, without those that `boxed_` makes of them. The table `REWARDS` of the hub has the same names."""

WITHOUT_LABEL = frozenset({"gpqa", "remote_rm", "code", "ifbench", "random", "deterministic_random"})
"""Rewards that can do without `--label-key`: they take the answer from the metadata, or need none."""

BOXED = "boxed_"


def split_boxed(name: str) -> tuple[bool, str]:
    """Whether a reward's name asks for the last box only, and the reward that then judges: `boxed_math` is `math`."""
    return name.startswith(BOXED), name.removeprefix(BOXED)


def needs_label(name: str) -> bool:
    """Whether a reward of this name cannot judge without a label."""
    return split_boxed(name)[1] not in WITHOUT_LABEL


def is_reward_type(name: str) -> bool:
    """Whether there is a built-in reward of this name."""
    return split_boxed(name)[1] in REWARD_TYPES


def known_reward_types(name: str) -> str:
    """The way out for a name that is none: the nearest names, and all of them."""
    prefix = BOXED if name.startswith(BOXED) else ""
    close = nearest(name, [(prefix + known, prefix + known) for known in REWARD_TYPES])
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return f"{hint}the built-in rewards are {', '.join(REWARD_TYPES)}, and {BOXED}TYPE for the last box only"


def reward_urls(setting: str | None) -> list[str]:
    """The addresses that `--rm-url` names."""
    return [url.strip() for url in (setting or "").split(",") if url.strip()]
