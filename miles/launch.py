"""From a configuration to a running `Run`: the one place that knows every concrete class."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config.batch_math import batch_plan
from miles.config.dump import dump
from miles.config.resources import (
    engine_backend,
    gpu_plan,
    num_engines,
    num_train_ranks,
    offloaded_by_engines,
    offloads_train,
    only_evaluates,
    resolved_num_cpus,
    resolved_threads,
)
from miles.config.schema import RunConfig
from miles.core.plugins import load_hooks
from miles.core.ports import Placement, Run, Tracker
from miles.core.run_facts import RunFacts
from miles.errors import ConfigError, MilesError
from miles.ray.commands import engine_command, router_command
from miles.ray.failure_text import explain_failure, message_of
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
from miles.utils.run_folder import RESOLVED, make_run_folder
from miles.utils.run_record import RunRecord
from miles.utils.signals import SignalThread
from miles.utils.tracking_utils.console import Console
from miles.utils.tracking_utils.events import EventLog
from miles.utils.waits import Waits

if TYPE_CHECKING:
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
    cluster.check_placement({"trainer ranks": num_train_ranks(config), "engines": num_engines(config)}, num_cpus)
    explainer = HangExplainer(run_dir, events)
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
        ray_cluster = cluster.Cluster(num_cpus)
        stack.callback(ray_cluster.stop)
        await stack.enter_async_context(ray_cluster.watched())
        _answer_signals(signals, explainer, console)
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
            recovery = Recovery(started.manager, weights, waits, console, events, phases)
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
    from miles.ray.actor_process import spawn
    from miles.ray.engine_pool import PoolPlan
    from miles.ray.rollout_manager import ManagerSpec, RolloutManager
    from miles.ray.train_actor import TrainActor

    start_timeout_s, gpus = config.cluster.start_timeout_s, gpu_plan(config)
    pool = PoolPlan(
        run_dir=str(run_dir),
        num_engines=num_engines(config),
        engine_command=tuple(engine_command(config)),
        engine_kind=engine_backend(config),
        engine_gpus=gpus.engines,
        router_command=tuple(router_command(config)),
        token=secrets.token_urlsafe(24),
        start_timeout_s=start_timeout_s,
        health_check_interval_s=config.router.health_check_interval_s,
        failure_threshold=config.router.failure_threshold,
        restart=config.fault_tolerance.enabled,
        max_restarts=config.fault_tolerance.max_restarts,
    )
    spec = ManagerSpec(
        run_dir=str(run_dir),
        pool=pool,
        start_rollout_id=start_from.next_step,
        state=start_from.rollout,
    )
    manager = spawn(RolloutManager, config, spec, num_cpus=0)
    trainers = [
        spawn(TrainActor, str(run_dir), rank, gpus.train[rank], num_cpus=1) for rank in range(num_train_ranks(config))
    ]
    stack.push_async_callback(_close, [manager, *trainers])

    manager_start = asyncio.ensure_future(
        waits.on("rollout manager", "start", _ref(manager.start.remote()), deadline_s=start_timeout_s)
    )
    num_rollout = config.rollout.num_rollout
    if num_rollout is None:
        num_rollout = steps_of_epochs(config, (await manager_start).num_prompts)
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
    worker_path = WORKERS[config.train.backend]
    trainer_starts = [
        _ref(t.start.remote(config, worker_path, CODECS[engine_backend(config)], init, load_folder)) for t in trainers
    ]
    trainer_start = waits.on("trainer", "start", asyncio.gather(*trainer_starts), deadline_s=start_timeout_s)
    facts, _ = await asyncio.gather(manager_start, trainer_start)
    return Started(manager, trainers, facts, num_rollout)


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
    from miles.backends.weight_sync.publisher import ProofPlan, Publisher
    from miles.ray.checkpoints import IntervalCheckpoints
    from miles.ray.phases import PhasedTrainer
    from miles.ray.rollout_client import IntervalEvaluation, RolloutClient
    from miles.ray.taking_turns import TAGS, TakingTurns
    from miles.ray.train_group import TrainGroup

    rollout = RolloutClient(started.manager, waits, phases)
    placement: Placement = SharedMachine()
    trainer: Any = NoTrainer()
    weights: Any = NothingToPublish(start_from.weight_version)
    if started.trainers:
        trainer = TrainGroup(started.trainers, waits, save_hf=config.checkpoint.save_hf)
    if started.trainers and started.facts.router:
        given_up = offloaded_by_engines(config)
        if offloads_train(config) or given_up:
            placement = TakingTurns(
                trainer,
                lambda: weights.engines,
                waits,
                offload_train=offloads_train(config),
                tags=[TAGS[level] for level in given_up],
            )
        weights = Publisher(
            trainer,
            started.facts.router,
            started.facts.engines,
            placement,
            rollout.set_weight_version,
            tracker,
            waits,
            version=start_from.weight_version,
            first_step=start_from.next_step,
            proofs=ProofPlan(
                verify=config.weights.verify,
                starts_from_folder=start_from.folder is None,
                reload_interval=config.weights.reload_interval,
                transport=config.weights.transport,
            ),
            probe_interval=config.parity.interval if config.parity.enabled else 0,
            mode=config.weights.mode,
            tolerate_deaths=config.fault_tolerance.enabled,
        )
    trainer = PhasedTrainer(trainer, phases)
    checkpoint = config.checkpoint
    return Run(
        steps=steps,
        rollout=rollout,
        trainer=trainer,
        weights=weights,
        evaluation=IntervalEvaluation(
            rollout,
            tracker,
            steps,
            config.eval.interval or (1 if only_evaluates(config) else None),
            before=config.eval.before_train,
        ),
        checkpoints=IntervalCheckpoints(
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
        ),
        placement=placement,
        tracker=tracker,
    )


def _answer_signals(signals: SignalThread, explainer: HangExplainer, console: Console) -> None:
    """SIGTERM ends the run as Ctrl-C does, and SIGUSR1 shows the wait graph. Call it after Ray, which takes SIGTERM.

    SIGTERM cancels the run's task rather than raising SIGINT, which a run started in the background ignores.
    """
    loop, run = asyncio.get_running_loop(), asyncio.current_task()
    assert run is not None
    signals.answer(
        {
            signal.SIGTERM: lambda: loop.call_soon_threadsafe(run.cancel),
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
