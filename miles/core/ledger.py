"""The ledger: every prompt group that was issued is in exactly one state, and the sum is checked at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from miles.errors import CheckpointError, LedgerError

LiveState = Literal["in_flight", "partial", "ready", "leased"]
LIVE_STATES: tuple[LiveState, ...] = get_args(LiveState)
VERSION = 1


class Ledger:
    """Where each prompt group is, by its `group_index`.

    ```
    issue --> in_flight --finish--> ready --lease--> leased --train--> trained
                |   ^                 |  ^              |
       interrupt|   |resume           |  +----release---+
                v   |                 |
              partial <--- (resume also takes a ready group back to in_flight)
    ```
    Any live group may be dropped (with a reason) and any unfinished one may fail (with an error). The states trained,
    dropped and failed are final: the ledger keeps their numbers and forgets their ids. `partial` means that the data
    source holds the group and will issue it again, with or without tokens; `leased`, that a trainer has it.

    A method that is asked for a transition that does not exist raises `LedgerError` and changes nothing.
    """

    def __init__(self) -> None:
        self._issued = 0
        self._newest = -1
        self._live: dict[int, LiveState] = {}
        self._trained = 0
        self._dropped: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()

    def issue(self, group_index: int) -> None:
        """A new group starts; its index must be greater than every index issued before."""
        if group_index <= self._newest:
            raise LedgerError(
                f"group {group_index} is issued after group {self._newest}, but new groups have rising numbers; "
                f"it is {self._where(group_index)}. A group that is issued again goes through resume()"
            )
        self._newest = group_index
        self._issued += 1
        self._live[group_index] = "in_flight"

    def resume(self, group_index: int) -> None:
        """A group that the data source held is in flight again."""
        self._move(group_index, ("partial", "ready"), "in_flight")

    def start(self, group_index: int) -> None:
        """`issue` for a group never seen, `resume` for one that came back from the data source."""
        if group_index in self._live:
            self.resume(group_index)
        else:
            self.issue(group_index)

    def interrupt(self, group_index: int) -> None:
        """An unfinished group goes back to the data source."""
        self._move(group_index, ("in_flight",), "partial")

    def finish(self, group_index: int) -> None:
        """A group is generated and rewarded."""
        self._move(group_index, ("in_flight",), "ready")

    def lease(self, group_indices: Iterable[int]) -> None:
        """Finished groups become the batch of a step: all of them, or none when one cannot."""
        self._move_all(group_indices, ("ready",), "leased")

    def release(self, group_indices: Iterable[int]) -> None:
        """Leased groups come back untrained."""
        self._move_all(group_indices, ("leased",), "ready")

    def train(self, group_indices: Iterable[int]) -> None:
        """Every optimizer step of these leased groups is done."""
        groups = self._check(group_indices, ("leased",), "trained")
        for group_index in groups:
            del self._live[group_index]
        self._trained += len(groups)

    def drop(self, group_index: int, reason: str) -> None:
        """A live group is left out for good; `reason` becomes the name of a metric."""
        self._check([group_index], LIVE_STATES, "dropped")
        del self._live[group_index]
        self._dropped[reason] += 1

    def fail(self, group_index: int, error: str) -> None:
        """An unfinished group failed for good; `error` names the kind of error."""
        self._check([group_index], ("in_flight", "partial"), "failed")
        del self._live[group_index]
        self._failed[error] += 1

    def state_of(self, group_index: int) -> LiveState | None:
        """State of a live group; None for one that is final or was never issued."""
        return self._live.get(group_index)

    def groups(self, *states: LiveState) -> list[int]:
        """Ids of the live groups in `states`, rising."""
        return sorted(g for g, state in self._live.items() if state in states)

    @property
    def issued(self) -> int:
        """Groups issued since the run's first step."""
        return self._issued

    @property
    def trained(self) -> int:
        """Groups trained since the run's first step."""
        return self._trained

    @property
    def newest(self) -> int:
        """Greatest index issued; -1 before the first."""
        return self._newest

    @property
    def dropped(self) -> dict[str, int]:
        """Dropped groups by reason."""
        return dict(self._dropped)

    @property
    def failed(self) -> dict[str, int]:
        """Failed groups by kind of error."""
        return dict(self._failed)

    def assert_balanced(self) -> None:
        """Check that issued = live + trained + dropped + failed; raises `LedgerError` with all numbers otherwise."""
        total = len(self._live) + self._trained + self._dropped.total() + self._failed.total()
        if total != self._issued:
            raise LedgerError(f"{self._issued} groups were issued but {total} are accounted for: {self.metrics()}")
        if strays := sorted(g for g in self._live if g > self._newest):
            raise LedgerError(f"groups {strays} are live but the newest group issued is {self._newest}")

    def metrics(self) -> dict[str, float]:
        """Groups by state: `ledger/issued`, `ledger/ready`, `ledger/dropped/REASON`, ..."""
        live = Counter(self._live.values())
        numbers: dict[str, float] = {"ledger/issued": float(self._issued)}
        numbers |= {f"ledger/{state}": float(live[state]) for state in LIVE_STATES}
        numbers["ledger/trained"] = float(self._trained)
        numbers["ledger/dropped"] = float(self._dropped.total())
        numbers["ledger/failed"] = float(self._failed.total())
        numbers |= {f"ledger/dropped/{reason}": float(n) for reason, n in sorted(self._dropped.items())}
        numbers |= {f"ledger/failed/{error}": float(n) for error, n in sorted(self._failed.items())}
        return numbers

    def state_dict(self) -> dict[str, Any]:
        """JSON-ready: the counters, and the ids of live groups by state."""
        return {
            "version": VERSION,
            "issued": self._issued,
            "newest": self._newest,
            "live": {state: self.groups(state) for state in LIVE_STATES},
            "trained": self._trained,
            "dropped": dict(sorted(self._dropped.items())),
            "failed": dict(sorted(self._failed.items())),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[int]:
        """Go on from `state_dict`: leased groups are ready again, groups in flight are partial.

        Returns the ids of all live groups, rising: the data source must hold each of them and issue it again. Raises
        CheckpointError when `state` is not a ledger's or does not add up.
        """
        if state.get("version") != VERSION:
            raise CheckpointError(
                f"the ledger of this checkpoint has version {state.get('version')!r}; this Miles reads {VERSION}"
            )
        after: dict[LiveState, LiveState] = {
            "in_flight": "partial",
            "partial": "partial",
            "ready": "ready",
            "leased": "ready",
        }
        loaded = Ledger()
        try:
            loaded._issued, loaded._newest = int(state["issued"]), int(state["newest"])
            loaded._trained = int(state["trained"])
            loaded._dropped = Counter({str(r): int(n) for r, n in state["dropped"].items()})
            loaded._failed = Counter({str(r): int(n) for r, n in state["failed"].items()})
            for before in LIVE_STATES:
                for group_index in state["live"][before]:
                    if int(group_index) in loaded._live:
                        raise ValueError(f"group {group_index} is in two states")
                    loaded._live[int(group_index)] = after[before]
            loaded.assert_balanced()
        except (KeyError, TypeError, ValueError, AttributeError, LedgerError) as error:
            raise CheckpointError(
                f"the ledger of this checkpoint is damaged ({error!r}); resume from an earlier checkpoint"
            ) from error
        self._issued, self._newest, self._live = loaded._issued, loaded._newest, loaded._live
        self._trained, self._dropped, self._failed = loaded._trained, loaded._dropped, loaded._failed
        return sorted(self._live)

    def _where(self, group_index: int) -> str:
        if group_index in self._live:
            return f"{self._live[group_index]} now"
        return "final already (trained, dropped or failed)" if group_index <= self._newest else "not issued"

    def _check(self, group_indices: Iterable[int], allowed: tuple[LiveState, ...], to: str) -> list[int]:
        groups = list(group_indices)
        for group_index in groups:
            if self._live.get(group_index) not in allowed:
                raise LedgerError(
                    f"group {group_index} cannot become {to}: it is {self._where(group_index)}, "
                    f"and only groups that are {' or '.join(allowed)} can"
                )
        if len(set(groups)) != len(groups):
            twice = sorted(g for g, n in Counter(groups).items() if n > 1)
            raise LedgerError(f"groups {twice} are listed twice and cannot become {to}")
        return groups

    def _move(self, group_index: int, allowed: tuple[LiveState, ...], to: LiveState) -> None:
        self._move_all([group_index], allowed, to)

    def _move_all(self, group_indices: Iterable[int], allowed: tuple[LiveState, ...], to: LiveState) -> None:
        for group_index in self._check(group_indices, allowed, to):
            self._live[group_index] = to
