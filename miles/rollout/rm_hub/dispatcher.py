"""The thread that hands jobs to worker processes and keeps quick jobs from waiting behind slow ones.

```
submit (any thread) --> queue --> quick workers --reply--> done
                                    |  slice used up while others wait: the worker goes on, slower, as a slow one,
                                    |  and another takes its place
                                    '--too many slow ones: killed, its job begins anew in --> slow queue --> slow workers
```
consumes: submitted jobs, replies, notes of the nursery / waits for: any of them, or the next deadline / unblocked by:
one byte on a socket from `submit`, `close` and the processes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import threading
import time
from collections import deque
from typing import Any

from miles.errors import HookError, MilesError
from miles.rollout.rm_hub.jobs import Counters, Job, Outcome, Results, next_job
from miles.rollout.rm_hub.nursery import Nursery, Worker, WorkerSettings
from miles.rollout.rm_hub.worker import WALL_FACTOR

logger = logging.getLogger(__name__)

_ATTEMPTS = 2
_LOOK_S = 0.01
_SLOW_PER_QUICK = 4
_AHEAD_S = 0.002
_LATE_S = 0.005
_MOST_AHEAD = 32
_USUAL_SHARE = 0.05
_USUAL_SLICES = 5


class Dispatcher:
    """Owns the processes. Everything but `submit`, `close` and `pids` happens in its thread, which starts them."""

    def __init__(
        self, settings: WorkerSettings, *, size: int, timeout_s: float, slice_s: float, start_timeout_s: float
    ) -> None:
        self.settings, self.size, self.timeout_s = settings, size, timeout_s
        self.slice_s, self.start_timeout_s = slice_s, start_timeout_s
        self.counters = Counters()
        self._most_slow = _SLOW_PER_QUICK * size
        self._inbox: deque[Job] = deque()
        self._queue: deque[Job] = deque()
        self._slow_queue: deque[Job] = deque()
        self._workers: dict[int, Worker] = {}
        self._nursery: Nursery | None = None
        self._numbers = 0
        self._usual_s = 0.001
        self._results = Results()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._asleep = False
        self._closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- called from any thread

    def submit(self, job: Job) -> None:
        """Queue a job. Raises HookError when the dispatcher is closed."""
        with self._lock:
            if self._closed:
                raise HookError(self.settings.function, "was called after the run's rewards were closed")
            self._inbox.append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="reward-workers", daemon=True)
                self._thread.start()
        if self._asleep:
            self._ring()

    def close(self) -> None:
        """End and reap every process; jobs that still run come out as crashed."""
        with self._lock:
            self._closed = True
            thread = self._thread
        self._ring()
        if thread is not None:
            thread.join()
        else:  # nothing was ever asked; the thread closes them otherwise
            for part in (self._selector, self._wake, self._woken):
                part.close()

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in list(self._workers.values()) if worker.pid is not None]

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it has ended
            self._wake.send(b"!")

    # -- the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step()
        except BaseException:
            logger.exception(
                "the thread that hands jobs to %s ended; its jobs count as crashed", self.settings.function
            )
            raise
        finally:
            with self._lock:
                self._closed = True
            self._end()

    def _step(self) -> None:
        self._asleep = True
        timeout = 0.0 if self._inbox else self._next_deadline()
        events = self._selector.select(timeout)
        self._asleep = False
        for key, mask in events:
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            elif isinstance(key.data, Nursery):
                self._hear_nursery(key.data)
            else:
                self._hear_worker(key.data, mask)
        while self._inbox:
            self._queue.append(self._inbox.popleft())
        self._look_at_clock()
        self._hand_out()
        self._results.tell()

    def _hear_nursery(self, nursery: Nursery) -> None:
        if nursery is not self._nursery:
            return
        if not nursery.is_ready:
            try:
                nursery.read_greeting()
            except HookError as error:
                self._fail_all(error)
            return
        notes = nursery.read_notes()
        if notes is None:
            self._lose_nursery()
            return
        for what, number, value in notes:
            worker = self._workers.get(number)
            if worker is None:
                continue
            if what == b"P":
                worker.pid, worker.head_since = value, time.monotonic()
                continue
            self._hear_worker(worker, selectors.EVENT_READ)  # what it said before it ended
            if self._workers.get(number) is worker:
                self._lose(worker)

    def _hear_worker(self, worker: Worker, mask: int) -> None:
        if self._workers.get(worker.number) is not worker:
            return
        alive = worker.flush() if mask & selectors.EVENT_WRITE else True
        if mask & selectors.EVENT_READ:
            replies, here = worker.read()
            for reply in replies:
                self._take_reply(worker, reply)
            alive = alive and here
        if self._workers.get(worker.number) is not worker:
            return
        if not alive:
            self._lose(worker)
        elif not worker.out:
            self._selector.modify(worker.socket, selectors.EVENT_READ, worker)

    def _take_reply(self, worker: Worker, reply: dict[str, Any]) -> None:
        if not worker.jobs or worker.jobs[0].number != reply["id"]:
            return  # of a job that was given to another worker
        job, now = worker.jobs.popleft(), time.monotonic()
        self._usual_s += _USUAL_SHARE * (now - worker.head_since - self._usual_s)
        worker.head_since = now
        worker.cpu_s += reply["cpu_s"]
        self.counters.cpu_s += reply["cpu_s"]
        if "raised" in reply:
            self._results.settle(job, HookError(self.settings.function, f"raised {reply['raised']}"))
        else:
            self._results.settle(job, Outcome(value=reply["value"]))
        if worker.is_slow and not worker.jobs:
            if (following := next_job(self._slow_queue)) is not None:
                self._give(worker, following)
            else:
                self._kill(worker)  # the kernel lets nobody undo its slowness

    # -- time

    def _slice(self) -> float:
        """Seconds that a job may keep others waiting: what usual jobs need several times over."""
        return min(max(self.slice_s, _USUAL_SLICES * self._usual_s), self.timeout_s)

    def _due(self, worker: Worker) -> float:
        """When its running job has to be looked at (monotonic seconds)."""
        share_s = self._slice() if not worker.is_slow and self._others_wait(worker) else self.timeout_s
        return max(worker.head_since + share_s, worker.look_at)

    def _next_deadline(self) -> float | None:
        now = time.monotonic()
        if self._nursery is not None and not self._nursery.is_ready:
            return max(0.0, self._nursery.started_at + self.start_timeout_s - now)
        due = min((self._due(worker) for worker in self._workers.values() if worker.jobs), default=None)
        return None if due is None else max(0.001, due - now)

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self._nursery is not None and not self._nursery.is_ready:
            if now - self._nursery.started_at > self.start_timeout_s:
                problem = f"its worker process was not ready within {self.start_timeout_s:g} s"
                self._fail_all(HookError(self.settings.function, problem))
            return
        for worker in list(self._workers.values()):
            if not worker.jobs or now < self._due(worker):
                continue
            worker.look_at = now + _LOOK_S
            if worker.pid is None:
                if now - worker.head_since > self.start_timeout_s:
                    self._lose_nursery()  # it was stopped
                    return
            elif worker.has_used_up(self.timeout_s, now, self.timeout_s * WALL_FACTOR):
                self._time_out(worker, now)
            elif not worker.is_slow and self._others_wait(worker) and worker.has_used_up(self._slice(), now, math.inf):
                self._let_others_past(worker)

    def _time_out(self, worker: Worker, now: float) -> None:
        self.counters.timeouts += 1
        self.counters.cpu_s += min(now - worker.head_since, self.timeout_s)
        logger.warning("%s took longer than %g s; its worker was killed", self.settings.function, self.timeout_s)
        self._results.settle(worker.jobs.popleft(), Outcome(timed_out=True))
        self._kill(worker)

    def _others_wait(self, worker: Worker) -> bool:
        return len(worker.jobs) > 1 or bool(self._queue)

    def _let_others_past(self, worker: Worker) -> None:
        self.counters.slowed += 1
        job = worker.jobs.popleft()
        if sum(other.is_slow for other in self._workers.values()) >= self._most_slow:
            self.counters.restarts += 1
            self._slow_queue.append(job)
            self._kill(worker)
            return
        self._queue.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        worker.jobs.append(job)
        worker.is_slow = True
        assert self._nursery is not None
        self._nursery.command(b"S", worker.number)

    # -- handing out

    def _hand_out(self) -> None:
        if not self._queue and not self._slow_queue:
            return
        if self._nursery is None and not self._start_nursery():
            return
        assert self._nursery is not None
        if not self._nursery.is_ready:
            return
        slow = sum(worker.is_slow for worker in self._workers.values())
        while slow < self._most_slow and (job := next_job(self._slow_queue)) is not None:
            if (worker := self._fork()) is None:
                self._slow_queue.appendleft(job)
                return
            slow += 1
            worker.is_slow = True
            self._nursery.command(b"S", worker.number)
            self._give(worker, job)
        quick = [worker for worker in self._workers.values() if not worker.is_slow]
        wanted = min(self.size, len(self._queue) + sum(bool(worker.jobs) for worker in quick))
        spares = 1 if self.counters.slowed else 0
        for _ in range(wanted + spares - len(quick)):
            if (worker := self._fork()) is None:
                return
            quick.append(worker)
        self._spread(quick)

    def _spread(self, quick: list[Worker]) -> None:
        """Give each worker as many jobs as keep it busy while replies travel, the least busy first."""
        ahead = min(max(2, math.ceil(_AHEAD_S / max(self._usual_s, 1e-6))), _MOST_AHEAD)
        late = time.monotonic() - max(_LATE_S, 2 * self._usual_s)
        busy = sum(bool(worker.jobs) for worker in quick)
        for depth in range(ahead):
            for worker in quick:
                if len(worker.jobs) > depth or (not worker.jobs and busy >= self.size):
                    continue
                if worker.jobs and worker.head_since < late:
                    continue  # what it has in hand may take long
                if (job := next_job(self._queue)) is None:
                    break
                busy += not worker.jobs
                self._give(worker, job, flush=False)
        for worker in quick:
            if worker.out:
                self._send(worker)

    def _give(self, worker: Worker, job: Job, *, flush: bool = True) -> None:
        self._numbers += 1
        job.number = self._numbers
        if not worker.jobs:
            worker.head_since = time.monotonic()
        worker.jobs.append(job)
        worker.out += f"[{job.number}, {self.timeout_s}, {job.args}]\n".encode()
        if flush:
            self._send(worker)

    def _send(self, worker: Worker) -> None:
        if not worker.flush():
            self._lose(worker)
        elif worker.out:
            self._selector.modify(worker.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    # -- processes

    def _start_nursery(self) -> bool:
        try:
            self._nursery = Nursery(self.settings)
        except HookError as error:
            self._fail_all(error)
            return False
        self._selector.register(self._nursery.socket, selectors.EVENT_READ, self._nursery)
        return True

    def _fork(self) -> Worker | None:
        assert self._nursery is not None
        self._numbers += 1
        try:
            worker = self._nursery.fork(self._numbers)
        except BlockingIOError:
            return None  # it is behind with what it was told; its next note comes here again
        except OSError:
            self._lose_nursery()
            return None
        self._workers[worker.number] = worker
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)
        return worker

    def _kill(self, worker: Worker) -> None:
        """End a worker whose first job is settled or queued elsewhere; the others go back to the queue."""
        if self._nursery is not None:
            self._nursery.command(b"K", worker.number)
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        self._queue.extendleft(reversed(worker.jobs))
        worker.jobs.clear()
        if self._workers.pop(worker.number, None) is not None:
            self._selector.unregister(worker.socket)
            worker.close()

    def _lose(self, worker: Worker) -> None:
        """A worker ended by itself: its running job is tried once more, since something else may have ended it."""
        if worker.jobs:
            job = worker.jobs[0]
            job.attempts += 1
            if job.attempts >= _ATTEMPTS:
                worker.jobs.popleft()
                self.counters.crashes += 1
                logger.warning(
                    "%s ended its worker process %d times on the same job", self.settings.function, _ATTEMPTS
                )
                self._results.settle(job, Outcome(crashed=True))
        self._kill(worker)

    def _lose_nursery(self) -> None:
        nursery, self._nursery = self._nursery, None
        for worker in list(self._workers.values()):
            self._lose(worker)
        if nursery is not None:
            self._selector.unregister(nursery.socket)
            nursery.end()

    def _fail_all(self, error: MilesError) -> None:
        """No worker can be had: every job ends with the reason; a later one tries again."""
        for job in (*self._queue, *self._slow_queue):
            self._results.settle(job, error)
        self._queue.clear()
        self._slow_queue.clear()
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            self._selector.unregister(nursery.socket)
            nursery.end()

    def _end(self) -> None:
        crashed = Outcome(crashed=True)
        jobs = [job for worker in self._workers.values() for job in worker.jobs]
        for job in (*jobs, *self._queue, *self._slow_queue, *self._inbox):
            self._results.settle(job, crashed)
        self._results.tell()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        if self._nursery is not None:
            self._nursery.end()
        self._selector.close()
        self._wake.close()
        self._woken.close()
