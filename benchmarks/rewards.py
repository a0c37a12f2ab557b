"""How many verdicts a second the `math` reward gives, and how long an ordinary answer waits behind hostile ones.

    python benchmarks/rewards.py [--seconds 8]

Ordinary answers: made with random numbers, in the share that word problems and competitions have, at the end of a
reasoning text of 3,000 characters; half of them wrong; one in a thousand needs a worker process. In the second row 0.5 %
of the stream is hostile: power towers, 100 kB of braces, giant factorials, integrals that sympy does not finish.
The last line is one verdict that a worker cannot give: how long until it is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import time
from collections.abc import Callable, Iterator

from miles.rollout.rm_hub.math_rewards import MathGrader

IN_FLIGHT = 64
THOUGHT = "We compute step by step, and $x_{1} = \\frac{3}{4}$ gives {the next} term. " * 40

Problem = tuple[str, str]


def _integer(r: random.Random) -> Problem:
    n = r.randrange(-200, 5000)
    return str(n), str(n)


def _grouped(r: random.Random) -> Problem:
    n = r.randrange(1000, 10**7)
    return f"{n:,}", str(n)


def _fraction(r: random.Random) -> Problem:
    top, bottom, k = r.randrange(1, 99), r.randrange(2, 99), r.randrange(1, 5)
    return rf"\frac{{{k * top}}}{{{k * bottom}}}", rf"\frac{{{top}}}{{{bottom}}}"


def _decimal(r: random.Random) -> Problem:
    n = r.randrange(1, 10000)
    return rf"{n / 100:.2f}", rf"\frac{{{n}}}{{100}}"


def _unit(r: random.Random) -> Problem:
    n = r.randrange(1, 500)
    return rf"{n}\text{{ cm}}", str(n)


def _root(r: random.Random) -> Problem:
    a, b = r.randrange(2, 12), r.choice((2, 3, 5, 7))
    return rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}"


def _polynomial(r: random.Random) -> Problem:
    a, b = r.randrange(1, 9), r.randrange(1, 9)
    return rf"x^2+{a + b}x+{a * b}", rf"(x+{a})(x+{b})"


def _pair(r: random.Random) -> Problem:
    a, b = r.randrange(99), r.randrange(99)
    return f"({a}, {b})", rf"\left({a},{b}\right)"


def _interval(r: random.Random) -> Problem:
    a = r.randrange(9)
    return rf"[{a},\infty)", rf"x \ge {a}"


def _matrix(r: random.Random) -> Problem:
    a, b, c, d = (r.randrange(-9, 9) for _ in range(4))
    cells = rf"{a} & {b} \\ {c} & {d}"
    return rf"\begin{{bmatrix}} {cells} \end{{bmatrix}}", rf"\begin{{pmatrix}}{cells}\end{{pmatrix}}"


def _pi(r: random.Random) -> Problem:
    n = r.randrange(2, 99)
    return rf"\frac{{{n}\pi}}{{6}}", rf"{n} \cdot \frac{{\pi}}{{6}}"


def _choice(r: random.Random) -> Problem:
    letter = r.choice("ABCDE")
    return rf"\textbf{{({letter})}}\ {r.randrange(99)}", letter


def _maximum(r: random.Random) -> Problem:
    a, b = r.randrange(99), r.randrange(99)
    return rf"\max({a}, {b})", str(max(a, b))


KINDS: tuple[tuple[float, Callable[[random.Random], Problem]], ...] = (
    (0.45, _integer), (0.05, _grouped), (0.14, _fraction), (0.06, _decimal), (0.05, _unit), (0.05, _root), (0.05, _polynomial),
    (0.04, _pair), (0.02, _interval), (0.02, _matrix), (0.03, _pi), (0.039, _choice), (0.001, _maximum),
)  # fmt: skip


def hostile(r: random.Random) -> Problem:
    """An answer that a naive grader hangs on, and a short label."""
    n = r.randrange(5, 9)
    texts = (
        rf"{n}^{{{n}^{{{n}^{{{n}^{n}}}}}}}",
        "{" * 50_000 + "}" * 50_000,
        rf"{n}00000000!",
        rf"\binom{{{n}000000000}}{{500000000}}",
        r"\sqrt{" * 400 + "x" + "}" * 400,
        rf"\int_0^\infty \frac{{\sin x}}{{x({n}+x^4)}} e^{{-x^2}} dx",
        f"x^{{{n}{'9' * 400}}}",
    )
    return r.choice(texts), str(n)


def stream(r: random.Random, share_hostile: float) -> Iterator[tuple[str, str, bool]]:
    """(response, label, whether it is ordinary) without end."""
    makers = [make for _, make in KINDS]
    weights = [weight for weight, _ in KINDS]
    while True:
        is_ordinary = r.random() >= share_hostile
        make = r.choices(makers, weights)[0] if is_ordinary else hostile
        answer, label = make(r)
        if is_ordinary and r.random() < 0.5:
            label = make(r)[1]
        yield rf"{THOUGHT} Therefore the answer is \boxed{{{answer}}}.", label, is_ordinary


async def measure(seconds: float, share_hostile: float) -> str:
    """One row: verdicts a second of wall and of processor time, and percentiles of ordinary latencies."""
    grader = MathGrader(timeout_s=30, num_workers=2)
    await grader.grade(r"\boxed{\max(3, 6)}", "6")  # starts a worker
    items = stream(random.Random(0), share_hostile)
    latencies: list[float] = []
    counts = {True: 0, False: 0}
    longest = 0.0
    cpu, start = _cpu_s(), time.perf_counter()
    deadline = start + seconds

    async def work() -> None:
        nonlocal longest
        while (now := time.perf_counter()) < deadline:
            response, label, is_ordinary = next(items)
            await grader.grade(response, label)
            took = time.perf_counter() - now
            counts[is_ordinary] += 1
            if is_ordinary:
                latencies.append(took)
            else:
                longest = max(longest, took)
            await asyncio.sleep(0)

    await asyncio.gather(*(work() for _ in range(IN_FLIGHT)))
    wall = min(time.perf_counter() - start, seconds)
    metrics = grader.metrics()
    grader.close()
    total, used = sum(counts.values()), _cpu_s() - cpu
    latencies.sort()
    p50, p99 = (1000 * latencies[int(len(latencies) * q)] for q in (0.5, 0.99))
    return (
        f"{share_hostile:8.1%} {total:9d} {total / wall:10.0f} {total / used:10.0f} {p50:9.2f} {p99:9.2f} "
        f"{1000 * latencies[-1]:9.1f} {longest:10.2f} {metrics['rollout/reward_timeouts']:9.0f}"
    )


async def measure_stubborn() -> str:
    """Seconds of wall and processor time for a label that sympy does not finish."""
    grader = MathGrader(timeout_s=30, num_workers=2)
    await grader.grade(r"\boxed{\max(3, 6)}", "6")
    cpu, start = _cpu_s(), time.perf_counter()
    await grader.grade(r"\boxed{\frac{1}{3}}", r"\int_0^\infty \frac{\sin x}{x(1+x^4)} e^{-x^2} dx")
    wall = time.perf_counter() - start
    timeouts = grader.metrics()["rollout/reward_timeouts"]
    grader.close()
    return f"an integral that sympy does not finish: {wall:.2f} s of wall, at most {_cpu_s() - cpu:.2f} s of CPU, {timeouts:.0f} kill"


def _cpu_s() -> float:
    """Processor seconds of this process and of its ended children: the grader is closed before it is read again."""
    return sum(
        u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=8.0)
    seconds = parser.parse_args().seconds
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {IN_FLIGHT} in flight, {seconds:g} s a row")
    print(" hostile  verdicts     /s wall     /s CPU  p50 (ms)  p99 (ms)  max (ms)  hostile(s)  timeouts")
    for share in (0.0, 0.005):
        print(asyncio.run(measure(seconds, share)), flush=True)
    print(asyncio.run(measure_stubborn()))


if __name__ == "__main__":
    main()
