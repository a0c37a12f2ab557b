"""From a configuration to a running `Run`: the one place that knows every concrete class."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config.batch_math import batch_plan
from miles.config.changes import changed_settings
from miles.config.dump import dump
from miles.config.resources import (
    engine_dtype,
    num_engines,
    num_train_ranks,
    resolved_num_cpus,
    resolved_threads,
    saves,
)
from miles.config.schema import RunConfig
from miles.core.plugins import load_hooks
from miles.core.ports import Metrics, RolloutBatch, Run, Tracker
from miles.core.run_facts import EngineEndpoint
from miles.errors import CheckpointError, ConfigError, Issue, MilesError
from miles.utils import checkpoint_folder, heartbeat, http_utils, run_record
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
CODEC = "miles.backends.torch_engine.payload.SharedMemoryCodec"
CLOSE_TIMEOUT_S = 20.0
_DIED = re.compile(r"The actor died.*?class_name: (?P<name>\w+).*?pid: (?P<pid>\d+)", re.DOTALL)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def engine_command(config: RunConfig) -> list[str]:
    """Command line of one inference engine."""
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", config.model.hf_checkpoint]
    command += ["--max-running-requests", str(config.engine.max_running_requests), "--exit-on-stdin-close"]
    command += ["--threads", str(resolved_threads(config)), "--seed", str(config.rollout.seed)]
    command += ["--dtype", engine_dtype(config)]
    if config.rollout.max_context_len:
        command += ["--context-length", str(config.rollout.max_context_len)]
    if config.run.deterministic:
        command += ["--enable-deterministic-inference"]
    return command


def router_command(config: RunConfig) -> list[str]:
    """Command line of the router."""
    router = config.router
    command = [sys.executable, "-m", "miles.router", "--port", str(router.port), "--exit-on-stdin-close"]
    command += ["--health-check-interval", str(router.health_check_interval_s)]
    command += ["--health-check-timeout", str(router.health_check_timeout_s)]
    command += ["--failure-threshold", str(router.failure_threshold)]
    if config.fault_tolerance.enabled:  # requests wait for an engine that is started again; the run's waits end first
        command += ["--worker-wait", str(config.cluster.wait_timeout_s)]
    return [*command, "--max-connections", str(config.engine.concurrency * config.cluster.rollout_engines)]


class SharedMachine:
    """Placement of a run whose trainer and engines take turns on the same cores: nothing has to move."""

    def for_rollout(self) -> Any:
        """Nothing to do before generation."""
        return nullcontext()

    def for_training(self) -> Any:
        """Nothing to do before training."""
        return nullcontext()

    def for_weight_sync(self) -> Any:
        """Nothing to do before a weight update."""
        return nullcontext()


class NothingToPublish:
    """Weights of a run without engines or without a trainer: there is nobody to publish to, or nothing to publish."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def set_engines(self, engines: Sequence[EngineEndpoint]) -> None:
        """Nothing will be sent to them."""

    async def bring_up(self, engine: EngineEndpoint) -> bool:
        """An engine serves the weights of the model folder."""
        return True

    async def publish(self) -> Metrics:
        """Nothing."""
        return {}

    async def publish_if_due(self, step: int) -> Metrics:
        """Nothing."""
        return {}


class NoTrainer:
    """Trainer of a run that only generates: a batch is reported and forgotten."""

    async def train(self, batch: RolloutBatch) -> Metrics:
        """The batch's metrics."""
        return {**batch.metrics, "perf/train_time": 0.0}

    async def save(self, folder: str) -> None:
        """Raises CheckpointError: there is nothing to save."""
        raise CheckpointError(f"{folder}: this run has no trainer whose state could be saved")


@dataclass(frozen=True)
class Resumed:
    """What a run starts from: the beginning, or a checkpoint."""

    folder: Path | None
    next_step: int
    weight_version: int
    rollout: dict[str, Any] | None
    record: RunRecord | None = None
    """Whose the checkpoint is, and its settings; None at the beginning."""


