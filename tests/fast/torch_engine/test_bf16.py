import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from miles.backends.torch_engine.payload import SharedMemoryCodec
from miles.backends.torch_engine.request import RequestRefused
from miles.backends.torch_engine.settings import parse_settings
from tests.fast.torch_engine.support import LETTERS, make_model, reference_logprobs, request, running_engine

TOLERANCE = 0.05
"""In nats, between this engine and transformers in bf16: both round every activation to 8 bits, in another order."""
MILD: dict[str, Any] = {"initializer_range": 0.1, "dtype": "bfloat16"}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp(request.param), request.param, **MILD)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, len(LETTERS)) for _ in range(rng.randrange(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_greedy_tokens_and_logprobs_equal_transformers_in_bf16_within_the_tolerance(
    folder: Path, deterministic: bool
) -> None:
    with running_engine(folder, enable_deterministic_inference=deterministic) as engine:
        assert engine.model.hf.dtype == engine.decoder.dtype == torch.bfloat16
        for done in engine.generate([request(p, 40, temperature=0.0) for p in prompts(6)]):
            ids = done.input_ids + done.output_ids
            with torch.no_grad():
                logits = engine.model.hf(torch.tensor([ids])).logits[0, len(done.input_ids) - 1 : -1].float()
            expected_TV = logits.log_softmax(-1)
            chosen_T = expected_TV.gather(1, torch.tensor(done.output_ids)[:, None])[:, 0]
            assert (expected_TV.amax(1) - chosen_T).max() <= TOLERANCE  # the same token, or one as good
            torch.testing.assert_close(torch.tensor(done.output_logprobs), chosen_T, atol=TOLERANCE, rtol=0)


def test_prompt_scores_equal_transformers_in_bf16_within_the_tolerance(folder: Path) -> None:
    with running_engine(folder) as engine:
        for done in engine.generate([request(p, 0, temperature=0.7, logprob_start_len=0) for p in prompts(6)]):
            expected = reference_logprobs(engine.model.hf, done.input_ids, 0.7)
            torch.testing.assert_close(torch.tensor(done.input_logprobs), expected, atol=2 * TOLERANCE, rtol=0)


def test_bf16_numbers_are_near_those_of_fp32_and_not_the_same(folder: Path) -> None:
    drawing = [request(p, 20, sampling_seed=1) for p in prompts(8)]
    with running_engine(folder) as engine:
        drawn = engine.generate(drawing)
    with running_engine(folder, dtype="float32") as engine:
        scored = engine.generate(
            [request(r.input_ids + r.output_ids, 0, logprob_start_len=len(r.input_ids) - 1) for r in drawn]
        )
    differences = torch.tensor(
        [
            a - b
            for one, other in zip(drawn, scored, strict=True)
            for a, b in zip(one.output_logprobs, other.input_logprobs or [], strict=True)
        ]
    ).abs()
    assert 1e-4 < differences.mean() < 0.03
    assert differences.max() < 0.3


def test_the_kv_cache_is_bf16_and_logits_and_log_softmax_are_fp32(folder: Path) -> None:
    with running_engine(folder) as engine:
        asked = request([3, 4, 5], 8, sampling_seed=2)
        asked.top_logprobs_num = len(LETTERS)
        [done] = engine.generate([asked])
        assert engine._cache._kv.dtype == torch.bfloat16
        assert engine._cache.bytes_per_token == 2 * 2 * 2 * engine.decoder.head_dim * 2
        for entries in done.output_alternatives.top:
            assert abs(math.fsum(math.exp(value) for value, _, _ in entries) - 1) < 1e-5
        hidden = torch.zeros(1, 32, dtype=torch.bfloat16)
        assert engine.decoder.logits(hidden).dtype == torch.float32


def test_an_update_in_bf16_is_exact_and_one_in_another_dtype_is_refused(folder: Path, tmp_path: Path) -> None:
    family = json.loads((folder / "config.json").read_text())["model_type"]
    other = make_model(tmp_path, family, initializer_range=0.2, dtype="bfloat16")
    with running_engine(folder) as engine, running_engine(other) as source:
        [before] = engine.generate([request([4, 5, 6], 12, temperature=0.0)])
        new = list(source.model.hf.named_parameters())
        with SharedMemoryCodec().encode(new) as bucket:
            engine.call(lambda: engine.update_weights(bucket.payload(), True, "1", False)).result()
        assert engine.weights.checksums() == source.weights.checksums()
        [after] = engine.generate([request([4, 5, 6], 12, temperature=0.0)])
        [same] = source.generate([request([4, 5, 6], 12, temperature=0.0)])
        assert (after.output_ids, after.output_logprobs) == (same.output_ids, same.output_logprobs)
        assert after.output_logprobs != before.output_logprobs

        name, tensor = new[0]
        refusal = pytest.raises(RequestRefused, match=f"{name} has dtype float32, the engine's is bfloat16")
        with SharedMemoryCodec().encode([(name, tensor.float())]) as bucket, refusal:
            engine.call(lambda: engine.update_weights(bucket.payload(), True, "2", False)).result()


def test_auto_takes_the_dtype_of_the_folder_and_a_named_dtype_takes_itself(folder: Path, model_folder: Path) -> None:
    assert parse_settings(["--model-path", str(folder)])[0].dtype == "auto"
    for path, asked, dtype in (
        (folder, "auto", "bfloat16"),
        (model_folder, "auto", "float32"),
        (folder, "float32", "float32"),
        (model_folder, "bfloat16", "bfloat16"),
    ):
        with running_engine(path, dtype=asked) as engine:
            assert engine.settings.dtype == dtype
            assert {p.dtype for p in engine.model.hf.parameters()} == {getattr(torch, dtype)}
            [done] = engine.generate([request([3, 4], 3)])
            assert done.error is None
