"""Proof that the engines hold what the trainer has, from names, bytes and checksums alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from miles.backends.weight_sync.records import SentWeights
from miles.errors import WeightSyncError

SHOWN = 8


def check_versions(sent: SentWeights, versions: Mapping[str, str]) -> None:
    """Every engine, by its id, reports the version that was sent. Raises WeightSyncError."""
    wrong = [f"{engine} says {found}" for engine, found in versions.items() if found != str(sent.version)]
    if wrong:
        raise WeightSyncError(f"weight update {sent.version} did not arrive: {', '.join(wrong)}")


def check_sent(sent: SentWeights) -> None:
    """Proof (b), first half: names and bytes sent equal those of the model folder. Raises WeightSyncError."""
    missing = sorted(set(sent.expected_nbytes) - set(sent.nbytes))
    surplus = sorted(set(sent.nbytes) - set(sent.expected_nbytes))
    sizes = sorted(
        f"{name} ({sent.nbytes[name]} bytes sent, {size} expected)"
        for name, size in sent.expected_nbytes.items()
        if name in sent.nbytes and sent.nbytes[name] != size
    )
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("never sent", missing),
            ("sent but not in the model folder", surplus),
            ("of another size", sizes),
        )
        if names
    ]
    if problems:
        raise WeightSyncError(
            f"weight update {sent.version} is not the model of --hf-checkpoint; " + "; ".join(problems)
        )


def check_engines(sent: SentWeights, held: Mapping[str, Mapping[str, str]]) -> None:
    """Proofs (b) and (d): each engine's checksum of each parameter equals the trainer's.

    `held` maps an engine's id to its checksums by parameter name. Raises WeightSyncError naming engine and parameters.
    """
    for engine, checksums in held.items():
        differing = sorted(name for name, value in sent.checksums.items() if checksums.get(name) != value)
        surplus = sorted(set(checksums) - set(sent.checksums))
        if differing or surplus:
            raise WeightSyncError(
                f"{engine} does not hold weight version {sent.version}: "
                + "; ".join(
                    f"{what}: {_some(names)}"
                    for what, names in (("differing or missing", differing), ("held but never sent", surplus))
                    if names
                )
            )


def check_agree(sent: SentWeights, held: Mapping[str, Mapping[str, str]]) -> None:
    """Proof (b) of engines that check by names of their own: those with the same names hold the same weights.

    `held` maps an engine's id to its checksums. Raises WeightSyncError naming two engines and the parameters.
    """
    first_of: dict[frozenset[str], str] = {}
    for engine, checksums in held.items():
        first = first_of.setdefault(frozenset(checksums), engine)
        if dict(checksums) != dict(held[first]):
            raise WeightSyncError(
                f"{engine} and {first} hold different weights after update {sent.version}: {_differing(held[first], checksums)}"
                "\n    fix: report this with both engines' logs"
            )


def check_changed(sent: SentWeights, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Proof (b), last part: training changed the weights, so checksums must differ from the last update's.

    Raises WeightSyncError.
    """
    if sent.learned and before and dict(before) == dict(now):
        raise WeightSyncError(
            f"weight update {sent.version} brought exactly the weights of the update before, though optimizer steps were made\n"
            "    fix: the trainer sends a stale copy of its weights; report this with the run folder"
        )


def check_same(sent: SentWeights, published: Mapping[str, str], now: Mapping[str, str]) -> None:
    """What was sent again is what was published under the same version. Raises WeightSyncError."""
    if published and dict(published) != dict(now):
        raise WeightSyncError(
            f"weight version {sent.version} was sent again with other values than at its publish: {_differing(published, now)}"
            "\n    fix: something changed the trainer's weights between two publishes; report this with the run folder"
        )


def check_reloaded(
    sent: SentWeights, before: Mapping[str, str], held: Mapping[str, Mapping[str, str]], second_path: str
) -> None:
    """Proof (c): weights that an engine took by `second_path` have the checksums of those it took the usual way.

    `before` is what the engine held after the update, `held` what it reports after the second path. Raises WeightSyncError.
    """
    for engine, checksums in held.items():
        if dict(checksums) != dict(before):
            raise WeightSyncError(
                f"{engine} holds other weights after loading version {sent.version} by {second_path} than after the update: "
                f"{_differing(before, checksums)}"
                "\n    fix: the two load paths of the engine disagree; report this with the run folder"
            )


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    return _some(sorted(name for name in {*one, *other} if one.get(name) != other.get(name)))


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
