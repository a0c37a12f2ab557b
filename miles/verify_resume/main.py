"""The verb: run uninterrupted, run and kill and resume, compare, tell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.resources import num_train_ranks
from miles.errors import MilesError
from miles.utils import checkpoint_folder
from miles.utils.process import last_lines
from miles.utils.run_folder import RESOLVED
from miles.utils.step_path import STEP
from miles.utils.verb import run_verb
from miles.verify_resume import compare
from miles.verify_resume.compare import Finding
from miles.verify_resume.lives import Life
from miles.verify_resume.options import HELP, PROG, Verification, read_options
from miles.verify_resume.points import KillPoint, begun, seconds_of, wait_for

UNINTERRUPTED = "uninterrupted"
RESAVE_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Lived:
    """A part of the run that was killed: from its start, or a checkpoint, to the next kill, or its end."""

    run_dir: Path
    first_step: int
    resumed_from: Path | None
    killed: str | None
    """Where it was killed; None when it came to its end."""


def main(argv: Sequence[str]) -> int:
    """Run the verb; returns the exit status."""
    return run_verb(argv, read_options, verify, help_text=HELP, left=lambda v: f"everything is in {v.out}")


def verify(v: Verification) -> int:
    """Run, kill, resume and compare; 0 when nothing differs."""
    deterministic = v.config.run.deterministic
    bound = "must agree bit for bit" if deterministic else "the trainer's state and the accounts must agree"
    _say(f"{PROG}: steps {v.steps.start} to {v.steps.stop - 1}, killed at {', '.join(map(str, v.points))}; {bound}")
    v.out.mkdir(parents=True, exist_ok=True)
    load = Path(v.config.checkpoint.load) if v.config.checkpoint.load else None
    with ExitStack() as stack:
        started_at = time.monotonic()
        life = _start(v, UNINTERRUPTED, load, stack)
        life.finish()
        _say(f"uninterrupted run: done in {time.monotonic() - started_at:.0f} s")
        reference = Lived(life.run_dir, v.steps.start, load, None)
        lives, restored = _live_and_die(v, reference, load, stack)
    if not any(life.killed for life in lives):
        raise MilesError("the run ended before it could be killed\n    fix: choose an earlier moment with --at")
    findings = [*restored, *compare_runs(v, reference, lives)]
    ok = all(finding.difference is None for finding in findings)
    _say(table(findings))
    report = _report(v, lives, findings, ok)
    for path in {v.out / "report.json", *([v.json_path] if v.json_path else [])}:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if ok and not v.keep:
        shutil.rmtree(v.out)
    what = "the resumed run is the uninterrupted one" + (", bit for bit" if deterministic else "")
    _say(what if ok else f"the resumed run differs; both are in {v.out}")
    return 0 if ok else 1


def _start(v: Verification, name: str, load: Path | None, stack: ExitStack) -> Life:
    run_dir = v.out / name
    samples = str(run_dir / "samples" / f"{STEP}.jsonl")
    loading = ["--load", str(load) if load else "null"]
    life = Life(run_dir, [*v.argv, *loading, "--save-debug-rollout-data", samples], v.out / f"{name}.log")
    stack.callback(life.close)
    return life


def _live_and_die(
    v: Verification, reference: Lived, load: Path | None, stack: ExitStack
) -> tuple[list[Lived], list[Finding]]:
    """Run until the end, however often it is killed; also what loading each checkpoint and saving it again found."""
    lives: list[Lived] = []
    restored: list[Finding] = []
    left = list(v.points)
    while True:
        name = f"killed-{len(lives) + 1}"
        first = v.steps.start if load is None else _next_step(load)
        left = [point for point in left if point.step >= first]
        life = _start(v, name if left else "resumed", load, stack)
        killed = _kill(life, left.pop(0), reference) if left else None
        if killed is None:
            life.finish()
            _say(f"{life.run_dir.name}: done, from step {first}")
        lives.append(Lived(life.run_dir, first, load, killed))
        saved = checkpoint_folder.complete_iterations(life.run_dir / "checkpoints")
        if saved:
            load = life.run_dir / "checkpoints"
        if killed is None or (saved and saved[-1] == v.steps.stop):
            return lives, restored
        if load is not None and (checkpoint := checkpoint_folder.resolve(load)) is not None:
            restored.append(_resave(v, checkpoint, len(lives)))


def _kill(life: Life, point: KillPoint, reference: Lived) -> str | None:
    """Kill the run at `point`; None when it had ended before."""
    if wait_for(lambda: begun(life.run_dir, point), life.ended):
        time.sleep(point.fraction * seconds_of(reference.run_dir, point))
    if not life.kill():
        life.check_status()
        return None
    seconds = life.wait_gone()
    where = f"step {point.step}, {point.phase}, {point.fraction:.0%} into it"
    _say(f"{life.run_dir.name}: killed in {where}; its last process was gone {seconds:.0f} s later")
    return where


def _next_step(load: Path) -> int:
    folder = checkpoint_folder.resolve(load)
    return 0 if folder is None else int(checkpoint_folder.read_state(folder)["next_step"])


def _resave(v: Verification, checkpoint: Path, number: int) -> Finding:
    """Load the trainer's part of a checkpoint as a resumed run does, save it again, and compare."""
    out = v.out / f"resaved-{number}"
    out.mkdir()
    recipe, rendezvous = checkpoint.parent.parent / RESOLVED, out / "rendezvous"
    common = [str(rendezvous), str(checkpoint / "trainer"), str(out / "trainer")]
    log_path = v.out / f"resaved-{number}.log"
    with open(log_path, "wb") as log:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "miles.verify_resume.resave", str(recipe), str(rank), *common],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(num_train_ranks(v.config))
        ]
    deadline = time.monotonic() + RESAVE_TIMEOUT_S
    try:
        statuses = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        statuses = [-1]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    what = f"{checkpoint.name}, loaded and saved again"
    if any(statuses):
        return Finding(what, 0, "tensors", f"failed with {statuses}: {last_lines(log_path, 5)} (see {log_path})")
    return Finding(what, *_swap(compare.trainer_folders(checkpoint / "trainer", out / "trainer")))


