from __future__ import annotations

import asyncio
import time

import pytest
from router_servers import Seen, Worker, answer_when_open, until

from miles.utils.http_utils import MOST_BREAKS


def test_the_worker_with_the_fewest_requests_in_flight_is_next(router, make_worker) -> None:
    slow, quick = make_worker("slow", answer_when_open), make_worker("quick")
    router.add(slow.url)
    stuck = [router.start() for _ in range(3)]
    until(lambda: slow.in_flight == 3)
    router.add(quick.url)
    assert [router.call("POST", "/generate", b"{}").json["worker"] for _ in range(5)] == ["quick"] * 5
    slow.open_gate()
    assert [answer.result().json["worker"] for answer in stuck] == ["slow"] * 3


def test_load_spreads_evenly(router, make_worker) -> None:
    workers = [make_worker(name, answer_when_open) for name in "abc"]
    router.add(*(worker.url for worker in workers))
    answers = [router.start() for _ in range(12)]
    until(lambda: sum(worker.in_flight for worker in workers) == 12)
    assert [worker.in_flight for worker in workers] == [4, 4, 4]
    assert [entry["in_flight"] for entry in router.workers().values()] == [4, 4, 4]
    for worker in workers:
        worker.open_gate()
    assert all(answer.result().status == 200 for answer in answers)


def test_idle_workers_take_turns(router, make_worker) -> None:
    router.add(*(make_worker(name).url for name in "abc"))
    assert [router.call("GET", "/x").json["worker"] for _ in range(6)] == ["a", "b", "c"] * 2


def test_hold_keeps_requests_back_until_release(router, make_worker) -> None:
    worker = make_worker()
    router.add(worker.url)
    assert router.control("POST", "/hold").json == {"held": True, "in_flight": 0}
    waiting = [router.start(body=b"%d" % i) for i in range(3)]
    until(lambda: router.control("GET", "/list_workers").json["waiting"] == 3)
    time.sleep(1.0)  # longer than a request waits for a healthy worker
    assert not worker.seen
    assert router.workers()[worker.url]["held"]
    router.control("POST", "/release")
    assert [answer.result().status for answer in waiting] == [200] * 3


def test_wait_idle_tells_when_nothing_is_in_flight(router, make_worker) -> None:
    worker = make_worker("w", answer_when_open)
    router.add(worker.url)
    answer = router.start()
    until(lambda: worker.in_flight == 1)
    assert router.control("POST", "/hold").json["in_flight"] == 1
    busy = router.control("GET", "/wait_idle?timeout_s=0.05")
    assert busy.status == 504
    assert busy.json["in_flight"] == 1
    assert busy.json["error"].startswith("1 requests are still in flight after 0.05 s")
    assert [entry["url"] for entry in busy.json["workers"]] == [worker.url]
    worker.open_gate()
    assert router.control("GET", "/wait_idle?timeout_s=10").json == {"in_flight": 0}
    assert answer.result().status == 200


def test_a_removed_worker_finishes_what_it_has_and_gets_nothing_new(router, make_worker) -> None:
    old, new = make_worker("old", answer_when_open), make_worker("new")
    router.add(old.url)
    first = router.start()
    until(lambda: old.in_flight == 1)
    assert router.control("POST", f"/remove_worker?url={old.url}").json["removed"]
    router.add(new.url)
    assert router.call("GET", "/x").json["worker"] == "new"
    state = router.control("GET", "/list_workers").json
    assert state["urls"] == [new.url]
    assert [(entry["url"], entry["leaving"]) for entry in state["workers"]] == [(new.url, False), (old.url, True)]
    assert router.control("GET", "/wait_idle?timeout_s=0.01").status == 504
    old.open_gate()
    assert first.result().json["worker"] == "old"
    assert router.control("GET", "/wait_idle?timeout_s=5").status == 200
    assert list(router.workers()) == [new.url]


def test_removing_an_unknown_worker_is_no_error(router) -> None:
    gone = router.control("POST", "/remove_worker", {"url": "http://127.0.0.1:1"})
    assert (gone.status, gone.json["removed"]) == (200, False)


# Case F03.
def test_a_request_that_was_not_sent_goes_to_another_worker(router, make_worker, closed_port) -> None:
    dead = f"http://127.0.0.1:{closed_port}"
    worker = make_worker("alive")
    router.add(dead, worker.url)
    assert [router.call("POST", "/generate", b"{}").json["worker"] for _ in range(6)] == ["alive"] * 6
    assert len(worker.seen) == 6
    entry = router.workers()[dead]
    assert not entry["healthy"]
    assert "ClientConnectorError" in entry["last_error"]


def test_a_request_is_offered_to_each_worker_whatever_their_load(patient_router, make_worker, closed_port) -> None:
    router, busy = patient_router, make_worker("busy", answer_when_open)
    router.add(busy.url)
    answers = [router.start()]
    until(lambda: busy.in_flight == 1)
    router.add(f"http://127.0.0.1:{closed_port}")  # none in flight, never quarantined
    answers.append(router.start())
    until(lambda: busy.in_flight == 2)
    busy.open_gate()
    assert [answer.result().status for answer in answers] == [200, 200]


def test_workers_that_all_refuse_are_a_503_when_the_wait_is_over(patient_router, closed_port) -> None:
    patient_router.add(f"http://127.0.0.1:{closed_port}")
    answer = patient_router.call("POST", "/generate", b"{}")
    assert answer.status == 503
    assert "no worker accepts connections" in answer.json["error"]
    assert "ClientConnectorError" in answer.json["workers"][0]["last_error"]
    assert answer.json["workers"][0]["healthy"]


