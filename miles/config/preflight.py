"""What a run needs of the disk and the machine, looked at before anything starts."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, cast

from miles.config.checks import length_issues
from miles.config.checks_gpu import GPU_CHECKS
from miles.config.checks_precision import PRECISION_CHECKS
from miles.config.checks_scoring import SCORING_CHECKS
from miles.config.known import Check, run_checks
from miles.config.preflight_external import EXTERNAL_PREFLIGHT
from miles.config.preflight_rows import first_rows_fit
from miles.config.resources import (
    machine_cores,
    needs_engines,
    num_started_engines,
    num_train_ranks,
    only_evaluates,
    resolved_num_cpus,
    saves,
)
from miles.config.schema import DataConfig, RunConfig
from miles.config.walk import leaves
from miles.errors import CheckpointError, Issue
from miles.utils import checkpoint_folder, run_record
from miles.utils.jsonl import split_slice
from miles.utils.run_folder import RESOLVED
from miles.utils.step_path import STEP, step_path

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Values of `model_type` in config.json that engine and trainer run."""


def preflight(cfg: RunConfig, unknown: Set[str] = frozenset()) -> list[Issue]:
    """Everything that is missing or wrong on the disk and the machine; leaves out what needs an `unknown` setting."""
    return run_checks(PREFLIGHT, cfg, unknown)


def model_is_complete(cfg: RunConfig) -> Iterator[Issue]:
    path = cfg.model.hf_checkpoint
    if not path:
        yield Issue("model.hf_checkpoint", "no model is given", "--hf-checkpoint FOLDER")
        return
    yield from _model_folder("model.hf_checkpoint", path, tokenizer=True)


