"""From a configuration to a running `Run`: the one place that knows every concrete class."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config.batch_math import batch_plan
from miles.config.dump import dump
from miles.config.resources import (
    admin_key,
    engine_backend,
    expected_server,
    gpu_plan,
    num_engines,
    num_started_engines,
    num_train_ranks,
    offloaded_by_engines,
    offloads_train,
    only_evaluates,
    resolved_num_cpus,
    resolved_threads,
    weights_transport,
)
from miles.config.schema import RunConfig
from miles.core.plugins import load_hooks
from miles.core.ports import Placement, Run, Tracker
from miles.core.run_facts import RunFacts
from miles.errors import ConfigError, MilesError
from miles.ray.commands import engine_command, router_command
from miles.ray.failure_text import explain_failure, message_of
from miles.ray.interruption import Interruption
from miles.ray.plain_parts import NothingToPublish, NoTrainer, SharedMachine
from miles.ray.start_point import (
    Resumed,
    checkpoints_of,
    differences,
    epochs_in_words,
    resume_notes,
    resume_point,
    steps_left,
    steps_of_epochs,
)
from miles.utils import heartbeat, http_utils, run_record
from miles.utils.disk import write_whole
from miles.utils.engine_facts import read_facts
from miles.utils.run_folder import RESOLVED, make_run_folder
from miles.utils.run_record import RunRecord
from miles.utils.signals import SignalThread
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.events import EventLog
from miles.utils.waits import Waits

if TYPE_CHECKING:
    from miles.backends.weight_sync.publisher import Publisher
    from miles.core.run_facts import EngineEndpoint
    from miles.ray.checkpoints import IntervalCheckpoints
    from miles.ray.engine_hosts import ExternalEnginesPlan, OwnEnginesPlan
    from miles.ray.engine_pool import PoolPlan
    from miles.ray.hang import HangExplainer
    from miles.ray.phases import PhaseLog
    from miles.ray.rollout_manager import ManagerFacts

WORKERS = {"fsdp": "miles.backends.fsdp_utils.worker.FsdpTrainWorker"}
CODECS = {
    "torch": "miles.backends.torch_engine.payload.SharedMemoryCodec",
    "sglang": "miles.backends.sglang_utils.payload.CudaIpcCodec",
}
CLOSE_TIMEOUT_S = 20.0


@asynccontextmanager
async def build(config: RunConfig, run_dir: Path, console: Console, events: EventLog) -> AsyncIterator[Run]:
    """Start everything that `config` asks for; everything ends when the context does, however it ends."""
    from miles.ray import cluster
    from miles.ray.hang import HangExplainer
    from miles.ray.phases import PhaseLog
    from miles.ray.recovery import Recovery
    from miles.ray.rollout_manager import ROLE as MANAGER
    from miles.utils.tracking_utils.tracker import RunTracker

    def long_wait(text: str) -> None:
        console.say(text, style="yellow")
        events.add("long wait", what=text.strip())

    start_from = resume_point(config.checkpoint.load)
    record = _check_start(config, run_dir, start_from, console, events)
    num_cpus = resolved_num_cpus(config)
    cluster.check_placement(
        {"trainer ranks": num_train_ranks(config), "engines": num_started_engines(config)}, num_cpus
    )
    explainer, interruption = HangExplainer(run_dir, events), Interruption()
    waits = Waits(
        report_s=config.cluster.wait_report_s,
        deadline_s=config.cluster.wait_timeout_s,
        report=long_wait,
        explainer=explainer,
    )

    async with AsyncExitStack() as stack:
        stack.push_async_callback(http_utils.aclose)
        stack.enter_context(heartbeat.of_driver(run_dir))
        signals = stack.enter_context(SignalThread())
        await stack.enter_async_context(interruption.around())
        ray_cluster = cluster.Cluster(num_cpus)
        stack.callback(ray_cluster.stop)
        await stack.enter_async_context(ray_cluster.watched())
        await stack.enter_async_context(interruption.noticed())
        _answer_signals(signals, explainer, console, interruption)
        started = await _start(config, run_dir, start_from, waits, stack)
        trainer_pids = await waits.on("trainer", "process ids", _pids_of(started.trainers))
        pids = {**started.facts.pids, **trainer_pids}
        for name in (MANAGER, *trainer_pids):
            ray_cluster.guard(name, pids[name], str(run_dir / "logs" / f"{name}.log"))
        events.add("started", pids=pids)
        tracker = RunTracker(run_dir, config.run.name, console, use_tensorboard=config.run.use_tensorboard)
        stack.callback(tracker.close)
        if config.rollout.num_rollout is None and started.facts.num_prompts is not None:
            console.say(epochs_in_words(config, started.facts.num_prompts, started.num_rollout))
        steps = range(0) if only_evaluates(config) else steps_left(start_from.next_step, started.num_rollout)
        console.start(steps)
        phases = PhaseLog(events)
        run = _assemble(config, run_dir, start_from, started, steps, tracker, record, waits, phases)
        if started.facts.router:
            weights: Any = run.weights
            recovery = Recovery(
                started.manager, weights, waits, console, events, phases, trainer_leaves=offloads_train(config)
            )
            run = replace(run, weights=recovery)
            await stack.enter_async_context(recovery.running())
        await stack.enter_async_context(run.checkpoints.running())
        yield run


def _check_start(
    config: RunConfig, run_dir: Path, start_from: Resumed, console: Console, events: EventLog
) -> RunRecord:
    """Tell where the run starts and what is different now; returns its id and settings. ConfigError when no step is left."""
    for note in [*resume_notes(config.checkpoint.load, start_from), *differences(config, run_dir, start_from)]:
        console.say(note, style="yellow")
        events.add("resume", what=note)
    if config.rollout.num_rollout:
        steps_left(start_from.next_step, config.rollout.num_rollout)
    run_id = start_from.record.id if start_from.record else run_record.new_id()
    events.add("run id", id=run_id)
    return RunRecord(run_id, config.model_dump(mode="json"))


@dataclass(frozen=True)
class Started:
    """The actors of a run, once they have started."""

    manager: Any
    trainers: list[Any]
    facts: ManagerFacts
    num_rollout: int


async def _start(
    config: RunConfig, run_dir: Path, start_from: Resumed, waits: Waits, stack: AsyncExitStack
) -> Started:
    """Start the rollout manager, which starts router and engines, and beside it the trainer ranks."""
    timeout_s = config.cluster.start_timeout_s
    manager, trainers = _spawn(config, run_dir, start_from)
    stack.push_async_callback(_close, [manager, *trainers])
    manager_start = asyncio.ensure_future(
        waits.on("rollout manager", "start", _ref(manager.start.remote()), deadline_s=timeout_s)
    )
    num_rollout = config.rollout.num_rollout
    if num_rollout is None:
        num_rollout = steps_of_epochs(config, (await manager_start).num_prompts)
    trainer_starts = _start_trainers(config, run_dir, start_from, trainers, num_rollout, stack)
    trainer_start = waits.on("trainer", "start", asyncio.gather(*trainer_starts), deadline_s=timeout_s)
    facts, _ = await asyncio.gather(manager_start, trainer_start)
    return Started(manager, trainers, facts, num_rollout)


def _spawn(config: RunConfig, run_dir: Path, start_from: Resumed) -> tuple[Any, list[Any]]:
    """The actors of rollout manager and trainer ranks, which do nothing yet."""
    from miles.ray.actor_process import spawn
    from miles.ray.rollout_manager import ManagerSpec, RolloutManager
    from miles.ray.train_actor import TrainActor

    spec = ManagerSpec(
        run_dir=str(run_dir),
        pool=_pool_plan(config, run_dir),
        start_rollout_id=start_from.next_step,
        state=start_from.rollout,
    )
    gpus = gpu_plan(config).train
    manager = spawn(RolloutManager, config, spec, num_cpus=0)
    return manager, [spawn(TrainActor, str(run_dir), rank, gpus[rank], num_cpus=1) for rank in range(len(gpus))]


def _pool_plan(config: RunConfig, run_dir: Path) -> PoolPlan:
    """What router and engines are, and what becomes of them when they die."""
    from miles.ray.engine_pool import PoolPlan

    token = secrets.token_urlsafe(24)
    return PoolPlan(
        run_dir=str(run_dir),
        num_engines=num_engines(config),
        engines=_external_plan(config) if config.engine.external else _own_plan(config, run_dir, token),
        router_command=tuple(router_command(config)),
        token=token,
        start_timeout_s=config.cluster.start_timeout_s,
        health_check_interval_s=config.router.health_check_interval_s,
        failure_threshold=config.router.failure_threshold,
        restart=config.fault_tolerance.enabled,
        max_restarts=config.fault_tolerance.max_restarts,
    )


def _own_plan(config: RunConfig, run_dir: Path, token: str) -> OwnEnginesPlan:
    from miles.ray.engine_hosts import OwnEnginesPlan

    return OwnEnginesPlan(
        run_dir=str(run_dir),
        command=tuple(engine_command(config)),
        kind=engine_backend(config),
        gpus=gpu_plan(config).engines,
        token=token,
        start_timeout_s=config.cluster.start_timeout_s,
    )


def _external_plan(config: RunConfig) -> ExternalEnginesPlan:
    from miles.ray.engine_hosts import ExternalEnginesPlan

    return ExternalEnginesPlan(
        addresses=tuple(config.engine.external_addrs),
        token=admin_key(config),
        expected=expected_server(config),
        return_timeout_s=config.cluster.start_timeout_s,
    )


def _start_trainers(
    config: RunConfig,
    run_dir: Path,
    start_from: Resumed,
    trainers: list[Any],
    num_rollout: int,
    stack: AsyncExitStack,
) -> list[Awaitable[Any]]:
    """Let every rank load its model and meet the others."""
    # Not named by process id: in a container the next run has the same one, and ranks that meet in the file of a run that
    # was killed wait for its ports for ever.
    rendezvous = run_dir / f".rendezvous-{secrets.token_hex(8)}"
    stack.callback(rendezvous.unlink, missing_ok=True)
    init = {
        "world_size": len(trainers),
        "init_method": f"file://{rendezvous}",
        "total_optimizer_steps": num_rollout * batch_plan(config).num_steps_per_rollout,
        "threads": resolved_threads(config),
        "facts": RunFacts(run_dir=str(run_dir), start_rollout_id=start_from.next_step),
    }
    load_folder = str(start_from.folder / "trainer") if start_from.folder else None
    parts = (WORKERS[config.train.backend], _codec(config))
    return [_ref(trainer.start.remote(config, *parts, init, load_folder)) for trainer in trainers]


def _codec(config: RunConfig) -> str:
    """How the engines want their buckets. Servers that somebody else started say what they are."""
    if config.engine.external and weights_transport(config) == "tensor":
        return CODECS[read_facts(config.engine.external_addrs[0], admin_key(config)).kind]
    return CODECS[engine_backend(config)]


def _assemble(
    config: RunConfig,
    run_dir: Path,
    start_from: Resumed,
    started: Started,
    steps: range,
    tracker: Tracker,
    record: RunRecord,
    waits: Waits,
    phases: PhaseLog,
) -> Run:
    """Join what was started into the parts that the driver knows."""
    from miles.ray.phases import PhasedTrainer
    from miles.ray.rollout_client import IntervalEvaluation, RolloutClient
    from miles.ray.train_group import TrainGroup

    rollout = RolloutClient(started.manager, waits, phases)
    trainer: Any = NoTrainer()
    if started.trainers:
        trainer = TrainGroup(started.trainers, waits, save_hf=config.checkpoint.save_hf)
    placement: Placement = SharedMachine()
    weights: Any = NothingToPublish(start_from.weight_version)
    if started.trainers and started.facts.router:
        placement = _placement(config, started.manager, trainer, lambda: weights.engines, waits)
        weights = _publisher(config, start_from, started.facts, trainer, placement, rollout, tracker, waits)
    trainer = PhasedTrainer(trainer, phases)
    interval = config.eval.interval or (1 if only_evaluates(config) else None)
    return Run(
        steps=steps,
        rollout=rollout,
        trainer=trainer,
        weights=weights,
        evaluation=IntervalEvaluation(rollout, tracker, steps, interval, before=config.eval.before_train),
        checkpoints=_checkpoints(config, run_dir, start_from, steps, trainer, rollout, weights, tracker, record),
        placement=placement,
        tracker=tracker,
    )


def _placement(
    config: RunConfig, manager: Any, trainer: Any, engines: Callable[[], Sequence[EngineEndpoint]], waits: Waits
) -> Placement:
    """Who gives memory up to whom."""
    from miles.ray.recovery import PoolRestarts
    from miles.ray.taking_turns import TAGS, TakingTurns

    given_up = offloaded_by_engines(config)
    if not offloads_train(config) and not given_up:
        return SharedMachine()
    tags = [TAGS[level] for level in given_up]
    return TakingTurns(
        trainer,
        engines,
        waits,
        offload_train=offloads_train(config),
        tags=tags,
        restarts=PoolRestarts(manager, waits),
    )


def _publisher(
    config: RunConfig,
    start_from: Resumed,
    facts: ManagerFacts,
    trainer: Any,
    placement: Placement,
    rollout: Any,
    tracker: Tracker,
    waits: Waits,
) -> Publisher:
    """What brings the trainer's weights to the engines, and proves it."""
    from miles.backends.weight_sync.publisher import ProofPlan, Publisher

    assert facts.router is not None  # who has engines has a router
    proofs = ProofPlan(
        verify=config.weights.verify,
        starts_from_folder=start_from.folder is None,
        reload_interval=config.weights.reload_interval,
        transport=weights_transport(config),
        shares_memory=not config.engine.external,
    )
    return Publisher(
        trainer,
        facts.router,
        facts.engines,
        placement,
        rollout.set_weight_version,
        tracker,
        waits,
        version=start_from.weight_version,
        first_step=start_from.next_step,
        proofs=proofs,
        probe_interval=config.parity.interval if config.parity.enabled else 0,
        mode=config.weights.mode,
        tolerate_deaths=config.fault_tolerance.enabled,
    )