def _swap(found: tuple[int, str | None]) -> tuple[int, str, str | None]:
    return found[0], "tensors", found[1]


def compare_runs(v: Verification, reference: Lived, lives: Sequence[Lived]) -> list[Finding]:
    """All findings about the run that was killed, `lives`, against the uninterrupted one."""
    final = [(step, _last_with(lives, f"samples/{step}.jsonl")) for step in v.steps]
    missing = [step for step, life in final if life is None]
    if missing:
        return [Finding(compare.SAMPLES, 0, "samples", f"step {missing[0]} was never generated")]
    steps = [(_samples(reference, step), _samples(life, step)) for step, life in final if life is not None]
    evaluated = _evaluations(reference, lives)
    if v.config.run.deterministic:
        made = [(_samples(reference, s), _samples(life, s)) for life in lives for s in v.steps if _made(life, s)]
        return [
            *compare.checkpoints([pair for life in lives for pair in _checkpoints(reference, life)]),
            compare.samples(made),
            *([compare.evaluations(evaluated, exact=True)] if evaluated else []),
        ]
    name = checkpoint_folder.iteration_name(v.steps.stop)
    life = _last_with(lives, f"checkpoints/{name}/{checkpoint_folder.MARKER}")
    if life is None:
        return [Finding("ledger", 0, "checkpoints", f"the resumed run has no {name}")]
    first, second = (checkpoint_folder.read_state(x.run_dir / "checkpoints" / name) for x in (reference, life))
    ledgers = [state["rollout"]["ledger"] for state in (first, second)]
    before = _trained_before(reference.resumed_from)
    findings = [
        compare.accounts([file for _, file in steps], ledgers[1], before),
        _equal("weight version, next step", *(_versions(state) for state in (first, second))),
    ]
    if v.order_matters:
        return [*findings, _equal("ledger: groups trained", *(ledger["trained"] for ledger in ledgers))]
    source = compare.STATE_PARTS["data source: position, buffer"]
    return [
        *findings,
        _equal("ledger", *ledgers),
        _equal("data source: position, buffer", source(first), source(second)),
        compare.prompts(steps),
        *([compare.evaluations(evaluated, exact=False)] if evaluated else []),
    ]


def _samples(life: Lived, step: int) -> Path:
    return life.run_dir / "samples" / f"{step}.jsonl"


def _made(life: Lived, step: int) -> bool:
    return _samples(life, step).exists()


def _last_with(lives: Sequence[Lived], name: str) -> Lived | None:
    return next((life for life in reversed(lives) if (life.run_dir / name).exists()), None)


def _checkpoints(reference: Lived, life: Lived) -> list[tuple[Path, Path]]:
    folder = life.run_dir / "checkpoints"
    names = [checkpoint_folder.iteration_name(n) for n in checkpoint_folder.complete_iterations(folder)]
    return [(reference.run_dir / "checkpoints" / name, folder / name) for name in names]


def _evaluations(reference: Lived, lives: Sequence[Lived]) -> list[tuple[Path, Path | None]]:
    """Files of evaluated samples, and those of the last part of the killed run that has them."""
    pairs: list[tuple[Path, Path | None]] = []
    for file in sorted((reference.run_dir / "eval").rglob("*.jsonl")):
        name = str(file.relative_to(reference.run_dir))
        life = _last_with(lives, name)
        pairs.append((file, life.run_dir / name if life else None))
    return pairs


def _versions(state: dict[str, Any]) -> Any:
    return compare.STATE_PARTS["weight version, next step"](state)


def _trained_before(load: Path | None) -> int:
    folder = checkpoint_folder.resolve(load) if load is not None else None
    return int(checkpoint_folder.read_state(folder)["rollout"]["ledger"]["trained"]) if folder is not None else 0


def _equal(what: str, first: Any, second: Any) -> Finding:
    return Finding(what, 1, "checkpoint", compare.first_difference(first, second))


def table(findings: Sequence[Finding]) -> str:
    """One line for each finding, and below those that differ, how."""
    width = max(len(finding.what) for finding in findings)
    lines: list[str] = []
    for finding in findings:
        verdict = "OK" if finding.difference is None else "DIFFERS"
        lines.append(f"  {finding.what:<{width}}  {finding.count:>6} {finding.unit:<11}  {verdict}")
        if finding.difference is not None:
            lines.append(f"      {finding.difference}")
    return "\n".join(lines)


def _report(v: Verification, lives: Sequence[Lived], findings: Sequence[Finding], ok: bool) -> dict[str, Any]:
    return {
        "ok": ok,
        "deterministic": v.config.run.deterministic,
        "steps": [v.steps.start, v.steps.stop],
        "kill_points": [str(point) for point in v.points],
        "runs": [
            {"folder": life.run_dir.name, "first_step": life.first_step, "killed_in": life.killed} for life in lives
        ],
        "findings": [{"what": f.what, "count": f.count, "unit": f.unit, "difference": f.difference} for f in findings],
    }


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
