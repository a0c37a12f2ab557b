from __future__ import annotations

import asyncio

import pytest

from miles.router.workers import NoWorkerError, WorkerPool


def _pool(*urls: str, threshold: int = 2, max_connections: int = 100) -> WorkerPool:
    pool = WorkerPool(threshold, max_connections)
    for url in urls:
        pool.add(url)
    return pool


def test_adding_a_worker_again_ends_its_quarantine() -> None:
    async def story() -> None:
        pool = _pool("a")
        (worker,) = pool.workers
        pool.failed(worker, "refused")
        assert worker.healthy
        pool.failed(worker, "refused")
        assert pool.take() is None
        assert not pool.add("a")
        assert pool.take() is worker
        assert (worker.consecutive_failures, worker.last_error) == (0, "")

    asyncio.run(story())


def test_only_failures_in_a_row_count_and_an_answer_does_not_end_quarantine() -> None:
    pool = _pool("a")
    (worker,) = pool.workers
    for _ in range(3):
        pool.failed(worker, "slow")
        pool.answered(worker)
    assert worker.healthy
    pool.failed(worker, "slow")
    pool.failed(worker, "slow")
    pool.answered(worker)  # a long request that was in flight before
    assert not worker.healthy
    pool.recovered(worker)
    assert worker.healthy


def test_failed_health_checks_are_counted_apart_from_failed_requests() -> None:
    pool = _pool("a")
    (worker,) = pool.workers
    pool.failed(worker, "reset")
    pool.failed(worker, "no answer", check=True)
    pool.answered(worker)
    pool.failed(worker, "no answer", check=True)
    assert pool.describe()[0]["failed_checks"] == 2
    pool.recovered(worker)
    assert pool.describe()[0]["failed_checks"] == 0


def test_requests_beyond_the_limit_wait_in_order() -> None:
    async def story() -> None:
        pool = _pool("a", "b", max_connections=2)
        first, second = pool.take(), pool.take()
        assert first
        assert second
        assert pool.take() is None
        served: list[int] = []

        async def request(i: int) -> None:
            worker = await pool.wait(0.01)  # full is no reason to give up
            served.append(i)
            pool.give_back(worker)

        tasks = [asyncio.create_task(request(i)) for i in range(5)]
        await asyncio.sleep(0.05)
        assert served == []
        pool.give_back(first)
        await asyncio.gather(*tasks)
        assert served == [0, 1, 2, 3, 4]
        assert pool.in_flight == 1

    asyncio.run(story())


def test_a_cancelled_wait_returns_the_worker_it_was_given() -> None:
    async def story() -> None:
        pool = _pool()
        task = asyncio.create_task(pool.wait(10))
        await asyncio.sleep(0)
        pool.add("a")  # gives the worker to the waiting request ...
        task.cancel()  # ... whose client leaves before it runs
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.in_flight == 0
        assert await pool.idle(0.1)

    asyncio.run(story())


def test_patience_ends_only_while_no_worker_is_healthy() -> None:
    async def story() -> None:
        pool = _pool("a")
        (worker,) = pool.workers
        pool.hold()
        task = asyncio.create_task(pool.wait(0.02))
        await asyncio.sleep(0.08)
        assert not task.done()
        pool.failed(worker, "gone")
        pool.failed(worker, "gone")
        await asyncio.sleep(0.05)
        assert not task.done()
        pool.release()
        with pytest.raises(NoWorkerError, match="none of the 1 workers is healthy"):
            await asyncio.wait_for(task, 1)

    asyncio.run(story())


def test_a_leaving_worker_that_is_added_again_keeps_its_count() -> None:
    async def story() -> None:
        pool = _pool("a")
        worker = pool.take()
        assert worker
        assert pool.remove("a")
        assert pool.take() is None
        pool.add("a")
        assert pool.workers == [worker]
        assert worker.in_flight == 1
        pool.give_back(worker)
        assert pool.workers == [worker]

    asyncio.run(story())