def _checkpoints(
    config: RunConfig,
    run_dir: Path,
    start_from: Resumed,
    steps: range,
    trainer: Any,
    rollout: Any,
    weights: Any,
    tracker: Tracker,
    record: RunRecord,
) -> IntervalCheckpoints:
    """What saves the run, and when."""
    from miles.ray.checkpoints import IntervalCheckpoints

    checkpoint = config.checkpoint
    return IntervalCheckpoints(
        checkpoints_of(config, run_dir),
        checkpoint.save_interval,
        steps,
        trainer=trainer,
        rollout=rollout,
        weights=weights,
        tracker=tracker,
        record=record,
        sentinel=Path(checkpoint.save_trigger_sentinel) if checkpoint.save_trigger_sentinel else None,
        keep_last=checkpoint.keep_last,
        loaded_from=start_from.folder,
        in_background=checkpoint.async_save,
    )


def _answer_signals(
    signals: SignalThread, explainer: HangExplainer, console: Console, interruption: Interruption
) -> None:
    """SIGTERM ends the run as Ctrl-C does, and SIGUSR1 shows the wait graph. Call it after Ray, which takes SIGTERM.

    SIGTERM cancels the run's task rather than raising SIGINT, which a run started in the background ignores.
    """
    loop, run = asyncio.get_running_loop(), asyncio.current_task()
    assert run is not None

    def stop() -> None:
        interruption.tell()
        loop.call_soon_threadsafe(run.cancel)

    signals.answer(
        {
            signal.SIGTERM: stop,
            signal.SIGUSR1: lambda: console.say(explainer.asked()),
        }
    )