def resume_point(load: str | None) -> Resumed:
    """Read the checkpoint that `--load` names, if it does; a run starts after it, or at step 0 when its folder is empty."""
    if not load:
        return Resumed(None, 0, 0, None)
    folder = checkpoint_folder.resolve(load)
    if folder is None:
        return Resumed(None, 0, 0, None)
    state = checkpoint_folder.read_state(folder)
    record = run_record.read(folder)
    return Resumed(folder, state["next_step"], state["weight_version"], state["rollout"], record)


def resume_notes(load: str | None, start_from: Resumed) -> list[str]:
    """What a user who gave `--load` must know: checkpoints that are passed over, and where the run starts."""
    if not load:
        return []
    skipped = [f"skipped: {text}" for text in checkpoint_folder.skipped(load)]
    if start_from.folder is None:
        return [*skipped, f"{load} holds no complete checkpoint yet: starting from --hf-checkpoint at step 0"]
    return [*skipped, f"resuming from {start_from.folder}, after {start_from.next_step} steps"]


def checkpoints_of(config: RunConfig, run_dir: Path) -> Path:
    """The folder that the run's checkpoints are saved to."""
    return Path(config.checkpoint.save) if config.checkpoint.save else run_dir / "checkpoints"


def differences(config: RunConfig, run_dir: Path, start_from: Resumed) -> list[str]:
    """What a user who resumes must know: settings that are others now, and later checkpoints that the run saves beside."""
    changed = changed_settings(start_from.record.settings, config) if start_from.record else []
    later = run_record.later(checkpoints_of(config, run_dir), start_from.folder) if start_from.folder else None
    return [*changed, later] if later and saves(config) else changed


def steps_of_epochs(config: RunConfig, num_prompts: int | None) -> int:
    """Rollout steps of `--num-epoch` passes over `num_prompts`; raises ConfigError when that is none."""
    if num_prompts is None:
        problem = f"{config.data.source_path} has no length, so an epoch is not defined"
        raise ConfigError([Issue("rollout.num_epoch", problem, "set --num-rollout instead")])
    steps = num_prompts // config.rollout.batch_size * (config.rollout.num_epoch or 0)
    if not steps:
        problem = f"{num_prompts} prompts do not fill one step of {config.rollout.batch_size}"
        raise ConfigError(
            [Issue("rollout.batch_size", problem, f"set --rollout-batch-size {max(num_prompts, 1)} or less")]
        )
    return steps


def epochs_in_words(config: RunConfig, num_prompts: int, steps: int) -> str:
    """How `--num-epoch` became steps: `3 epochs of 100 prompts, 32 a step, are 9 steps; they take 288 of the 300 prompts`."""
    epochs, batch = config.rollout.num_epoch or 0, config.rollout.batch_size
    text = (
        f"{epochs} {'epoch' if epochs == 1 else 'epochs'} of {num_prompts} prompts, {batch} a step, are {steps} steps"
    )
    wanted, taken = epochs * num_prompts, steps * batch
    return text if taken == wanted else f"{text}; they take {taken} of the {wanted} prompts"


def steps_left(next_step: int, num_rollout: int) -> range:
    """Steps from `next_step` to the end of the run; raises ConfigError when a checkpoint is at or past it."""
    if next_step >= num_rollout:
        problem = f"the checkpoint is after step {next_step} and the run has {num_rollout}: nothing is left to do"
        raise ConfigError([Issue("rollout.num_rollout", problem, "raise --num-rollout, which counts from step 0")])
    return range(next_step, num_rollout)


