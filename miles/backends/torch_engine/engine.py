"""The engine: one thread that admits requests, computes prompts once, and decodes all running sequences together."""

from __future__ import annotations

import ctypes
import logging
import math
import queue
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from threading import Lock, Thread
from typing import Any, TypeVar

import numpy as np
import psutil
import torch

from miles.backends.torch_engine.decoder import Decoder
from miles.backends.torch_engine.deterministic import DeterministicDecoder
from miles.backends.torch_engine.kv_cache import PromptCache, PromptEntry, PromptKey, SlotCache
from miles.backends.torch_engine.model import LoadedModel
from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.torch_engine.request import Request, RequestRefused
from miles.backends.torch_engine.sampling import BatchSampling, sample
from miles.backends.torch_engine.settings import EngineSettings
from miles.backends.torch_engine.weights import NamedTensors, WeightStore
from miles.errors import EngineError

MEMORY_TAGS: tuple[str, ...] = ("weights", "kv_cache", "cuda_graph")
"""What can be released; this engine has no CUDA graphs, so that the last tag frees nothing."""

logger = logging.getLogger(__name__)
T = TypeVar("T")
_NO_SEED = (
    "sampling_params.sampling_seed is missing; under --enable-deterministic-inference every request that draws carries "
    "its own, since a seed made from the prompt would give all samples of a group the same tokens"
)
_NO_KV = "the KV cache is released; POST /resume_memory_occupation with the tag kv_cache"


@dataclass(frozen=True)
class _Call:
    run: Callable[[], Any]
    answer: Future[Any]


