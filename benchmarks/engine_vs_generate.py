"""Speed of the torch engine, in process and over HTTP, against `model.generate` of transformers.

    python benchmarks/engine_vs_generate.py --json OUT

Same random weights (the shape of SmolLM2-135M unless told otherwise), dtype, threads and batch. `generate` gets one
left-padded batch and runs to the longest output; the tokens that count are those asked for, for both sides.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.model import load_model
from miles.backends.torch_engine.request import Request
from miles.backends.torch_engine.sampling import SamplingParams
from miles.backends.torch_engine.settings import EngineSettings
from miles.utils.process import ServerProcess

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "vocab_size": 512,
    },
}


@dataclass(frozen=True)
class Workload:
    """Prompts and the number of tokens wanted after each."""

    name: str
    prompts: list[list[int]]
    new_tokens: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)


def workloads(vocab_size: int, seed: int) -> list[Workload]:
    rng = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(length)]

    same = prompt(32)
    ragged = [prompt(rng.randint(16, 256)) for _ in range(8)]
    return [
        Workload("32 distinct prompts of 32 tokens, 32 new", [prompt(32) for _ in range(32)], [32] * 32),
        Workload("32 times one prompt of 32 tokens, 32 new", [same] * 32, [32] * 32),
        Workload(
            "8 prompts of 16-256 tokens, n = 4, 8-64 new",
            [p for p in ragged for _ in range(4)],
            [rng.randint(8, 64) for _ in range(32)],
        ),
    ]


def run_generate(model: Any, load: Workload, threads: int) -> None:
    torch.set_num_threads(threads)
    width = max(map(len, load.prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in load.prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in load.prompts])
    longest = max(load.new_tokens)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=longest,
            min_new_tokens=longest,
            pad_token_id=0,
        )
    assert out.shape == (len(load.prompts), width + longest)


def run_engine(engine: Engine, load: Workload) -> None:
    engine.call(engine.flush).result()
    requests = [
        Request(input_ids=p, params=SamplingParams(max_new_tokens=n, ignore_eos=True), return_logprob=True)
        for p, n in zip(load.prompts, load.new_tokens, strict=True)
    ]
    engine.generate(requests)
    assert sum(len(r.output_ids) for r in requests) == load.tokens


async def _post_all(url: str, load: Workload) -> None:
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.post("/flush_cache") as answer:
            assert answer.status == 200

        async def one(prompt: list[int], count: int) -> None:
            sampling = {"max_new_tokens": count, "ignore_eos": True, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            async with session.post("/generate", json=body) as answer:
                assert len((await answer.json())["output_ids"]) == count

        await asyncio.gather(*(one(p, n) for p, n in zip(load.prompts, load.new_tokens, strict=True)))


@contextmanager
def http_engine(folder: Path, threads: int, dtype: str) -> Iterator[str]:
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(folder)]
    command += ["--threads", str(threads), "--dtype", dtype, "--exit-on-stdin-close"]
    process = ServerProcess("torch-engine", command, folder / "engine.log")
    try:
        yield f"http://127.0.0.1:{process.wait_ready(300)['port']}"
    finally:
        process.stop()


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(folder: Path, rounds: int, threads: int, dtype: str, seed: int, with_http: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(threads)
    settings = EngineSettings(str(folder), threads=threads, dtype=dtype)
    engine = Engine(load_model(settings), settings).start()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    results: list[dict[str, Any]] = []
    with http_engine(folder, threads, dtype) if with_http else nullcontext("") as url:
        for load in workloads(model.config.vocab_size, seed):
            sides: dict[str, Callable[[], None]] = {
                "generate": lambda load=load: run_generate(model, load, threads),
                "engine": lambda load=load: run_engine(engine, load),
            }
            if with_http:
                sides["http"] = lambda load=load: asyncio.run(_post_all(url, load))
            times: dict[str, list[float]] = {side: [] for side in sides}
            for action in sides.values():
                action()
            for _ in range(rounds):
                for side, action in sides.items():
                    times[side].append(seconds(action))
            median = {side: statistics.median(values) for side, values in times.items()}
            results.append(
                {
                    "workload": load.name,
                    "tokens": load.tokens,
                    "seconds": {side: [round(t, 3) for t in values] for side, values in times.items()},
                    "tokens_per_s": {side: round(load.tokens / t, 1) for side, t in median.items()},
                    "times_generate": {side: round(median["generate"] / t, 2) for side, t in median.items()},
                }
            )
            print(json.dumps(results[-1]), flush=True)
    engine.stop()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds after one warm-up")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--no-http", action="store_true", help="leave the served engine out (it needs fastapi)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(args.seed)
        config = LlamaConfig(**SHAPES[args.shape], max_position_embeddings=2048, tie_word_embeddings=True)
        AutoModelForCausalLM.from_config(config).to(getattr(torch, args.dtype)).save_pretrained(name)
        results = measure(Path(name), args.rounds, args.threads, args.dtype, args.seed, not args.no_http)
    report = {
        "shape": args.shape,
        "dtype": args.dtype,
        "threads": args.threads,
        "rounds": args.rounds,
        "torch": torch.__version__,
        "results": results,
    }
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