@asynccontextmanager
async def build(config: RunConfig, run_dir: Path, console: Console, events: EventLog) -> AsyncIterator[Run]:
    """Start everything that `config` asks for; everything ends when the context does, however it ends."""
    from miles.ray import cluster
    from miles.ray.hang import HangExplainer
    from miles.ray.phases import PhaseLog
    from miles.ray.recovery import Recovery
    from miles.utils.tracking_utils.tracker import RunTracker

    def long_wait(text: str) -> None:
        console.say(text, style="yellow")
        events.add("long wait", what=text.strip())

    start_from = resume_point(config.checkpoint.load)
    for note in [*resume_notes(config.checkpoint.load, start_from), *differences(config, run_dir, start_from)]:
        console.say(note, style="yellow")
        events.add("resume", what=note)
    if config.rollout.num_rollout is not None:
        steps_left(start_from.next_step, config.rollout.num_rollout)
    record = RunRecord(
        start_from.record.id if start_from.record else run_record.new_id(), config.model_dump(mode="json")
    )
    events.add("run id", id=record.id)
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
        router, engines = started.facts.router, started.facts.engines
        pids = {**started.facts.pids, **await waits.on("trainer", "process ids", _pids_of(started.trainers))}
        for name in pids:
            if name == "rollout-manager" or name.startswith("trainer-"):
                ray_cluster.guard(name, pids[name], str(run_dir / "logs" / f"{name}.log"))
        events.add("started", engines=[e.pid for e in engines], router=router.pid if router else None, pids=pids)
        tracker = RunTracker(run_dir, config.run.name, console, use_tensorboard=config.run.use_tensorboard)
        stack.callback(tracker.close)
        if config.rollout.num_rollout is None and started.facts.num_prompts is not None:
            console.say(epochs_in_words(config, started.facts.num_prompts, started.num_rollout))
        steps = steps_left(start_from.next_step, started.num_rollout)
        console.start(steps)
        phases = PhaseLog(events)
        run = _assemble(config, run_dir, start_from, started, steps, tracker, record, waits, phases)
        if router:
            weights: Any = run.weights
            recovery = Recovery(started.manager, weights, waits, console, events, phases)
            run = replace(run, weights=recovery)
            await stack.enter_async_context(recovery.running())
        await stack.enter_async_context(run.checkpoints.running())
        yield run


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

    start_timeout_s = config.cluster.start_timeout_s
    pool = PoolPlan(
        run_dir=str(run_dir),
        num_engines=num_engines(config),
        engine_command=tuple(engine_command(config)),
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
    trainers = [spawn(TrainActor, str(run_dir), rank, num_cpus=1) for rank in range(num_train_ranks(config))]
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
    }
    load_folder = str(start_from.folder / "trainer") if start_from.folder else None
    worker_path = WORKERS[config.train.backend]
    trainer_starts = [_ref(t.start.remote(config, worker_path, CODEC, init, load_folder)) for t in trainers]
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
    from miles.ray.train_group import TrainGroup

    rollout = RolloutClient(started.manager, waits, phases)
    placement = SharedMachine()
    trainer: Any = NoTrainer()
    weights: Any = NothingToPublish(start_from.weight_version)
    if started.trainers:
        trainer = TrainGroup(started.trainers, waits, save_hf=config.checkpoint.save_hf)
    if started.trainers and started.facts.router:
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
        evaluation=IntervalEvaluation(rollout, tracker, steps, config.eval.interval, before=config.eval.before_train),
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


def explain_failure(error: Exception, run_dir: Path) -> str:
    """`message_of`, and where to read more: the traceback is written to `logs/error.txt`."""
    text = message_of(error)
    trace = run_dir / "logs" / "error.txt"
    try:
        write_whole(trace, _COLOUR.sub("", "".join(traceback.format_exception(error))))
    except MilesError as e:
        return f"{text}\n    logs: {trace.parent}; no traceback there: {e.__cause__}"
    return f"{text}\n    traceback: {trace}\n    logs: {trace.parent}"


def message_of(error: Exception) -> str:
    """What a user can act on, out of Ray's wrapping and without a traceback."""
    cause = getattr(error, "cause", None)
    told = cause if isinstance(cause, Exception) else error
    if died := _DIED.search(str(told)) if type(told).__module__ == "ray.exceptions" else None:
        return (
            f"{died['name']} (process {died['pid']}) died in the middle of its work\n"
            "    fix: read the end of its log; when that says nothing, the machine ran out of memory (see dmesg)"
        )
    text = str(told) if isinstance(told, MilesError) else f"{type(told).__name__}: {told}"
    return "\n    ".join([text, *getattr(told, "__notes__", ())])
