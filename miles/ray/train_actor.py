"""`TrainActor`: one trainer rank in its own process, around the worker of a training backend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.backends.weight_sync.records import TransportName
from miles.config.resources import offloads_train, parity_bounds, parity_only_warns, weights_transport
from miles.config.schema import RunConfig
from miles.core.plugins import load_function
from miles.core.ports import Metrics
from miles.core.run_facts import EngineEndpoint
from miles.core.train_batch import TrainBatch
from miles.ray.actor_process import enter
from miles.utils.hf import context_length
from miles.utils.imports import without_collection
from miles.utils.kernel_caches import keep_kernels_in

if TYPE_CHECKING:
    from miles.backends.weight_sync.transport import Transport

logger = logging.getLogger(__name__)


class TrainActor:
    """Rank `rank` of the trainer. Collective methods are called on all ranks together."""

    def __init__(self, run_dir: str, rank: int, gpus: tuple[str, ...] = ()) -> None:
        """`gpus` are those it may use, as CUDA_VISIBLE_DEVICES names them."""
        self._log_path = enter(f"trainer-{rank}", run_dir, gpus=gpus, blocks=True)
        self._run_dir, self._rank, self._gpus = run_dir, rank, gpus
        self._learned = False
        self._transports: dict[TransportName, Transport] = {}
        self._probed: list[list[float]] = []

    def start(
        self, config: RunConfig, worker_path: str, codec_path: str, init: Mapping[str, Any], load_folder: str | None
    ) -> None:
        """Build the worker named by `worker_path`, resume it from `load_folder` if given, and have it compile.

        Where it takes turns with engines on its GPU, it then leaves: they size their KV cache by what they find free, and
        memory of the CPU that it moves to takes seconds to get.
        """
        self._config, self._world_size = config, int(init["world_size"])
        if config.cluster.kernel_cache_dir:
            keep_kernels_in(config.cluster.kernel_cache_dir)
        with without_collection():
            make_worker, make_codec = load_function(worker_path), load_function(codec_path)
        self._worker: Any = make_worker(config, rank=self._rank, **init)
        self._codec: Any = make_codec()
        if load_folder:
            self._worker.load(load_folder)
        self._worker.warm_up()
        if offloads_train(config):
            self._worker.offload()

    def train(self, batch: TrainBatch, step: int) -> Metrics:
        """All optimizer steps of one batch."""
        metrics: Metrics = self._worker.train(batch, step)
        self._learned |= metrics.get("train/lr", 0.0) > 0 and metrics.get("train/grad_norm", 0.0) > 0
        return metrics

    def offload(self) -> None:
        """Move model and optimizer out of the memory of their device."""
        self._worker.offload()

    def onload(self) -> None:
        """Move them back."""
        self._worker.onload()

    def save(self, folder: str) -> None:
        """Write this rank's part of the trainer's state into `folder`."""
        self._worker.save(folder)

    def copy_state(self) -> None:
        """Copy what `save` would write now into memory."""
        self._worker.copy_state()

    async def write_copy(self, folder: str) -> float:
        """Write the copy into `folder` in a thread of its own, while this actor does other work; returns the seconds."""
        return await asyncio.to_thread(self._worker.write_copy, folder)

    async def export_hf(self, saved: str, folder: str) -> None:
        """Write the model that all ranks saved into `saved` in Hugging Face format into `folder`, in a thread of its own."""
        await asyncio.to_thread(self._worker.export_hf, saved, folder)

    async def send_weights(
        self, engines: Sequence[EngineEndpoint], version: int, transport: TransportName | None = None
    ) -> Any:
        """Send all weights to the engines; collective, rank 0 sends and returns a `SentWeights`.

        `transport` None is the run's own. An update that fails still takes part in every collective, so that the ranks
        can go on together; rank 0 raises, and the others log what it told them.
        """
        chosen = self._transport(transport or weights_transport(self._config))
        expected_nbytes = self._worker.expected_weights()
        named_tensors = self._worker.hf_weights()
        try:
            if self._rank == 0:
                sent = await chosen.send(
                    named_tensors, engines, version=version, expected_nbytes=expected_nbytes, learned=self._learned
                )
                self._learned = False
                return sent
            if failure := chosen.follow(named_tensors, engines):
                logger.error("weights %d were not sent: %s", version, failure)
            return None
        finally:
            for _ in named_tensors:
                pass

    def _transport(self, name: TransportName) -> Transport:
        from miles.backends.weight_sync.ranks import TrainerRanks
        from miles.backends.weight_sync.transports import build_transport

        if name not in self._transports:
            weights = self._config.weights
            self._transports[name] = build_transport(
                name,
                codec=self._codec,
                bucket_bytes=weights.buffer_size,
                disk_folder=Path(weights.disk_dir or f"{self._run_dir}/weights"),
                model_folder=Path(self._config.model.hf_checkpoint),
                ranks=TrainerRanks(self._rank, self._world_size, self._gpus),
            )
        return self._transports[name]

    async def ask_probes(self, engine: EngineEndpoint) -> None:
        """Have `engine` score the probe sequences, and keep its answer."""
        from miles.backends.weight_sync.probes import score_on_engine

        self._probed = await score_on_engine(engine, self._probe_sequences(), self._probe_temperature(engine))

    def check_probes(self, engine: EngineEndpoint, version: int) -> Metrics:
        """Score the probe sequences here, and compare; collective. Raises ParityError above the bounds."""
        from miles.backends.training_utils.parity import ParityBounds
        from miles.backends.weight_sync.probes import check_probes

        return check_probes(
            engine,
            self._probed,
            self._worker.score,
            self._probe_sequences(),
            temperature=self._probe_temperature(engine),
            bounds=ParityBounds(*parity_bounds(self._config), parity_only_warns(self._config)),
            version=version,
        )

    def _probe_sequences(self) -> list[list[int]]:
        from miles.backends.weight_sync.probes import probe_sequences

        limit = context_length(self._config.model.hf_checkpoint)
        return probe_sequences(self._config.parity.num_probes, self._worker.vocab_size, limit)

    def _probe_temperature(self, engine: EngineEndpoint) -> float:
        """SGLang's log-probs of a prompt are those of temperature 1."""
        return 1.0 if engine.kind == "sglang" else self._config.rollout.temperature

    def close(self) -> None:
        """Give up what transports hold, and leave the process group."""
        for transport in self._transports.values():
            transport.close()
        self._worker.close()
