import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.backends.torch_engine import deterministic, kv_cache
from miles.backends.torch_engine.decoder import Decoder
from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.model import load_model
from miles.backends.torch_engine.request import Request
from miles.backends.torch_engine.sampling import BatchSampling, SamplingParams, sample
from miles.backends.torch_engine.settings import EngineSettings
from miles.errors import EngineError
from miles.utils.process import ServerProcess
from tests.fast.torch_engine.support import (
    LETTERS,
    Client,
    assert_matches_reference,
    make_model,
    request,
    running_engine,
)

FLAG = "--enable-deterministic-inference"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False, "vocab_size": 1031}),
    "qwen3 with 8 queries to a key": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama of one head, with biases": (
        "llama",
        {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 52, "attention_bias": True},
    ),
}
WAYS_TO_DRAW: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.02},
]
Bits = tuple[list[int], list[float]]


@pytest.fixture(scope="module", params=MODELS)
def any_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = MODELS[request.param]
    return make_model(tmp_path_factory.mktemp(family), family, **overrides)


def some_requests(count: int, seed: int = 0, longest: int = 200, new: int = 16) -> list[Callable[[], Request]]:
    """Makers of equal requests: prompts of 1 to `longest` tokens, some of them shared, and every way to draw."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, rng.choice([20, 60, longest])) for _ in range(count)]
    prompts = [[rng.randrange(2, len(LETTERS)) for _ in range(length)] for length in lengths]
    makers: list[Callable[[], Request]] = []
    for i in range(count):
        prompt, tokens, how = rng.choice(prompts), rng.randint(1, new), WAYS_TO_DRAW[i % len(WAYS_TO_DRAW)]
        makers.append(lambda p=prompt, t=tokens, s=1000 + i, h=how: request(p, t, sampling_seed=s, **h))
    return makers


def bits(done: Request) -> Bits:
    assert done.error is None
    return done.output_ids, done.output_logprobs


def alone(engine: Engine, makers: list[Callable[[], Request]]) -> list[Bits]:
    return [bits(engine.generate([make()])[0]) for make in makers]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_has_the_same_bits_alone_and_among_31_others_in_any_order(any_folder: Path, dtype: str) -> None:
    makers = some_requests(32)
    with running_engine(any_folder, dtype=dtype, enable_deterministic_inference=True) as engine:
        expected = alone(engine, makers)
        engine.call(engine.flush).result()
        order = random.Random(0).sample(range(32), 32)
        done = engine.generate([makers[i]() for i in order])
        assert [bits(r) for r in done] == [expected[i] for i in order]
        assert len({tuple(ids) for ids, _ in expected}) > 16


def test_more_rows_than_a_block_and_two_threads_change_no_bit(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deterministic, "SMALL_STEP_FLOP", 0.0)
    makers = some_requests(40, seed=3, new=8)
    with running_engine(model_folder, threads=2, enable_deterministic_inference=True) as engine:
        assert alone(engine, makers) == [bits(r) for r in engine.generate([make() for make in makers])]


@pytest.mark.parametrize("settings", [{"max_running_requests": 3}, {"max_prefill_tokens": 16}, {"kv_cache_mb": 1}])
def test_no_limit_of_the_engine_changes_a_bit(model_folder: Path, settings: dict[str, int]) -> None:
    makers = some_requests(16, seed=4)
    with running_engine(model_folder, enable_deterministic_inference=True) as engine:
        expected = alone(engine, makers)
    with running_engine(model_folder, enable_deterministic_inference=True, **settings) as engine:
        if "kv_cache_mb" in settings:
            engine._cache.budget_tokens = 600
        assert [bits(r) for r in engine.generate([make() for make in makers])] == expected


def test_a_cached_prompt_gives_the_bits_of_a_computed_one(model_folder: Path) -> None:
    prompt = list(range(2, 32)) * 3
    with running_engine(model_folder, enable_deterministic_inference=True) as engine:
        first, second = (engine.generate([request(prompt, 25, sampling_seed=5)])[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, 90)
        assert bits(first) == bits(second)
        [greedy] = engine.generate([request(prompt, 25, temperature=0.0)])
    with running_engine(model_folder, prompt_cache_tokens=0, enable_deterministic_inference=True) as engine:
        third, fourth = (engine.generate([request(prompt, 25, sampling_seed=5)])[0] for _ in range(2))
        assert fourth.cached_tokens == 0
        assert bits(third) == bits(fourth) == bits(first)
        assert bits(engine.generate([request(prompt, 25, temperature=0.0)])[0]) == bits(greedy)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resubmitted_request_goes_on_with_the_bits_it_would_have_had(any_folder: Path, dtype: str) -> None:
    with running_engine(any_folder, dtype=dtype, enable_deterministic_inference=True) as engine:
        for prompt, how in (([5], WAYS_TO_DRAW[0]), (list(range(2, 42)) * 3 + [7] * 5, WAYS_TO_DRAW[3])):
            [whole] = engine.generate([request(prompt, 40, sampling_seed=9, **how)])
            rest = [
                request([*prompt, *whole.output_ids[:k]], 40 - k, sampling_seed=9, **how)
                for k in (1, 2, 3, 4, 5, 31, 39)
            ]
            for done in engine.generate(rest):
                k = 40 - done.params.max_new_tokens
                assert bits(done) == (whole.output_ids[k:], whole.output_logprobs[k:])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_scored_answer_has_the_bits_with_which_it_was_drawn(any_folder: Path, temperature: float) -> None:
    with running_engine(any_folder, enable_deterministic_inference=True) as engine:
        drawn = engine.generate(
            [request([3, 4, 5 + i], 70, sampling_seed=i, temperature=temperature) for i in range(5)]
        )
        scored = engine.generate(
            [request(r.input_ids + r.output_ids, 0, logprob_start_len=2, temperature=temperature) for r in drawn]
        )
        assert [r.input_logprobs for r in scored] == [r.output_logprobs for r in drawn]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
def test_no_schedule_of_joins_aborts_retractions_and_resubmissions_changes_a_bit(
    model_folder: Path, seed: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_PLACE_STEP", 4)
    rng = random.Random(seed)
    makers = some_requests(12, seed=seed, longest=60)
    with running_engine(model_folder, dtype=dtype, enable_deterministic_inference=True) as plain:
        expected = alone(plain, makers)
    settings = EngineSettings(
        str(model_folder),
        dtype=dtype,
        threads=1,
        kv_cache_mb=64,
        prompt_cache_tokens=rng.choice([0, 80, 1000]),
        max_prefill_tokens=rng.choice([16, 8192]),
        max_running_requests=rng.choice([3, 64]),
        enable_deterministic_inference=True,
    )
    engine = Engine(load_model(settings), settings)  # never started: the test takes its steps
    engine._cache.budget_tokens = rng.choice([300, 600, 10**6])
    came = 0
    before: dict[
        str, tuple[int, Bits]
    ] = {}  # of a request: which one it is, and what it had before it was resubmitted

    def submit(which: int, so_far: Bits = ([], [])) -> None:
        whole = makers[which]()
        left = whole.params.max_new_tokens - len(so_far[0])
        how = {name: getattr(whole.params, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        joining = request(whole.input_ids + so_far[0], left, sampling_seed=1000 + which, **how)
        joining.done = finish
        before[joining.rid] = (which, so_far)
        engine._waiting.append(joining)

    def finish(requests: list[Request]) -> None:
        nonlocal came
        for done in requests:
            which, (ids, logprobs) = before.pop(done.rid)
            so_far = (ids + done.output_ids, logprobs + done.output_logprobs)
            assert done.finish_reason is not None
            if done.finish_reason["type"] == "abort":
                submit(which, so_far)
            else:
                assert so_far == expected[which]
                came += 1

    with torch.inference_mode():
        for _ in range(50):
            for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
                submit(rng.randrange(len(makers)))
            live = [*engine._running, *engine._waiting]
            match rng.randrange(8):
                case 0 if live:
                    engine.abort(rng.choice(live).rid, "test")
                case 1:
                    engine.pause("retract")
                    engine.resume()
                case 2 if rng.random() < 0.3:
                    engine.abort(None, "test")
            engine._admit()
            if engine._running:
                engine._decode()
        while engine._running or engine._waiting:
            engine._admit()
            if engine._running:
                engine._decode()
    assert came > 20
    assert not before


def test_an_engine_in_another_process_gives_the_same_bits(model_folder: Path, tmp_path: Path) -> None:
    prompts = [[2 + i % 3] * (1 + 7 * (i % 3)) for i in range(12)]
    command = [sys.executable, "-m", "miles.backends.torch_engine", "--model-path", str(model_folder), FLAG]
    command += ["--threads", "1", "--exit-on-stdin-close", "--max-running-requests", "5"]
    server = ServerProcess("torch-engine", command, tmp_path / "engine.log")
    try:
        with running_engine(model_folder, enable_deterministic_inference=True) as engine:
            expected = [
                bits(engine.generate([request(p, 20, sampling_seed=i, temperature=0.9, stop_ids=frozenset({1}))])[0])
                for i, p in enumerate(prompts)
            ]
        client = Client(f"http://127.0.0.1:{server.wait_ready(120)['port']}")

        def ask(i: int) -> Bits:
            answer = client.generate(prompts[i], 20, sampling_seed=i, temperature=0.9)
            return answer["output_ids"], [pair[0] for pair in answer["meta_info"]["output_token_logprobs"]]

        with ThreadPoolExecutor(12) as pool:
            assert list(pool.map(ask, range(12))) == expected
        status, refused = client.post("/generate", {"input_ids": [3], "sampling_params": {"max_new_tokens": 2}})
        assert status == 400
        assert "sampling_seed is missing" in refused["error"]["message"]
        assert client.get("/server_info")[1]["enable_deterministic_inference"] is True
    finally:
        server.stop()


def test_a_request_that_draws_without_a_seed_is_refused_and_others_are_not(model_folder: Path) -> None:
    with running_engine(model_folder, enable_deterministic_inference=True) as engine:
        drawing, greedy, scoring = engine.generate(
            [request([3, 4], 5), request([3, 4], 5, temperature=0.0), request([3, 4], 0, logprob_start_len=0)]
        )
        assert drawing.error_status == 400
        assert drawing.error is not None
        assert FLAG in drawing.error
        assert (greedy.error, scoring.error) == (None, None)


def test_kernels_whose_rows_depend_on_each_other_are_refused(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear_of_its_batch(self: Decoder, x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return torch.nn.functional.linear(x * (1 + 1e-6 * len(x)), weight, bias)

    monkeypatch.setattr(deterministic.DeterministicDecoder, "_linear", linear_of_its_batch)
    threads = torch.get_num_threads()
    settings = EngineSettings(str(model_folder), enable_deterministic_inference=True)
    with pytest.raises(EngineError, match=r"cannot be kept here: a prompt among others gave other bits.*--threads 1"):
        Engine(load_model(settings), settings)
    assert torch.get_num_threads() == threads


def test_another_device_than_the_cpu_is_refused(model_folder: Path) -> None:
    elsewhere = load_model(EngineSettings(str(model_folder))).hf.to("meta")
    with pytest.raises(EngineError, match="built for the CPU, and --device is meta"):
        deterministic.DeterministicDecoder(elsewhere, 1)


def test_spans_and_the_room_of_a_slot_are_powers_of_two_by_position() -> None:
    assert [deterministic.span(p) for p in (0, 63, 64, 127, 128, 5000)] == [64, 64, 128, 128, 256, 8192]


def test_what_a_row_draws_after_a_cut_does_not_depend_on_rows_that_keep_more_candidates() -> None:
    torch.manual_seed(0)
    narrow = (torch.randn(1, 4000) * 2).bfloat16().float()  # many equal logits
    flat = torch.zeros(1, 4000)
    own = [SamplingParams(top_p=0.9, sampling_seed=s) for s in range(60)]
    other = SamplingParams(top_p=0.999, sampling_seed=1)
    rng = np.random.default_rng(0)
    for params in own:
        one, logprob = sample(narrow.clone(), BatchSampling([params], torch.device("cpu")), [7], rng)
        both = BatchSampling([params, other], torch.device("cpu"))
        two, logprobs = sample(torch.cat([narrow, flat]), both, [7, 7], rng)
        assert (two[0], logprobs[0]) == (one[0], logprob[0])


def test_deterministic_numbers_equal_a_full_forward(any_folder: Path) -> None:
    with running_engine(any_folder, enable_deterministic_inference=True) as engine:
        for done in engine.generate([make() for make in some_requests(20, seed=8)]):
            assert_matches_reference(engine.model.hf, done)


def test_without_the_flag_nothing_is_padded_and_no_seed_is_asked_for(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_engine(model_folder) as engine:
        assert type(engine.decoder) is Decoder
        assert engine.decoder.places(65) == 65
        rows: list[int] = []
        plain = engine.decoder._linear

        def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            rows.append(len(x))
            return plain(x, weight, bias)

        monkeypatch.setattr(engine.decoder, "_linear", counted)
        [done] = engine.generate([request([3, 4, 5], 6)])
        assert done.error is None
        assert set(rows) == {1, 3}
        assert engine._cache.places < 64
