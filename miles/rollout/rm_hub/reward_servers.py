"""Which reward server is asked next: each in turn, and those that failed a while later."""

from __future__ import annotations

import time
from collections.abc import Sequence

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 5.0


class RewardServer:
    """One address, and until when it is left alone."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.resting_until = 0.0
        """Monotonic seconds."""
        self.failure: Exception | None = None
        """Why it rests."""
        self._failures = 0

    def rest(self, failure: Exception, asked_s: float, *, failed: bool) -> None:
        """Leave the server alone for as long as it asks, and when it failed again for twice as long as before.

        Requests that fail while it rests already were under way together, and are one failure.
        """
        now = time.monotonic()
        self.failure = failure
        pause_s = 0.0
        if failed and self.resting_until <= now:
            pause_s = min(_FIRST_REST_S * 2 ** min(self._failures, 8), _LONGEST_REST_S)
            self._failures += 1
        self.resting_until = max(self.resting_until, now + max(asked_s, pause_s))

    def succeeded(self) -> None:
        """Forget what was before."""
        self._failures, self.resting_until = 0, 0.0


class RewardServers:
    """Servers that take turns."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._all = [RewardServer(url) for url in urls]
        self._next = 0

    def __len__(self) -> int:
        return len(self._all)

    def take(self) -> RewardServer:
        """The next server that does not rest; when all do, the one whose rest ends first."""
        now = time.monotonic()
        for step in range(len(self._all)):
            server = self._all[(self._next + step) % len(self._all)]
            if server.resting_until <= now:
                self._next = (self._next + step + 1) % len(self._all)
                return server
        return self.soonest()

    def soonest(self) -> RewardServer:
        """The server whose rest ends first."""
        return min(self._all, key=lambda server: server.resting_until)

    def wait_s(self) -> float:
        """Seconds until some server may be asked."""
        return max(0.0, self.soonest().resting_until - time.monotonic())

    def other_than(self, one: RewardServer) -> bool:
        """Whether another server does not rest."""
        return any(server is not one and server.resting_until <= time.monotonic() for server in self._all)
