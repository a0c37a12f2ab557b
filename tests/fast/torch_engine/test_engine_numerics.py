import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.backends.torch_engine import kv_cache
from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.model import load_model
from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.torch_engine.request import Request
from miles.backends.torch_engine.settings import EngineSettings
from tests.fast.torch_engine.support import (
    LETTERS,
    assert_matches_reference,
    make_model,
    reference_logprobs,
    request,
    running_engine,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama with llama3 rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama of one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
}


def random_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, len(LETTERS)) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_of_ragged_batches_with_shared_prompts_equal_a_full_forward(name: str, tmp_path: Path) -> None:
    family, overrides = FAMILIES[name]
    with running_engine(make_model(tmp_path, family, **overrides)) as engine:
        rng = random.Random(1)
        prompts = [prompt for prompt in random_prompts(6) for _ in range(3)]
        done = engine.generate([request(p, rng.randrange(1, 60), temperature=0.8) for p in prompts])
        for finished in done:
            assert len(finished.output_ids) == finished.params.max_new_tokens
            assert_matches_reference(engine.model.hf, finished)


def test_greedy_tokens_equal_the_argmax_of_a_full_forward(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        done = engine.generate([request(p, 12, temperature=0.0) for p in random_prompts(5)])
        for finished in done:
            ids = finished.input_ids + finished.output_ids
            with torch.no_grad():
                best = engine.model.hf(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            assert finished.output_ids == best[len(finished.input_ids) - 1 : -1]
            assert_matches_reference(engine.model.hf, finished)


def test_requests_that_join_and_leave_at_different_times_keep_their_own_kv(model_folder: Path) -> None:
    with running_engine(model_folder, max_running_requests=4) as engine:
        rng = random.Random(2)
        done = engine.generate([request(p, rng.randrange(1, 80)) for p in random_prompts(24, seed=3)])
        for finished in done:
            assert_matches_reference(engine.model.hf, finished)


@pytest.mark.parametrize("seed", range(8))
def test_the_cache_may_grow_at_any_step_while_requests_join(
    model_folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_PLACE_STEP", 4)
    settings = EngineSettings(str(model_folder), threads=1, kv_cache_mb=64)
    engine = Engine(load_model(settings), settings)  # never started: the test takes its steps
    rng = random.Random(seed)
    finished: list[Request] = []
    with torch.inference_mode():
        for _ in range(60):
            for prompt in random_prompts(rng.choice([0, 0, 0, 1, 2]), seed=rng.randrange(1000), longest=24):
                joining = request(prompt, rng.randrange(1, 24))
                joining.done = finished.extend
                engine._waiting.append(joining)
            engine._admit()
            if engine._running:
                engine._decode()
        while engine._running:
            engine._decode()
    assert len(finished) > 20
    for done in finished:
        assert_matches_reference(engine.model.hf, done)


@pytest.mark.parametrize("seed", range(8))
def test_no_order_of_joins_aborts_updates_and_scores_changes_a_number(
    model_folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_PLACE_STEP", 4)
    rng = random.Random(seed)
    settings = EngineSettings(
        str(model_folder),
        threads=1,
        kv_cache_mb=64,
        prompt_cache_tokens=rng.choice([0, 40, 1000]),
        max_prefill_tokens=rng.choice([16, 8192]),
        max_running_requests=rng.choice([3, 64]),
    )
    engine = Engine(load_model(settings), settings)  # never started: the test takes its steps
    engine._cache.budget_tokens = rng.choice([60, 150, 10**6])
    prompts = random_prompts(6, seed=seed, longest=24)
    finished: list[Request] = []

    def wait_for(count: int) -> None:
        for _ in range(count):
            prompt = rng.choice(prompts)
            start = rng.choice([-1, -1, rng.randrange(len(prompt))])
            joining = request(
                prompt, rng.choice([0, 1, 1, rng.randrange(2, 30)]), logprob_start_len=start, temperature=0.9
            )
            joining.done = finished.extend
            engine._waiting.append(joining)

    def check() -> None:
        while finished:
            done = finished.pop()
            assert_matches_reference(engine.model.hf, done)
            if done.input_logprobs is not None:
                scores = reference_logprobs(engine.model.hf, done.input_ids, 0.9)[done.logprob_start_len :]
                torch.testing.assert_close(torch.tensor(done.input_logprobs), scores, atol=1e-4, rtol=0)

    with torch.inference_mode():
        for _ in range(90):
            wait_for(rng.choice([0, 0, 0, 1, 2, 5]))
            live = [*engine._running, *engine._waiting]
            match rng.randrange(12):
                case 0 if live:
                    engine.abort(rng.choice(live).rid, "test")
                case 1 if live:
                    for victim in rng.sample(live, rng.randrange(1, len(live) + 1)):
                        engine.abort(victim.rid, "test")
                case 2:
                    engine.pause("retract")
                    engine.resume()
                case 3 if rng.random() < 0.3:
                    engine.abort(None, "test")
                    check()
                    if rng.random() < 0.5:
                        engine.release_memory(["kv_cache"])
                        engine.resume_memory(["kv_cache"])
                    with SharedMemoryCodec().encode(moved_weights(engine)) as bucket:
                        engine.update_weights(bucket.payload(), True, "1", False)
            engine._admit()
            if engine._running:
                engine._decode()
            assert len(engine._running) <= settings.max_running_requests
            cells = engine._cache.slots * engine._cache.places
            assert engine._cache.slots <= 1 or cells <= engine._cache.budget_tokens
        while engine._running or engine._waiting:
            engine._admit()
            if engine._running:
                engine._decode()
        assert engine.counters.finished > 60
        check()
    assert not engine._rids - {r.rid for r in engine._waiting}


def moved_weights(engine: Engine) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(engine.counters.finished)
    return [(name, p.detach() + 0.05 * torch.randn_like(p)) for name, p in engine.model.hf.named_parameters()]


def test_a_small_kv_budget_makes_requests_wait_and_changes_no_number(model_folder: Path) -> None:
    with running_engine(model_folder, kv_cache_mb=1) as engine:
        engine._cache.budget_tokens = 130
        done = engine.generate([request(p, 50) for p in random_prompts(9, seed=4, longest=20)])
        for finished in done:
            assert_matches_reference(engine.model.hf, finished)
        assert engine._cache.slots * engine._cache.places <= 130


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_prompt_scores_equal_a_full_forward_at_the_request_temperature(model_folder: Path, temperature: float) -> None:
    with running_engine(model_folder) as engine:
        prompts = random_prompts(4, seed=5)
        starts = [random.Random(i).randrange(len(p)) for i, p in enumerate(prompts)]
        todo = [
            request(p, new, temperature=temperature, logprob_start_len=start)
            for p, start, new in zip(prompts, starts, (0, 0, 3, 3), strict=True)
        ]
        for scored, start in zip(engine.generate(todo), starts, strict=True):
            expected = reference_logprobs(engine.model.hf, scored.input_ids, temperature or 1.0)[start:]
            torch.testing.assert_close(torch.tensor(scored.input_logprobs), expected, atol=1e-4, rtol=0)
            assert len(scored.output_ids) == scored.params.max_new_tokens
            assert_matches_reference(engine.model.hf, scored)


def test_a_resumed_request_continues_with_the_draws_it_would_have_had(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        [whole] = engine.generate([request([5, 6, 7], 20, sampling_seed=3)])
        [half] = engine.generate([request([5, 6, 7, *whole.output_ids[:8]], 12, sampling_seed=3)])
        assert half.output_ids == whole.output_ids[8:]


def test_a_weight_update_changes_the_output_and_matches_the_new_weights(model_folder: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path, "qwen3", initializer_range=0.4)
    with running_engine(model_folder) as engine, running_engine(other) as source:
        prompt = [4, 5, 6, 7]
        [before] = engine.generate([request(prompt, 16, temperature=0.0)])
        new: dict[str, Any] = dict(source.model.hf.named_parameters())
        with SharedMemoryCodec().encode(list(new.items())) as bucket:
            engine.call(lambda: engine.update_weights(bucket.payload(), True, "1", False)).result()
        [after] = engine.generate([request(prompt, 16, temperature=0.0)])
        assert after.output_ids != before.output_ids
        assert (before.weight_version, after.weight_version) == ("0", "1")
        assert after.cached_tokens == 0
        assert_matches_reference(source.model.hf, after)
        assert engine.weights.checksums() == source.weights.checksums()


def test_nan_weights_fail_the_request_and_do_not_poison_the_next(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        norm = engine.model.hf.model.norm.weight
        good = norm.clone()
        engine.call(lambda: norm.data.fill_(float("nan"))).result()
        [broken] = engine.generate([request([3, 4], 5)])
        assert broken.error is not None
        assert "not finite" in broken.error

        engine.call(lambda: norm.data.copy_(good)).result()
        key = engine.model.hf.model.layers[1].self_attn.v_proj.weight
        kept = key.clone()
        running = request([5, 6, 7], 200)

        def spoil() -> None:
            key.data.fill_(float("nan"))

        waiter = threading.Thread(target=engine.generate, args=([running],))
        waiter.start()
        while engine.counters.decode_steps < 3:
            waiter.join(0.001)
        engine.call(spoil).result()
        waiter.join()
        assert running.error is not None
        engine.call(lambda: key.data.copy_(kept)).result()
        engine.call(engine.flush).result()
        [fine] = engine.generate([request([3, 4], 5)])
        assert_matches_reference(engine.model.hf, fine)


def test_bfloat16_logprobs_stay_near_a_full_forward(model_folder: Path) -> None:
    with running_engine(model_folder, dtype="bfloat16") as engine:
        done = engine.generate([request(p, 20) for p in random_prompts(4, seed=6)])
        for finished in done:
            assert_matches_reference(engine.model.hf, finished, tolerance=0.3)