def reference_is_complete(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.model.ref_load is not None:
        yield from _model_folder("model.ref_load", cfg.model.ref_load, tokenizer=False)


def critic_is_complete(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.critic.load is not None:
        yield from _model_folder("critic.load", cfg.critic.load, tokenizer=False)


def chat_template_exists(cfg: RunConfig) -> Iterator[Issue]:
    path = cfg.model.chat_template_path
    if path is not None and not Path(path).is_file():
        yield Issue("model.chat_template_path", f"{path}: no such file", "--chat-template-path FILE.jinja")


def lengths_fit_the_model(cfg: RunConfig) -> Iterator[Issue]:
    limit = (_read_json(Path(cfg.model.hf_checkpoint) / "config.json") or {}).get("max_position_embeddings")
    if not isinstance(limit, int) or not needs_engines(cfg):
        return
    context = cfg.rollout.max_context_len
    if context is not None and context > limit:
        problem = f"{context} tokens are more than the {limit} positions of {cfg.model.hf_checkpoint}"
        yield Issue("rollout.max_context_len", problem, f"--rollout-max-context-len {limit} or less")
    evals = [("eval.max_context_len", cfg.eval.max_context_len)]
    evals += [(f"eval.datasets.{i}.max_context_len", d.max_context_len) for i, d in enumerate(cfg.eval.datasets)]
    for path, length in evals:
        if length is not None and length > limit:
            problem = f"{length} tokens are more than the {limit} positions of {cfg.model.hf_checkpoint}"
            yield Issue(path, problem, f"{limit} or less")
    if context is None:
        yield from length_issues(cfg, limit, f"the {limit} positions of the model", "or a model with more positions")


def prompts_exist(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.data.source_path != DataConfig.model_fields["source_path"].default or only_evaluates(cfg):
        return
    if not cfg.data.prompt_data and cfg.data.global_dataset:
        yield Issue("data.prompt_data", "no prompts are given", "--prompt-data FILE.jsonl")
    for path in cfg.data.prompt_data:
        yield from _data_file("data.prompt_data", path, "")


def eval_data_exists(cfg: RunConfig) -> Iterator[Issue]:
    words = cfg.eval.prompt_data
    for name, path in zip(words[::2], words[1::2], strict=False):
        yield from _data_file("eval.prompt_data", path, f"dataset {name}: ")
    for i, dataset in enumerate(cfg.eval.datasets):
        yield from _data_file(f"eval.datasets.{i}.path", dataset.path, f"dataset {dataset.name}: ")


def checkpoint_is_complete(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.checkpoint.load is None:
        return
    try:
        checkpoint_folder.resolve(cfg.checkpoint.load)
    except CheckpointError as e:
        problem, _, fix = str(e).partition("\n    fix: ")
        yield Issue("checkpoint.load", problem, fix or "--load FOLDER")


def checkpoints_can_be_written(cfg: RunConfig) -> Iterator[Issue]:
    if not saves(cfg) or cfg.checkpoint.save is None:
        return
    folder = Path(cfg.checkpoint.save)
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        yield Issue("checkpoint.save", f"{existing} is not a folder", "--save FOLDER")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Issue(
            "checkpoint.save", f"{existing} may not be written to", "--save with a folder that this user may write to"
        )


def checkpoints_are_this_runs(cfg: RunConfig) -> Iterator[Issue]:
    if not saves(cfg) or next(run_folder_is_free(cfg), None) is not None:
        return
    given, run_dir, load = cfg.checkpoint.save, cfg.run.dir, cfg.checkpoint.load
    if given is None and run_dir is None:
        return
    setting, flag = ("checkpoint.save", "--save") if given is not None else ("run.dir", "--run-dir")
    folder = Path(given) if given is not None else Path(cast(str, run_dir)) / "checkpoints"
    try:
        loaded = checkpoint_folder.resolve(load) if load is not None else None
    except CheckpointError:
        return  # `checkpoint_is_complete` tells it
    try:
        found = run_record.conflict(folder, loaded)
    except CheckpointError as e:
        found = str(e).partition("\n")[0]
    if found is not None:
        fix = f"{flag} with a new folder, or --load {folder} to go on from its latest checkpoint"
        yield Issue(setting, found, fix)


def save_sentinel_is_a_file(cfg: RunConfig) -> Iterator[Issue]:
    path = cfg.checkpoint.save_trigger_sentinel
    if path is not None and Path(path).is_dir():
        yield Issue("checkpoint.save_trigger_sentinel", f"{path} is a folder", "--save-trigger-sentinel FILE")


def replayed_samples_exist(cfg: RunConfig) -> Iterator[Issue]:
    pattern, steps = cfg.debug.load_rollout_data, cfg.rollout.num_rollout
    if pattern is None or steps is None or STEP not in pattern:
        return
    files = [Path(step_path(pattern, step)) for step in range(_first_step(cfg), steps)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        yield Issue(
            "debug.load_rollout_data",
            f"{len(missing)} of the {len(files)} files of this run's steps are missing: {', '.join(missing[:3])}",
            "check the path, or lower --num-rollout to the steps that were saved",
        )


def _first_step(cfg: RunConfig) -> int:
    """The first step of the run; 0 where a checkpoint cannot be read, which is told elsewhere."""
    if cfg.checkpoint.load is None:
        return 0
    try:
        folder = checkpoint_folder.resolve(cfg.checkpoint.load)
        return int(checkpoint_folder.read_state(folder)["next_step"]) if folder else 0
    except (CheckpointError, LookupError):
        return 0


def run_folder_is_free(cfg: RunConfig) -> Iterator[Issue]:
    if cfg.run.dir is None:
        return
    folder, load = Path(cfg.run.dir), cfg.checkpoint.load
    if folder.exists() and not folder.is_dir():
        yield Issue("run.dir", f"{folder} is a file", "--run-dir FOLDER, or leave it out for a new one under runs/")
    resumes = load is not None and Path(load).resolve().is_relative_to(folder.resolve())
    if (folder / RESOLVED).exists() and not resumes:
        yield Issue(
            "run.dir",
            f"{folder} holds another run",
            f"--run-dir with a new folder (null makes one under runs/), or --load {folder / 'checkpoints'} to go on with that run",
        )


def processes_can_be_placed(cfg: RunConfig) -> Iterator[Issue]:
    ranks, engines, cpus = num_train_ranks(cfg), num_started_engines(cfg), resolved_num_cpus(cfg)
    if ranks + engines > cpus:
        source = "--num-cpus" if cfg.cluster.num_cpus else f"this machine's {machine_cores()} cores"
        yield Issue(
            "cluster.num_cpus",
            f"{ranks} trainer rank(s) and {engines} engine(s) take {ranks + engines} logical CPUs, "
            f"but Ray may hand out {cpus} ({source})",
            f"--num-cpus {ranks + engines}, or fewer --train-ranks or --rollout-engines",
        )


def router_port_is_free(cfg: RunConfig) -> Iterator[Issue]:
    port = cfg.router.port
    if port == 0 or not needs_engines(cfg):
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as e:
            found = "is in use" if e.errno == errno.EADDRINUSE else f"cannot be taken: {e.strerror}"
            fix = "--router-port with another port, or 0 for a free one"
            yield Issue("router.port", f"port {port} of 127.0.0.1 {found}", fix)


def _model_folder(setting: str, path: str, *, tokenizer: bool) -> Iterator[Issue]:
    folder = Path(path)
    flag = next(leaf.flag for leaf in leaves() if leaf.path == setting)
    if not folder.is_dir():
        problem = f"{path} is a file, not a folder" if folder.is_file() else f"{path}: no such folder"
        hub = path.count("/") == 1 and not path.startswith((".", "/", "~")) and not folder.parent.exists()
        fetch = f"models come from folders, not from a hub: hf download {path} --local-dir FOLDER, then {flag} FOLDER"
        yield Issue(
            setting, problem, fetch if hub else f"{flag} with a folder of config.json, *.safetensors, tokenizer"
        )
        return
    yield from _model_config(setting, folder)
    yield from _model_weights(setting, folder)
    if tokenizer and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        yield Issue(
            setting,
            f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer_config.json",
            "save the model's tokenizer into it: tokenizer.save_pretrained(FOLDER)",
        )


def _model_config(setting: str, folder: Path) -> Iterator[Issue]:
    file = folder / "config.json"
    if not file.is_file():
        fix = "give the folder that model.save_pretrained(FOLDER) wrote"
        yield Issue(setting, f"{folder} has no config.json, so it is no model folder", fix)
        return
    config = _read_json(file)
    if config is None:
        yield Issue(setting, f"{file} is not a JSON object", "fetch or save the model again")
    elif config.get("model_type") not in MODEL_TYPES:
        yield Issue(
            setting,
            f"{folder} holds a model of type {config.get('model_type')!r}",
            f"choose a model of type {', '.join(MODEL_TYPES[:-1])} or {MODEL_TYPES[-1]}",
        )


def _model_weights(setting: str, folder: Path) -> Iterator[Issue]:
    found = {p.name for p in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = (_read_json(index) or {}).get("weight_map")
        named = set(cast(dict[str, str], weight_map).values()) if isinstance(weight_map, dict) else set[str]()
        missing = sorted(named - found)
        if missing or not named:
            problem = f"{len(missing)} of {len(named)} weight files are missing: {', '.join(missing[:3])}"
            yield Issue(
                setting, f"{folder}: {problem}" if named else f"{index} names no files", "fetch the model again"
            )
    elif not found:
        yield Issue(setting, f"{folder} has no *.safetensors", "save the model with model.save_pretrained(FOLDER)")
    for name in sorted(found):
        if damage := _damage(folder / name):
            yield Issue(
                setting, f"{folder / name} {damage}", "fetch or save the model again; the disk may have been full"
            )


def _damage(file: Path) -> str | None:
    """What is wrong with a safetensors file, seen from its size and header; None when nothing is.

    The format: 8 bytes of header length, the header as JSON with the place of every tensor, the tensors.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        header_size = int.from_bytes(f.read(8), "little")
        if size < 8 or header_size > size - 8:
            return f"is damaged: it ends within its header, after {size} bytes"
        try:
            header = cast(dict[str, dict[str, Any]], json.loads(f.read(header_size)))
            ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, LookupError, AttributeError):
            return "is no safetensors file: its header cannot be read"
    promised = 8 + header_size + max(ends, default=0)
    return f"is damaged: it has {size} bytes, and its header promises {promised}" if size != promised else None


def _data_file(setting: str, path: str, prefix: str) -> Iterator[Issue]:
    file = Path(split_slice(path)[0])
    rows = "a .jsonl file with one JSON object a line, or a .parquet file"
    if not file.exists():
        rows_wanted = "take rows a to b with FILE@[a:b], whole numbers and no step" if "@[" in file.name else ""
        fix = rows_wanted or f"check the path; the current folder is {Path.cwd()}"
        yield Issue(setting, f"{prefix}{path}: no such file", fix)
    elif not file.is_file():
        yield Issue(setting, f"{prefix}{path} is not a file", f"give {rows}")
    elif file.suffix not in (".jsonl", ".parquet"):
        yield Issue(setting, f"{prefix}{path} is neither a .jsonl nor a .parquet file", f"give {rows}")
    elif not os.access(file, os.R_OK):
        yield Issue(setting, f"{prefix}{path} may not be read", "give this user leave to read it")
    elif file.suffix == ".parquet":
        if not _is_parquet(file):
            yield Issue(setting, f"{prefix}{path} is not a Parquet file, or is cut off", "write the file anew")
    elif _is_blank(file):
        yield Issue(setting, f"{prefix}{path} is empty", f"give {rows}")


def _is_parquet(file: Path) -> bool:
    """Whether a file begins and ends as Parquet does."""
    mark = b"PAR1"
    with file.open("rb") as data:
        if data.read(len(mark)) != mark or data.seek(0, os.SEEK_END) < 3 * len(mark):
            return False
        data.seek(-len(mark), os.SEEK_END)
        return data.read() == mark


def _is_blank(file: Path) -> bool:
    with file.open("rb") as lines:
        return not any(line.strip() for line in lines)


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return cast(dict[str, Any], data) if isinstance(data, dict) else None


PREFLIGHT: tuple[Check, ...] = (
    model_is_complete,
    reference_is_complete,
    critic_is_complete,
    chat_template_exists,
    lengths_fit_the_model,
    prompts_exist,
    first_rows_fit,
    eval_data_exists,
    checkpoint_is_complete,
    checkpoints_can_be_written,
    checkpoints_are_this_runs,
    save_sentinel_is_a_file,
    replayed_samples_exist,
    run_folder_is_free,
    processes_can_be_placed,
    router_port_is_free,
    *GPU_CHECKS,
    *PRECISION_CHECKS,
    *SCORING_CHECKS,
    *EXTERNAL_PREFLIGHT,
)
