"""The engine's routes for weights, their version, their memory and their proof."""

from __future__ import annotations

from typing import Any

from miles.backends.torch_engine.control_routes import Control, field, on_engine
from miles.backends.torch_engine.engine import MEMORY_TAGS, Engine
from miles.backends.torch_engine.request import RequestRefused
from miles.backends.torch_engine.weight_updates import DEFAULT_GROUP, UpdateGroups, read_announcement, read_folder

UPDATE_FIELDS = frozenset({"load_format", "flush_cache", "weight_version", "abort_all_requests"})
"""Fields of every route that brings weights."""


def add_weight_controls(control: Control, engine: Engine) -> None:
    """Add the weight routes through `control`."""

    async def update_weights_from_tensor(body: dict[str, Any]) -> dict[str, Any]:
        payloads = body.get("serialized_named_tensors")
        if not (isinstance(payloads, list) and len(payloads) == 1 and isinstance(payloads[0], str)):
            raise RequestRefused("serialized_named_tensors is a list of one string: this engine has one rank")
        if body.get("load_format") != "flattened_bucket":
            raise RequestRefused(
                f'load_format is {body.get("load_format")!r}; the torch engine reads "flattened_bucket"'
            )
        new_version, flush, abort = _update_options(body)
        count = await on_engine(engine, lambda: engine.update_weights(payloads[0], flush, new_version, abort))
        return {"message": f"{count} tensors replaced", "weight_version": engine.weight_version}

    async def update_weight_version(body: dict[str, Any]) -> dict[str, Any]:
        new_version = field(body, "new_version", str, None)
        if new_version is None:
            raise RequestRefused("new_version is missing")
        abort = field(body, "abort_all_requests", bool, False)
        await on_engine(engine, lambda: engine.set_version(new_version, abort))
        return {"new_version": new_version}

    async def release_memory_occupation(body: dict[str, Any]) -> dict[str, Any]:
        tags = _tags(body)
        await on_engine(engine, lambda: engine.release_memory(tags))
        return {"message": f"released {', '.join(tags)}"}

    async def resume_memory_occupation(body: dict[str, Any]) -> dict[str, Any]:
        tags = _tags(body)
        await on_engine(engine, lambda: engine.resume_memory(tags))
        return {"message": f"resumed {', '.join(tags)}"}

    async def weights_checker(body: dict[str, Any]) -> dict[str, Any]:
        action = body.get("action")
        if action == "checksum":
            return {"checksums": await on_engine(engine, engine.weights.checksums)}
        if action == "snapshot":
            return {"num_parameters": await on_engine(engine, engine.weights.take_snapshot)}
        if action == "reset_tensors":
            await on_engine(engine, engine.reset_weights)
            return {"message": "all weights are garbage until they are sent again"}
        if action == "compare":
            differing = await on_engine(engine, engine.weights.differing_from_snapshot)
            if differing:
                raise RequestRefused(f"{len(differing)} parameters differ from the snapshot: {', '.join(differing)}")
            return {"message": "all parameters equal the snapshot"}
        raise RequestRefused(f"action is {action!r}; use checksum, snapshot, reset_tensors or compare")

    control("/update_weights_from_tensor", UPDATE_FIELDS | {"serialized_named_tensors"}, update_weights_from_tensor)
    control("/update_weight_version", frozenset({"new_version", "abort_all_requests"}), update_weight_version)
    control("/release_memory_occupation", frozenset({"tags"}), release_memory_occupation)
    control("/resume_memory_occupation", frozenset({"tags"}), resume_memory_occupation)
    control("/weights_checker", frozenset({"action"}), weights_checker)
    _add_disk_control(control, engine)
    _add_group_controls(control, engine)


def _add_disk_control(control: Control, engine: Engine) -> None:
    async def update_weights_from_disk(body: dict[str, Any]) -> dict[str, Any]:
        folder, load_format = field(body, "model_path", str, None), field(body, "load_format", str, "auto")
        if folder is None:
            raise RequestRefused("model_path is missing; give a model folder that this engine can see")
        if load_format not in ("auto", "safetensors"):
            raise RequestRefused(f'load_format is {load_format!r}; the torch engine reads "auto" and "safetensors"')
        version, flush, abort = _update_options(body)
        count = await on_engine(
            engine, lambda: engine.replace_weights(lambda: read_folder(folder), flush, version, abort, whole=True)
        )
        return {"message": f"{count} tensors loaded from {folder}", "weight_version": engine.weight_version}

    control("/update_weights_from_disk", UPDATE_FIELDS | {"model_path"}, update_weights_from_disk)


def _add_group_controls(control: Control, engine: Engine) -> None:
    groups = UpdateGroups()

    async def init_weights_update_group(body: dict[str, Any]) -> dict[str, Any]:
        await groups.join(body)
        return {"message": "joined"}

    async def destroy_weights_update_group(body: dict[str, Any]) -> dict[str, Any]:
        groups.destroy(field(body, "group_name", str, DEFAULT_GROUP))
        return {"message": "left"}

    async def update_weights_from_distributed(body: dict[str, Any]) -> dict[str, Any]:
        announced, (version, flush, abort) = read_announcement(body), _update_options(body)
        try:
            # Received before it is judged, so that a bucket that is refused does not leave the sender waiting.
            named = await groups.receive(field(body, "group_name", str, DEFAULT_GROUP), announced)
        except RuntimeError as error:
            problem = f"the broadcast broke off or took too long: {error}"
            await on_engine(engine, lambda: engine.weights.fail(problem))
            raise
        count = await on_engine(engine, lambda: engine.replace_weights(lambda: named, flush, version, abort))
        return {"message": f"{count} tensors replaced", "weight_version": engine.weight_version}

    join_fields = {"master_address", "master_port", "rank_offset", "world_size", "group_name", "backend"}
    control("/init_weights_update_group", frozenset(join_fields), init_weights_update_group)
    control("/destroy_weights_update_group", frozenset({"group_name"}), destroy_weights_update_group)
    bucket_fields = UPDATE_FIELDS | {"names", "dtypes", "shapes", "group_name"}
    control("/update_weights_from_distributed", bucket_fields, update_weights_from_distributed)


def _update_options(body: dict[str, Any]) -> tuple[str | None, bool, bool]:
    """`weight_version`, `flush_cache` and `abort_all_requests` of an update."""
    version = field(body, "weight_version", str, None)
    return version, field(body, "flush_cache", bool, True), field(body, "abort_all_requests", bool, False)


def _tags(body: dict[str, Any]) -> list[str]:
    """The tags of a memory route; none, or an empty list, means all."""
    tags = field(body, "tags", list, None) or list(MEMORY_TAGS)
    if not all(isinstance(tag, str) for tag in tags):
        raise RequestRefused(f"tags is {tags!r}; it must be a list of strings")
    return tags
