"""What an engine process is started with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass

from miles.utils.process import TOKEN_VARIABLE

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class EngineSettings:
    """Settings of one engine; the flags of `python -m miles.backends.torch_engine` have the same names."""

    model_path: str
    """Folder with config.json and safetensors weights."""
    device: str = "cpu"
    """Torch device that holds weights and KV."""
    dtype: str = "auto"
    """Data type of weights, activations and KV; "auto" takes that of the folder."""
    max_running_requests: int = 256
    """Requests decoded together; further ones wait."""
    context_length: int | None = None
    """Longest prompt plus output in tokens; None takes the model's own."""
    threads: int = 2
    """CPU threads for large products; small steps run on one thread, where hand-over costs more than it saves."""
    seed: int = 0
    """Seeds draws of requests that carry no sampling_seed."""
    kv_cache_mb: int | None = None
    """MiB that KV of running requests may take; None takes 30 % of the memory free at start."""
    prompt_cache_tokens: int = 65536
    """Prompt tokens whose KV is kept for later siblings of the same prompt."""
    max_prefill_tokens: int = 8192
    """Prompt tokens computed in one batch; a single longer prompt runs alone."""
    sibling_wait_s: float = 0.002
    """Seconds an idle engine waits for siblings of a first request before it starts computing."""
    stuck_after_s: float = 300.0
    """Seconds one step may take before /health answers 503."""
    enable_deterministic_inference: bool = False
    """Give a request the same bits alone as among others, and resumed as uninterrupted (see `deterministic.py`)."""


@dataclass(frozen=True)
class ServerSettings:
    """Where and how the engine is served."""

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    ready_fd: int | None = None
    exit_on_stdin_close: bool = False


def parse_settings(argv: Sequence[str] | None = None) -> tuple[EngineSettings, ServerSettings]:
    """Read the command line; exits with usage on a mistake, as argparse does."""
    parser = argparse.ArgumentParser(prog="python -m miles.backends.torch_engine", allow_abbrev=False)
    add = parser.add_argument
    add("--model-path", required=True, help="folder with config.json and safetensors weights")
    add("--device", default="cpu")
    add("--dtype", default="auto", choices=DTYPES, help="of weights, activations and KV; auto: that of the folder")
    add("--max-running-requests", type=_positive, default=256, help="requests decoded together")
    add("--context-length", type=_positive, default=None, help="tokens of prompt plus output; default: the model's")
    add("--threads", type=_positive, default=2, help="CPU threads for large products")
    add("--seed", type=int, default=0, help="seeds draws of requests without sampling_seed")
    add("--kv-cache-mb", type=_positive, default=None, help="memory for KV of running requests")
    add("--prompt-cache-tokens", type=int, default=65536, help="prompt tokens whose KV is kept for later siblings")
    add("--max-prefill-tokens", type=_positive, default=8192, help="prompt tokens computed in one batch")
    add("--stuck-after-s", type=float, default=300.0, help="seconds of one step after which /health answers 503")
    add(
        "--enable-deterministic-inference",
        action="store_true",
        help="a request's tokens and log-probabilities do not depend on other requests; every drawing request must "
        "carry a sampling_seed",
    )
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 lets the system choose")
    add("--api-key", default=os.environ.get(TOKEN_VARIABLE), help="token that control routes require")
    add("--ready-fd", type=int, default=None, help="descriptor that gets one JSON line once the engine serves")
    add("--exit-on-stdin-close", action="store_true", help="end when standard input closes")
    values = vars(parser.parse_args(argv))
    server = {name: values.pop(name) for name in ("host", "port", "api_key", "ready_fd", "exit_on_stdin_close")}
    return EngineSettings(**values), ServerSettings(**server)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value
