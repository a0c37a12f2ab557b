"""The suites, and the calls by which a test module says which of them runs it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Test modules that want the same machine."""

    name: str
    gpus: int
    """GPUs of one host that must be visible; 0 for a suite that runs on a CPU."""
    needs: str
    """The machine, in words."""
    holds: str
    """What belongs into it."""


FAST = Suite(
    "stage-a-cpu",
    gpus=0,
    needs="2 CPU cores, 8 GB",
    holds="tests/fast without its tests marked slow: on every change",
)
SLOW = Suite(
    "stage-b-cpu",
    gpus=0,
    needs="2 CPU cores, 16 GB",
    holds="tests/e2e, and the tests of tests/fast marked slow: after a change of the loop",
)
ONE_GPU = Suite(
    "stage-b-1-gpu-h200",
    gpus=1,
    needs="1 NVIDIA H200",
    holds="tests/fast-gpu: kernels, the trainer and the engine on a GPU",
)
TWO_GPUS = Suite(
    "stage-c-2-gpu-h200",
    gpus=2,
    needs="2 NVIDIA H200 of one host",
    holds="tests of tests/fast-gpu and tests/e2e that want two GPUs: tensor parallelism, broadcasts over NCCL",
)

SUITES = {suite.name: suite for suite in (FAST, SLOW, ONE_GPU, TWO_GPUS)}


def register_cpu_ci(
    *,
    est_time: float,
    suite: str,
    labels: Sequence[str] = (),
    nightly: bool = False,
    disabled: str | None = None,
) -> None:
    """Have this module run in a suite of CPUs.

    The call stands at module level with literal values: `tests.ci.collect` reads it from the source, without importing
    the module, and the call itself does nothing.

    Args:
        est_time: seconds the module takes on the suite's machine; shards are balanced by it, and a module that takes
            some times longer is stopped.
        suite: a name of `SUITES`.
        labels: words by which `--label` picks modules.
        nightly: run only where `--nightly` is given.
        disabled: why the module does not run at present; None runs it.
    """


def register_cuda_ci(
    *,
    est_time: float,
    suite: str,
    labels: Sequence[str] = (),
    nightly: bool = False,
    disabled: str | None = None,
) -> None:
    """Have this module run in a suite of GPUs; the arguments are those of `register_cpu_ci`."""