@dataclass
class Counters:
    """What the engine has done since it started."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0


class Engine:
    """Continuous batching over a slot cache, on a thread of its own.

    Methods may be called from any thread. `submit` answers through the request's `done`; the other actions run
    between two steps of the engine and return a Future.
    """

    def __init__(self, model: LoadedModel, settings: EngineSettings) -> None:
        self.model = model
        make_decoder = DeterministicDecoder if settings.enable_deterministic_inference else Decoder
        self.decoder = make_decoder(model.hf, settings.threads)
        self.settings = replace(settings, dtype=str(self.decoder.dtype).removeprefix("torch."))
        self.weights = WeightStore(model.hf)
        self.weight_version = "0"
        self.counters = Counters()
        self.death: str | None = None
        """The traceback that ended the engine's thread, or None."""
        self.paused = False
        self._kv_released = False
        self._codec = SharedMemoryCodec()
        self._inbox: queue.SimpleQueue[Request | _Call] = queue.SimpleQueue()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._rids: set[str] = set()
        self._cache = SlotCache(
            self.decoder.num_layers,
            self.decoder.kv_heads,
            self.decoder.head_dim,
            self.decoder.dtype,
            self.decoder.device,
            _kv_budget(settings, self.decoder.device),
        )
        self._prompts = PromptCache(settings.prompt_cache_tokens)
        self._rng = np.random.default_rng(settings.seed)
        self._garbage_seed = settings.seed
        self._sampling: BatchSampling | None = None
        self._tokens_B = torch.empty(0, dtype=torch.long, device=self.decoder.device)
        self._lengths_B = torch.empty(0, dtype=torch.long, device=self.decoder.device)
        self._step_began: float | None = None
        self._stopping = False
        self._end_lock = Lock()
        self._thread = Thread(target=self._run, name="torch-engine", daemon=True)

    def start(self) -> Engine:
        """Start the engine's thread."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Abort what runs and end the thread."""
        if self._thread.is_alive():
            self._inbox.put(_Call(self._stop, Future()))
            self._thread.join()

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError when the engine has died."""
        if self.death is not None:
            raise EngineError(self._end())
        self._inbox.put(request)
        if self.death is not None:
            self._fail_everything()

    def generate(self, requests: list[Request]) -> list[Request]:
        """Run requests and wait for all of them: the in-process door, for tests and benchmarks."""
        finished: queue.SimpleQueue[list[Request]] = queue.SimpleQueue()
        for request in requests:
            request.done = finished.put
            self.submit(request)
        left = len(requests)
        while left:
            left -= len(finished.get())
        return requests

    def call(self, run: Callable[[], T]) -> Future[T]:
        """Run a function on the engine's thread between two steps."""
        answer: Future[T] = Future()
        if self.death is not None:
            answer.set_exception(EngineError(self._end()))
        else:
            self._inbox.put(_Call(run, answer))
            if self.death is not None:
                self._fail_everything()
        return answer

    @property
    def num_running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no slot yet."""
        return len(self._waiting) + self._inbox.qsize()

    def unhealthy(self) -> str | None:
        """Why the engine must not get requests, or None."""
        if self.death is not None:
            return self._end()
        began = self._step_began
        if began is not None and (seconds := time.monotonic() - began) > self.settings.stuck_after_s:
            return f"the engine loop has been in one step for {seconds:.0f} s"
        return self.weights.half_updated or (_NO_KV if self._kv_released else None)

    # ---- actions; each runs on the engine's thread, through `call` ----

    def abort(self, rid: str | None, reason: str) -> int:
        """Finish one request, or all when `rid` is None, with the tokens so far; returns how many."""
        chosen = [r for r in (*self._running, *self._waiting) if rid is None or r.rid == rid]
        for request in chosen:
            request.finish_reason = {"type": "abort", "message": reason}
        if chosen:
            self._waiting = deque(r for r in self._waiting if r.finish_reason is None)
            self._drop_finished()
            self.counters.aborted += len(chosen)
            self._deliver(chosen)
        return len(chosen)

    def flush(self) -> None:
        """Forget cached prompts. Raises RequestRefused while requests run or wait."""
        if self._running or self._waiting:
            raise RequestRefused(
                f"the cache is flushed only when nothing runs or waits: {len(self._running)} requests run, "
                f"{len(self._waiting)} wait"
            )
        self._prompts.clear()

    def pause(self, mode: str) -> None:
        """Stop stepping.

        "abort" ends all requests with their tokens so far, "in_place" keeps them where they are, and "retract" drops
        their KV and puts them back in front of the queue: they resume by computing prompt and tokens so far anew.
        """
        if mode not in ("abort", "in_place", "retract"):
            raise RequestRefused(f'mode is {mode!r}; use "abort", "in_place" or "retract"')
        if mode == "abort":
            self.abort(None, "generation was paused")
        elif mode == "retract":
            self._retract()
        self.paused = True

    def _retract(self) -> None:
        for request in reversed(self._running):
            request.retract()
            self._waiting.appendleft(request)
        self._running = []
        self._rebuild()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def update_weights(
        self, payload: str, flush_cache: bool, weight_version: str | None, abort_all_requests: bool
    ) -> int:
        """Replace the weights of one encoded bucket; a `weight_version` marks the last. Returns how many tensors."""
        return self.replace_weights(
            lambda: self._codec.decode(payload), flush_cache, weight_version, abort_all_requests
        )

    def replace_weights(
        self,
        read: Callable[[], NamedTensors],
        flush_cache: bool,
        weight_version: str | None,
        abort_all_requests: bool,
        whole: bool = False,
    ) -> int:
        """Replace the weights that `read` gives; a `weight_version` marks the last bucket. Returns how many tensors.

        `whole` says that they are the model's: then every parameter is among them, in any float dtype, and when they do
        not fit, the present weights stay as they are.
        """
        if self.weights.released:
            raise RequestRefused("the weights are released; POST /resume_memory_occupation with the tag weights first")
        if abort_all_requests:
            self.abort(None, "weights were updated")
        if (self._running or self._waiting) and not self.paused:
            raise RequestRefused(
                f"weights are not replaced under running requests: {len(self._running)} run, {len(self._waiting)} "
                "wait; abort them, or pause generation first"
            )
        if flush_cache:
            self.flush()
        try:
            named = self.weights.fitted(read()) if whole else read()
        except (ValueError, OSError) as error:
            self.weights.fail(str(error))
        self._weights_change()
        self.weights.replace(named, complete=whole or weight_version is not None)
        self.decoder.refresh()
        if weight_version is not None:
            self.weight_version = weight_version
        return len(named)

    def set_version(self, version: str, abort_all_requests: bool) -> None:
        """Name the present weights. Cached prompts of another version are not reused."""
        if abort_all_requests:
            self.abort(None, "the weight version changed")
        self._weights_change()
        self.weight_version = version

    def release_memory(self, tags: Collection[str]) -> None:
        """Free the memory of `tags`: the weights, or the KV of slots and cached prompts.

        Requests are refused (503) until it is resumed, and after a release of the weights until a complete update.
        Raises RequestRefused while requests run or wait.
        """
        _check_tags(tags)
        if self._running or self._waiting:
            raise RequestRefused(
                f"memory is released only when nothing runs or waits: {len(self._running)} requests run, "
                f"{len(self._waiting)} wait; abort them first"
            )
        self._prompts.clear()
        if "kv_cache" in tags:
            self._cache.drop()
            self._kv_released = True
        if "weights" in tags:
            self.weights.release()
        _return_free_memory(self.decoder.device)

    def resume_memory(self, tags: Collection[str]) -> None:
        """Take the memory of `tags` again. Weights are zeros, and the engine unhealthy, until a complete update."""
        _check_tags(tags)
        if "weights" in tags:
            self.weights.restore()
        if "kv_cache" in tags:
            self._kv_released = False

    def reset_weights(self) -> None:
        """Fill all weights with garbage (a step of the proof that an update sends every parameter)."""
        if (self._running or self._waiting) and not self.paused:
            raise RequestRefused(
                f"{len(self._running)} requests run and {len(self._waiting)} wait; abort them, or pause generation first"
            )
        self._weights_change()
        self._garbage_seed += 1
        self.weights.fill_with_garbage(self._garbage_seed)
        self.decoder.refresh()

    def probe(self) -> int:
        """Compute one greedy token without a slot, whether paused or not."""
        self.weights.require_present()
        token = min(self.model.eos_token_ids, default=0)
        entries, _ = self.decoder.prefill([[token]])
        return int(self.decoder.logits(entries[0].hidden_H[None]).argmax())

    # ---- the loop ----

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._step_began = None
                    self._receive()
                    self._step_began = time.monotonic()
                    if not self.paused:
                        self._admit()
                        if self._running:
                            self._decode()
        except Exception:
            logger.exception("the engine loop died")
            self.death = traceback.format_exc()
        finally:
            self._step_began = None
            self.death = self.death or "the engine was stopped"
            self._fail_everything()

    def _receive(self) -> None:
        """Take what has arrived; when there is nothing to do, wait for it, and then a moment for siblings."""
        idle = self.paused or not (self._running or self._waiting)
        if idle:
            self._take(self._inbox.get())
        deadline = time.monotonic() + self.settings.sibling_wait_s if idle and self._waiting else None
        while not self._stopping:
            try:
                if deadline is None or self.paused:
                    self._take(self._inbox.get_nowait())
                else:
                    self._take(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return

    def _take(self, item: Request | _Call) -> None:
        if isinstance(item, _Call):
            if not item.answer.set_running_or_notify_cancel():
                return  # the caller went away before its turn
            self._step_began = time.monotonic()
            try:
                item.answer.set_result(item.run())
            except RequestRefused as refusal:
                item.answer.set_exception(refusal)
            except Exception as error:
                item.answer.set_exception(error)
                raise
            self._step_began = None
        elif item.rid in self._rids:
            item.error, item.error_status = f"rid {item.rid!r} is in flight already; rids are unique", 400
            item.done([item])
        elif (absent := self.weights.absent or (_NO_KV if self._kv_released else None)) is not None:
            item.error, item.error_status = absent, 503
            item.done([item])
        elif self.settings.enable_deterministic_inference and item.params.draws and item.params.sampling_seed is None:
            item.error, item.error_status = _NO_SEED, 400
            item.done([item])
        else:
            self._rids.add(item.rid)
            self._waiting.append(item)

    def _admit(self) -> None:
        """Compute prompts of waiting requests, draw their first tokens, and give slots to those that go on."""
        while self._waiting:
            batch, to_compute = self._next_batch()
            if not batch:
                return
            entries = self._compute_prompts(batch, to_compute)
            self._start(batch, entries)

    def _next_batch(self) -> tuple[list[Request], dict[PromptKey, Request]]:
        batch: list[Request] = []
        to_compute: dict[PromptKey, Request] = {}
        tokens = 0
        longest = max((r.longest for r in self._running), default=0)
        while self._waiting:
            request = self._waiting[0]
            slots = len(self._running) + len(batch) + 1
            longest = max(longest, request.longest)
            room = self.decoder.places(longest)
            if slots > self.settings.max_running_requests or not self._cache.fits(slots, room):
                break
            key = request.prompt_key
            if request.scores_prompt or (key not in to_compute and self._prompts.get(key) is None):
                tokens += request.length
                if batch and tokens > self.settings.max_prefill_tokens:
                    break
                if not request.scores_prompt:
                    to_compute[key] = request
            batch.append(self._waiting.popleft())
        return batch, to_compute

    def _compute_prompts(self, batch: list[Request], to_compute: dict[PromptKey, Request]) -> list[PromptEntry]:
        """The prompt entry of every request of a batch, each distinct prompt computed at most once."""
        scored = [r for r in batch if r.scores_prompt]
        computed = [*to_compute.values(), *scored]
        fresh: dict[PromptKey, PromptEntry] = {}
        own: dict[str, PromptEntry] = {}
        hits = {key: entry for r in batch if (entry := self._prompts.get(key := r.prompt_key)) is not None}
        if computed:
            entries, hidden = self.decoder.prefill([list(r.prompt_key[1]) for r in computed])
            self.counters.prefill_tokens += sum(e.tokens for e in entries)
            for request, entry, hidden_TH in zip(computed, entries, hidden, strict=True):
                key = request.prompt_key
                if request.scores_prompt:
                    own[request.rid] = entry
                    self._score(request, hidden_TH)
                else:
                    fresh[key] = entry
                self._prompts.put(key, entry)
        computers = {id(r) for r in computed}
        chosen: list[PromptEntry] = []
        for request in batch:
            key = request.prompt_key
            chosen.append(own.get(request.rid) or fresh.get(key) or hits[key])
            if request.output_ids:
                continue  # it was retracted, and its prompt counted before
            request.cached_tokens = 0 if id(request) in computers else len(request.input_ids)
            self.counters.prompt_tokens += len(request.input_ids)
            self.counters.cached_tokens += request.cached_tokens
        return chosen

    def _score(self, request: Request, hidden_TH: torch.Tensor) -> None:
        """Fill in the log-probabilities of a prompt's tokens after its first `logprob_start_len` + 1."""
        start = request.logprob_start_len
        ids_T = torch.tensor(request.input_ids[start + 1 :], dtype=torch.long, device=self.decoder.device)
        request.input_logprobs = []
        for logprobs_CV in self.decoder.logprobs(hidden_TH[start:-1], request.params.temperature or 1.0):
            first = len(request.input_logprobs)
            ids_C1 = ids_T[first : first + len(logprobs_CV), None]
            request.input_logprobs += logprobs_CV.gather(1, ids_C1).squeeze(1).tolist()
            request.input_alternatives.add(logprobs_CV, request.top_logprobs_num, request.token_ids_logprob)
        if not all(map(math.isfinite, request.input_logprobs)):
            request.error = self._not_finite("in the prompt")

    def _start(self, batch: list[Request], entries: list[PromptEntry]) -> None:
        finished = [r for r in batch if r.params.max_new_tokens == 0 or r.error is not None]
        for request in finished:
            request.finish_reason = {"type": "length", "length": 0}
        drawing = [(r, e) for r, e in zip(batch, entries, strict=True) if r.finish_reason is None]
        going: list[tuple[Request, PromptEntry]] = []
        if drawing:
            distinct = list({id(e): e for _, e in drawing}.values())
            row_of = {id(e): row for row, e in enumerate(distinct)}
            logits_PV = self.decoder.logits(torch.stack([e.hidden_H for e in distinct]))
            requests = [r for r, _ in drawing]
            sampling = BatchSampling([r.params for r in requests], self.decoder.device)
            logits_BV = logits_PV[[row_of[id(e)] for _, e in drawing]]
            tokens, logprobs = self._draw(logits_BV, sampling, requests)
            for (request, entry), token, logprob in zip(drawing, tokens.tolist(), logprobs.tolist(), strict=True):
                if self._accept(request, token, logprob):
                    finished.append(request)
                else:
                    going.append((request, entry))
        if going:
            used = len(self._running)
            everyone = [*self._running, *(r for r, _ in going)]
            self._cache.ensure(
                len(everyone),
                self.decoder.places(max(r.length for r in everyone)),
                limit=self.decoder.places(max(r.longest for r in everyone)),
                used=used,
                longest=max((r.length - 1 for r in self._running), default=0),  # the newest token has no KV yet
            )
            self._cache.write(used, [e.kv for _, e in going])
            self._running = everyone
            self._rebuild()
        self._deliver(finished)

    def _decode(self) -> None:
        running = self._running
        longest = max(r.length for r in running)
        self._cache.ensure(
            len(running),
            self.decoder.places(longest),
            limit=self.decoder.places(max(r.longest for r in running)),
            used=len(running),
            longest=longest - 1,
        )
        hidden_BH = self.decoder.decode(self._tokens_B, self._lengths_B, longest - 1, self._cache)
        assert self._sampling is not None  # set with every change of `_running`
        tokens_B, logprobs_B = self._draw(self.decoder.logits(hidden_BH), self._sampling, running)
        self._tokens_B = tokens_B
        self._lengths_B = self._lengths_B + 1
        self.counters.decode_steps += 1
        self.counters.decode_tokens += len(running)
        pairs = zip(running, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        finished = [r for r, token, logprob in pairs if self._accept(r, token, logprob)]
        if finished:
            self._drop_finished()
            self._deliver(finished)

    def _draw(
        self, logits_BV: torch.Tensor, sampling: BatchSampling, requests: list[Request]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        banned = [
            (row, sorted(r.stop_ids))
            for row, r in enumerate(requests)
            if len(r.output_ids) < r.params.min_new_tokens and r.stop_ids
        ]
        positions = [r.length for r in requests] if sampling.any_seeded else []
        drawn = sample(logits_BV, sampling, positions, self._rng, banned)
        for row, request in enumerate(requests):
            if request.wants_alternatives:  # `sample` has divided the logits by the temperature
                logprobs_1V = logits_BV[row : row + 1].log_softmax(1)
                request.output_alternatives.add(logprobs_1V, request.top_logprobs_num, request.token_ids_logprob)
        return drawn

    def _accept(self, request: Request, token: int, logprob: float) -> bool:
        if math.isfinite(logprob):
            finished = request.accept(token, logprob)
            if request.stream and not finished and len(request.output_ids) >= request.show_at:
                request.show_tokens(self.weight_version)
            return finished
        request.error = self._not_finite(f"after {request.length} tokens")
        return True

    def _not_finite(self, where: str) -> str:
        return (
            f"logits are not finite {where}: the weights of version {self.weight_version} hold NaN or inf, or overflow "
            "in this dtype"
        )

    def _drop_finished(self) -> None:
        """Give the slots of finished requests to the last running ones, so that used slots stay 0 to n - 1."""
        over = [r.finish_reason is not None or r.error is not None for r in self._running]
        for slot, request in enumerate(self._running):
            if request.error is not None:
                self._cache.wipe(slot)
        left = over.count(False)
        if left == len(over):
            return
        holes = [slot for slot in range(left) if over[slot]]
        movers = [slot for slot in range(left, len(over)) if not over[slot]]
        if holes:
            self._cache.move(movers, holes, max(self._running[slot].length for slot in movers))
            for source, target in zip(movers, holes, strict=True):
                self._running[target] = self._running[source]
        self._running = self._running[:left]
        self._rebuild()

    def _rebuild(self) -> None:
        """Batch tensors from the running requests. The newest token of each is not in the cache yet."""
        device = self.decoder.device
        self._tokens_B = torch.tensor([r.output_ids[-1] for r in self._running], dtype=torch.long, device=device)
        self._lengths_B = torch.tensor([r.length - 1 for r in self._running], dtype=torch.long, device=device)
        self._sampling = BatchSampling([r.params for r in self._running], device)

    def _deliver(self, finished: list[Request]) -> None:
        if not finished:
            return
        now = time.monotonic()
        by_receiver: dict[Callable[[list[Request]], None], list[Request]] = defaultdict(list)
        for request in finished:
            request.finished_at = now
            request.weight_version = self.weight_version
            self._rids.discard(request.rid)
            by_receiver[request.done].append(request)
        self.counters.finished += sum(r.error is None for r in finished)
        self.counters.failed += sum(r.error is not None for r in finished)
        for done, group in by_receiver.items():
            done(group)

    def _weights_change(self) -> None:
        """Called before weights or version change: no chunk of a stream holds new tokens of two versions."""
        for request in (*self._running, *self._waiting):
            request.show_tokens(self.weight_version)
        self._prompts.clear()

    def _stop(self) -> None:
        self.abort(None, "the engine was stopped")
        self._stopping = True

    def _fail_everything(self) -> None:
        """Answer whatever still waits after the loop has ended."""
        reason = self._end()
        with self._end_lock:
            left = [*self._running, *self._waiting]
            self._running, self._waiting = [], deque()
            while True:
                try:
                    item = self._inbox.get_nowait()
                except queue.Empty:
                    break
                if isinstance(item, _Call):
                    if item.answer.set_running_or_notify_cancel():
                        item.answer.set_exception(EngineError(reason))
                else:
                    left.append(item)
        for request in left:
            request.error = reason
        self._deliver(left)

    def _end(self) -> str:
        return f"the engine loop has ended: {(self.death or '').strip().splitlines()[-1]}"


def _check_tags(tags: Collection[str]) -> None:
    unknown = sorted(set(tags) - set(MEMORY_TAGS))
    if unknown:
        raise RequestRefused(f"tags holds {', '.join(unknown)}; known are {', '.join(MEMORY_TAGS)}")


def _return_free_memory(device: torch.device) -> None:
    """Hand freed memory back to the system, which allocators keep for later otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _kv_budget(settings: EngineSettings, device: torch.device) -> int:
    if settings.kv_cache_mb is not None:
        return settings.kv_cache_mb * 2**20
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    return int(0.3 * free)
