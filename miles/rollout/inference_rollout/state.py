"""What every request of a rollout shares: tokenizer, sampling parameters, rewards, and how many may be in flight."""

from __future__ import annotations

import asyncio
import copy
import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import xxhash

from miles.core.samples import Sample
from miles.rollout.inference_rollout.compatibility import GenerateFn, load_generate_fn
from miles.rollout.rm_hub.hub import RewardHub
from miles.rollout.sample_hooks import SampleHooks
from miles.utils.hf import context_length, load_tokenizer

DEFAULT_GENERATE_FN = "miles.rollout.generate_hub.single_turn.generate"
SEED_BITS = 31

current_state: ContextVar[GenerateState | None] = ContextVar("current_state", default=None)
"""The state on whose behalf a generate function runs; None outside."""


@dataclass(slots=True)
class _Common:
    """What a state and those derived from it have in common."""

    semaphore: asyncio.Semaphore
    rollout_id: int = 0
    weight_version: str | None = None
    aborted: bool = False
    last_generation_end: float = 0.0


class GenerateState:
    """Shared by all requests of one rollout function; hooks read `args`, `tokenizer` and `sampling_params`."""

    def __init__(self, args: Any, *, tokenizer: Any = None, reward_hub: RewardHub | None = None) -> None:
        self.args = args
        self.tokenizer = tokenizer or load_tokenizer(args.hf_checkpoint, args.chat_template_path)
        self.reward_hub = reward_hub or RewardHub(args)
        self.sampling_params: dict[str, Any] = sampling_params_of(args)
        """Sent complete with every request, so that no default of engine or model takes part."""
        self.max_context_len: int | None = args.rollout_max_context_len or context_length(args.hf_checkpoint)
        """Tokens that prompt and response may have together; None where neither the run nor the model limits them."""
        engines = len(args.rollout_external_engine_addrs) or args.rollout_engines
        self._common = _Common(asyncio.Semaphore(args.sglang_server_concurrency * engines))
        self._generate_fns: dict[str, GenerateFn] = {}
        self.sample_hooks = SampleHooks(args.rollout_sample_hook_path)

    def derived(
        self, args: Any, *, min_new_tokens: int, max_context_len: int | None, reward_hub: RewardHub | None = None
    ) -> GenerateState:
        """The same engines and the same limit on requests with other settings, such as those of an evaluation dataset.

        `reward_hub` takes the place of this state's, and is closed by whoever made it.
        """
        state = copy.copy(self)
        state.args, state.max_context_len = args, max_context_len
        state.sampling_params = {**sampling_params_of(args), "min_new_tokens": min_new_tokens}
        state.reward_hub = reward_hub or self.reward_hub
        return state

    @property
    def semaphore(self) -> asyncio.Semaphore:
        """Requests that may be in flight."""
        return self._common.semaphore

    @property
    def rollout_id(self) -> int:
        """Step that samples are being made for."""
        return self._common.rollout_id

    @rollout_id.setter
    def rollout_id(self, rollout_id: int) -> None:
        self._common.rollout_id = rollout_id

    @property
    def weight_version(self) -> str | None:
        """Version that the engines hold, as far as this process knows; None before the first publish."""
        return self._common.weight_version

    @weight_version.setter
    def weight_version(self, version: str | None) -> None:
        self._common.weight_version = version

    @property
    def aborted(self) -> bool:
        """True while the surplus of a batch is being cancelled: nothing new may start."""
        return self._common.aborted

    @aborted.setter
    def aborted(self, aborted: bool) -> None:
        self._common.aborted = aborted

    @property
    def last_generation_end(self) -> float:
        """When a generation last ended (monotonic seconds)."""
        return self._common.last_generation_end

    def url(self, route: str) -> str:
        """Address of a route behind the router: `state.url("/generate")`."""
        return self.args.router_url.rstrip("/") + route

    def generate_fn(self, sample: Sample) -> tuple[str, GenerateFn]:
        """Path and function that generate for `sample`: its own, the run's, or a single turn."""
        path = sample.generate_function_path or self.args.custom_generate_function_path or DEFAULT_GENERATE_FN
        if path not in self._generate_fns:
            self._generate_fns[path] = load_generate_fn(path)
        return path, self._generate_fns[path]

    def params_for(self, sample: Sample, base: dict[str, Any] | None = None, stream: str = "") -> dict[str, Any]:
        """A copy of the sampling parameters with the seed of this sample."""
        index = 0 if sample.index is None else sample.index
        return {
            **(self.sampling_params if base is None else base),
            "sampling_seed": sampling_seed(self.args.rollout_seed, index, stream),
        }

    def note_generation_end(self) -> None:
        """Remember now as the end of the latest generation."""
        self._common.last_generation_end = time.monotonic()

    async def close(self) -> None:
        """End the reward workers."""
        await self.reward_hub.close()


def sampling_params_of(args: Any) -> dict[str, Any]:
    """Every sampling parameter that the settings of a run determine; the seed comes with the sample."""
    return {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "min_new_tokens": 0,
        "stop": list(args.rollout_stop),
        "stop_token_ids": list(args.rollout_stop_token_ids),
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


def sampling_seed(run_seed: int, index: int, stream: str = "") -> int:
    """Seed of one sample, in [0, 2^31): the same in every run of one seed, for whatever order requests arrive in.

    Samples whose numbers are less than 2^31 apart have different seeds: the number is shifted by a hash of run seed
    and `stream` (evaluation sets have streams of their own) and mixed by steps that can be undone.
    """
    size = 1 << SEED_BITS
    x = (xxhash.xxh64_intdigest(f"{run_seed}/{stream}".encode()) + index) % size
    for _ in range(2):
        x ^= x >> 16
        x = x * 0x45D9F3B % size
    return x ^ (x >> 16)