async def _pids_of(trainers: list[Any]) -> dict[str, int]:
    """Process ids of the trainer ranks, by name."""
    pids = await asyncio.gather(*(_ref(trainer.__ray_call__.remote(_pid_of)) for trainer in trainers))
    return {f"trainer-{rank}": pid for rank, pid in enumerate(pids)}


def _pid_of(actor: Any) -> int:
    return os.getpid()


async def _ref(ref: Awaitable[Any]) -> Any:
    return await ref


async def _close(actors: list[Any]) -> None:
    """Let every actor end its children; one that does not answer dies with the cluster anyway."""
    closing = [asyncio.ensure_future(_ref(actor.close.remote())) for actor in actors]
    try:
        await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
    finally:  # the watch over the cluster may cancel this wait
        for task in closing:
            if task.done() and not task.cancelled():
                task.exception()
            task.cancel()


def run_to_end(config: RunConfig, loop: Callable[[Run], Awaitable[None]]) -> int:
    """Run `loop` over everything that `config` asks for; returns the exit status after every child has ended.

    0: done. 1: failed, the reason is printed. 2: the configuration or a hook is wrong. 130: interrupted.
    """
    console = Console()
    try:
        load_hooks(config)
        run_dir = make_run_folder(config.run.name, config.run.dir)
        write_whole(run_dir / RESOLVED, dump(config))
        events = EventLog(run_dir / "events.jsonl")
        events.add("run", pid=os.getpid(), argv=sys.argv[1:])
    except MilesError as e:
        console.error(str(e))
        return 2
    console.say(f"run folder: {run_dir}")
    if not only_evaluates(config):
        console.say(batch_plan(config).describe())

    async def go() -> None:
        async with build(config, run_dir, console, events) as run:
            await loop(run)

    status, reason = 0, "done"
    try:
        asyncio.run(go())
    except (KeyboardInterrupt, asyncio.CancelledError):
        status, reason = 130, "interrupted"
        console.error("interrupted; every process of this run has ended")
    except ConfigError as e:
        status, reason = 2, message_of(e)
        console.error(reason)
    except Exception as e:  # noqa: BLE001 - the last place that can tell the user
        status, reason = 1, explain_failure(e, run_dir)
        console.error(reason)
    try:
        events.add("end", status=status, reason=reason)
    except MilesError as e:
        console.error(f"how this run ended could not be noted: {e}")
        status = status or 1
    events.close()
    return status