async def hang_up(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def break_off(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{")
    writer.close()


@pytest.mark.parametrize("target", ["/flush_cache", "/generate/../x", "/v1/embeddings"])
def test_a_request_that_may_have_been_received_is_never_sent_twice(router, make_worker, target) -> None:
    workers = [make_worker("a", hang_up), make_worker("b", hang_up)]
    router.control("POST", "/add_worker", {"url": workers[0].url, "id": "engine-0"})
    router.add(workers[1].url)
    answer = router.call("POST", target, b"{}")
    assert answer.status == 502
    assert sum(len(worker.seen) for worker in workers) == 1
    assert answer.json["worker"] == workers[0].url
    assert answer.json["id"] == "engine-0"
    assert f"worker {workers[0].url} (engine-0) gave no answer to POST {target}" in answer.json["error"]
    assert "not repeated" in answer.json["error"]


@pytest.mark.parametrize("target", ["/generate", "/v1/chat/completions"])
@pytest.mark.parametrize("how", [hang_up, break_off])
def test_a_generation_whose_worker_dies_goes_to_another_one(patient_router, make_worker, target, how) -> None:
    dies, lives = make_worker("dies", how), make_worker("lives")
    patient_router.add(dies.url, lives.url)
    answers = [patient_router.call("POST", target, b'{"rid": 1}') for _ in range(4)]
    assert [answer.json["worker"] for answer in answers] == ["lives"] * 4
    assert dies.seen
    assert [seen.body for seen in lives.seen] == [b'{"rid": 1}'] * 4
    assert patient_router.control("GET", "/list_workers").json["in_flight"] == 0


def test_a_generation_waits_for_an_engine_that_is_started_again(patient_router, make_worker) -> None:
    dies = make_worker("dies", hang_up)
    patient_router.add(dies.url)
    answer = patient_router.start()
    until(lambda: dies.seen)
    dies.stop()
    patient_router.control("POST", f"/remove_worker?url={dies.url}")
    patient_router.add(make_worker("new").url)
    assert answer.result().json["worker"] == "new"


def test_a_generation_that_breaks_every_worker_is_given_up(patient_router, make_worker) -> None:
    workers = [make_worker("a", hang_up), make_worker("b", hang_up)]
    patient_router.add(*(worker.url for worker in workers))
    answer = patient_router.call("POST", "/generate", b"{}")
    assert answer.status == 502
    assert sum(len(worker.seen) for worker in workers) == 1 + MOST_BREAKS


# Case F03.
def test_an_error_of_a_worker_is_not_sent_again(router, make_worker) -> None:
    async def refuse(worker: Worker, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 500 Oops\r\ncontent-length: 7\r\n\r\nno luck")

    workers = [make_worker("a", refuse), make_worker("b", refuse)]
    router.add(*(worker.url for worker in workers))
    answer = router.call("POST", "/generate", b"{}")
    assert (answer.status, answer.body) == (500, b"no luck")
    assert sum(len(worker.seen) for worker in workers) == 1


def test_a_worker_that_comes_back_within_the_wait_gets_the_request(router, make_worker) -> None:
    worker = make_worker()
    worker.stop()
    router.add(worker.url)
    answer = router.start()
    until(lambda: router.workers()[worker.url]["consecutive_failures"])
    worker.start()
    assert answer.result().status == 200
    assert len(worker.seen) == 1


def test_without_workers_the_answer_is_a_503_that_says_what_to_do(router) -> None:
    started = time.monotonic()
    answer = router.call("POST", "/generate", b"{}")
    assert answer.status == 503
    assert 0.5 < time.monotonic() - started < 5
    assert answer.json["workers"] == []
    assert "no worker; start an engine and register it with POST /add_worker?url=" in answer.json["error"]


def test_with_sick_workers_only_the_503_lists_their_errors(router, make_worker) -> None:
    sick = make_worker("sick", health="503 Sick")
    router.add(sick.url)
    until(lambda: not router.workers()[sick.url]["healthy"])
    answer = router.call("POST", "/generate", b"{}")
    assert answer.status == 503
    assert "none of the 1 workers is healthy" in answer.json["error"]
    assert answer.json["workers"][0]["last_error"] == "GET /health answered 503"
    assert not sick.seen


def test_a_request_waits_for_the_first_worker(router, make_worker) -> None:
    answer = router.start()
    until(lambda: router.control("GET", "/list_workers").json["waiting"] == 1)
    router.add(make_worker("late").url)
    assert answer.result().json["worker"] == "late"


def test_a_sick_worker_is_left_out_and_comes_back_when_it_answers(router, make_worker) -> None:
    sick, well = make_worker("sick", health="500 Sick"), make_worker("well")
    router.add(sick.url, well.url)
    until(lambda: not router.workers()[sick.url]["healthy"])
    assert {router.call("GET", "/x").json["worker"] for _ in range(4)} == {"well"}
    sick.health = "200 OK"
    until(lambda: router.workers()[sick.url]["healthy"])
    assert {router.call("GET", "/x").json["worker"] for _ in range(4)} == {"sick", "well"}
    assert router.workers()[sick.url]["last_error"] == ""
    assert router.workers()[sick.url]["failed_checks"] == 0


# Case F03.
def test_64_silent_workers_are_found_out_together(router, make_worker) -> None:
    silent = make_worker("silent", health=None, host="0.0.0.0")
    urls = [f"http://127.0.0.{i}:{silent.port}" for i in range(2, 66)]
    started = time.monotonic()
    router.add(*urls)
    until(lambda: not any(entry["healthy"] for entry in router.workers().values()))
    assert len(router.workers()) == 64
    # Two rounds of 1 s make the threshold; one after another they would take 128 s.
    assert time.monotonic() - started < 10
    assert router.workers()[urls[0]]["last_error"] == "GET /health: no answer in 1 s"
