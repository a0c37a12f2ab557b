"""`TrainActor`: one trainer rank in its own process, around the worker of a training backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.config.schema import RunConfig
from miles.core.plugins import load_function
from miles.core.ports import Metrics
from miles.core.run_facts import EngineEndpoint
from miles.core.train_batch import TrainBatch
from miles.ray.actor_process import enter
from miles.utils.hf import context_length


class TrainActor:
    """Rank `rank` of the trainer. Collective methods are called on all ranks together."""

    def __init__(self, run_dir: str, rank: int) -> None:
        self._log_path = enter(f"trainer-{rank}", run_dir)
        self._rank = rank
        self._learned = False

    def start(
        self, config: RunConfig, worker_path: str, codec_path: str, init: Mapping[str, Any], load_folder: str | None
    ) -> None:
        """Build the worker named by `worker_path`, and resume it from `load_folder` if given."""
        self._config = config
        self._worker: Any = load_function(worker_path)(config, rank=self._rank, **init)
        self._codec: Any = load_function(codec_path)()
        if load_folder:
            self._worker.load(load_folder)

    def train(self, batch: TrainBatch, step: int) -> Metrics:
        """All optimizer steps of one batch."""
        metrics: Metrics = self._worker.train(batch, step)
        self._learned |= metrics.get("train/lr", 0.0) > 0 and metrics.get("train/grad_norm", 0.0) > 0
        return metrics

    def save(self, folder: str) -> None:
        """Write the trainer's state into `folder`."""
        self._worker.save(folder)

    def export_hf(self, folder: str) -> None:
        """Write the model in Hugging Face format into `folder`."""
        self._worker.export_hf(folder)

    async def send_weights(self, engines: Sequence[EngineEndpoint], version: int) -> Any:
        """Send all weights to the engines; collective, rank 0 sends and returns a `SentWeights`."""
        from miles.backends.weight_sync import tensor

        if self._rank != 0:
            for _ in self._worker.hf_weights():
                pass
            return None
        sent = await tensor.send(
            self._worker.hf_weights(),
            engines,
            self._codec,
            version=version,
            bucket_bytes=self._config.weights.buffer_size,
            expected_nbytes=self._worker.expected_weights(),
            learned=self._learned,
        )
        self._learned = False
        return sent

    async def check_probes(self, engine: EngineEndpoint, version: int) -> Metrics:
        """Score the probe sequences here and on `engine`; collective. Raises ParityError above the bounds."""
        from miles.backends.training_utils.parity import ParityBounds
        from miles.backends.weight_sync.probes import check_probes, probe_sequences

        parity = self._config.parity
        return await check_probes(
            engine,
            self._worker.score,
            probe_sequences(
                parity.num_probes, self._worker.vocab_size, context_length(self._config.model.hf_checkpoint)
            ),
            temperature=self._config.rollout.temperature,
            bounds=ParityBounds(parity.max_mean_diff, parity.max_p99_diff),
            version=version,
        )

    def close(self) -> None:
        """Leave the process group."""
        self._worker.close()
