"""The training loop: generate, train, publish the new weights."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles.core.ports import Run


async def train(run: Run) -> None:
    """Publish the first weights, then generate, train, save, publish and evaluate, step by step."""
    await run.weights.publish()
    await run.evaluation.before_training()
    for step in run.steps:
        async with run.placement.for_rollout():
            batch = await run.rollout.generate(step)
        async with run.placement.for_training():
            run.tracker.log(step, await run.trainer.train(batch))
            await run.rollout.commit(batch)
            await run.checkpoints.save_if_due(step)
        await run.weights.publish_if_due(step)
        await run.evaluation.run_if_due(step)


def main(argv: list[str]) -> int:
    """Parse the command line, then run; returns the exit status."""
    from miles.config.cli import parse
    from miles.core.plugins import add_arguments_of

    config = parse(argv, add_arguments_of)
    from miles.launch import run_to_end

    return run_to_end(config, train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
