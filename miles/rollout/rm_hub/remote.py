"""Rewards from a server of the user's: one POST a sample, with a deadline, careful retries and several addresses."""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any

from miles.config.reward_types import reward_urls
from miles.core.samples import Sample
from miles.errors import ConfigError, EngineError, HookError, Issue
from miles.rollout.rm_hub.reward_servers import RewardServer, RewardServers
from miles.utils.http_utils import HttpError, TransportError, post_once

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_SHOWN = 300


class RemoteRewardError(HookError):
    """A reward server gave no reward: it refused, answered nonsense, or was silent until the deadline.

    `hook` is its address.
    """


class RemoteReward:
    """Asks the servers of `--rm-url` for rewards.

    The request is `{"prompt": text, "response": text, "label": any}` as JSON, with `"metadata"` too when
    `send_metadata`; the answer's body is the reward, a number or an object. At most `max_in_flight` requests run at the
    same time. One call, with its retries and pauses, takes at most `timeout_s` seconds once it has begun.

    Another attempt is made after a lost connection, no answer, 429 or 5xx, so a request may reach a server twice. With
    several servers an attempt may take half of the time that is left, and the next goes to another server.
    """

    def __init__(self, urls: str | None, timeout_s: float, max_in_flight: int, send_metadata: bool) -> None:
        addresses = reward_urls(urls)
        if not addresses:
            problem = "a sample is to be rewarded by remote_rm, and no server is named"
            raise ConfigError([Issue("reward.rm_url", problem, "--rm-url http://HOST:PORT")])
        self._servers = RewardServers(addresses)
        self._timeout_s = timeout_s
        self._send_metadata = send_metadata
        self._slots = asyncio.Semaphore(max_in_flight)
        self._num_retries = self._num_errors = 0

    async def grade_sample(self, response: str, sample: Sample) -> float | dict[str, Any]:
        """The server's reward. Raises RemoteRewardError when there is none."""
        payload = {"prompt": _utf8(sample.prompt_text), "response": _utf8(response), "label": _utf8(sample.label)}
        if self._send_metadata:
            payload["metadata"] = _utf8(sample.metadata)
        async with self._slots:
            try:
                return await self._ask(payload)
            except RemoteRewardError:
                self._num_errors += 1
                raise

    def metrics(self) -> dict[str, float]:
        """Requests that were sent again, and calls that gave no reward, since the start."""
        return {
            "rollout/reward_remote_retries": float(self._num_retries),
            "rollout/reward_remote_errors": float(self._num_errors),
        }

    def close(self) -> None:
        """Nothing: connections belong to the event loop."""

    async def _ask(self, payload: dict[str, Any]) -> Any:
        ends = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        attempts = 0
        while True:
            await self._until_one_may_be_asked(ends, attempts)
            server = self._servers.take()
            attempts += 1
            try:
                reward = await post_once(server.url, payload, timeout_s=self._limit_s(ends))
            except HttpError as error:
                if error.status != 429 and error.status < 500:
                    raise _refused(error) from error
                server.rest(error, error.retry_after_s, failed=error.status != 429)
            except TransportError as error:
                server.rest(error, 0.0, failed=True)
            except EngineError as error:
                raise RemoteRewardError(server.url, str(error), "answer with the reward as JSON") from error
            except (TypeError, ValueError) as error:
                problem = f"a sample cannot be sent as JSON: {error}"
                raise RemoteRewardError(server.url, problem, "keep labels and metadata to what JSON has") from error
            else:
                server.succeeded()
                return _checked(reward, server)
            if not self._servers.other_than(server):
                await self._pause(pause_s, ends, attempts)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._num_retries += 1

    def _limit_s(self, ends: float) -> float:
        """Seconds for one attempt."""
        left_s = max(ends - time.monotonic(), 0.001)
        return left_s if len(self._servers) == 1 else left_s / 2

    async def _until_one_may_be_asked(self, ends: float, attempts: int) -> None:
        rest_s = self._servers.wait_s()
        if rest_s > 0:
            await self._pause(rest_s, ends, attempts)

    async def _pause(self, seconds: float, ends: float, attempts: int) -> None:
        """Wait, with jitter: callers that failed together do not come back together. Raises when no time would be left."""
        seconds *= random.uniform(1.0, 1.5)
        if time.monotonic() + seconds >= ends:
            raise self._given_up(attempts)
        await asyncio.sleep(seconds)

    def _given_up(self, attempts: int) -> RemoteRewardError:
        server = self._servers.soonest()
        tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        return RemoteRewardError(
            server.url,
            f"gave no reward within {self._timeout_s:g} s, in {tried}; at last: {server.failure}",
            "see the server's log; raise reward.timeout_s, or lower reward.remote_max_in_flight if it is overloaded",
        )


def _refused(error: HttpError) -> RemoteRewardError:
    return RemoteRewardError(
        error.url,
        f"refused the request with status {error.status}: {error.body[:_SHOWN] or '(no text)'}",
        'the request is {"prompt": text, "response": text, "label": ...}; check the address and the server',
    )


def _checked(reward: Any, server: RewardServer) -> Any:
    """The reward when it is a finite number or an object; what is in an object, the hub looks at."""
    if isinstance(reward, dict) or (isinstance(reward, int | float) and math.isfinite(reward)):
        return reward
    shown = "nothing" if reward is None else f"{type(reward).__name__} {reward!r:.{_SHOWN}}"
    raise RemoteRewardError(server.url, f"answered {shown}, not a reward", "answer with a JSON number or object")


def _utf8(value: Any) -> Any:
    """A copy whose texts can be sent: half of a surrogate pair, which UTF-8 cannot write, becomes a question mark."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list | tuple):
        return [_utf8(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, dict):
        return {str(_utf8(key)): _utf8(item) for key, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value
