import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.config.schema import RunConfig
from miles.errors import MilesError
from miles.parity.engines import sample_from_engine
from miles.parity.trainer import score_by_trainer
from tests.fast.torch_engine.support import make_model, reference_logprobs

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_pairs_that_are_beyond_or_fail_are_told_and_the_others_compared(tmp_path):
    model, result = make_model(tmp_path / "model"), tmp_path / "result.json"
    argv = [
        "--hf-checkpoint",
        str(model),
        "--device",
        "cpu",
        "--torch-threads",
        "1",
        "--rollout-max-response-len",
        "80",
    ]
    argv += [
        "--rollout-temperature",
        "0.8",
        "--num-prompts",
        "4",
        "--prompt-lengths",
        "8",
        "20",
        "--json",
        str(result),
    ]
    argv += ["--engine", "--sglang-dtype float32"]
    argv += ["--engine", "--sglang-dtype float32 --rollout-max-context-len 8 --rollout-max-response-len 4"]
    argv += ["--trainer", "", "--trainer", "--bf16 --parity.max-mean-diff 1e-4"]
    command = [sys.executable, "-m", "miles.cli", "parity", *argv]
    kept = tmp_path / "kept"
    kept.mkdir()
    environment = {**os.environ, "TMPDIR": str(kept)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 1, done.stderr
    assert "torch engine, CPU" in done.stdout
    found = json.loads(result.read_text())
    assert found["ok"] is False
    assert (found["responses"], found["longest_response"], found["temperature"]) == (4, 80, 0.8)
    same, beyond, *failed = found["pairs"]
    assert same["trainer"] == "as the run"
    assert same["within"]
    assert {name: row["tokens"] for name, row in same["rows"].items()} == {
        "trainer - decode": 320,
        "trainer - decode, first 64": 256,
        "trainer - decode, rest": 64,
        "trainer - prefill": 320,
        "trainer - prefill, first 64": 256,
        "trainer - prefill, rest": 64,
        "prefill - decode": 320,
    }
    assert all(row["max"] < 1e-3 for row in same["rows"].values())
    assert same["recommended"]["mean"] <= 1e-4
    assert not beyond["within"]
    assert beyond["error"] is None
    assert 1e-3 < beyond["rows"]["trainer - decode"]["mean"] < 0.3
    assert beyond["gate"] == {"mean": 1e-4, "p99": 0.3}
    assert [pair["within"] for pair in failed] == [False, False]
    assert all("leaves no room for a response" in pair["error"] for pair in failed)
    assert [folder.name[:13] for folder in kept.iterdir()] == ["miles-parity-"], "logs of what failed are kept"
    assert "FAILED: a prompt of 8 tokens leaves no room" in done.stdout


def test_an_engine_samples_to_the_full_length_and_scores_what_it_sampled(tmp_path):
    model = make_model(tmp_path / "model")
    sections = {"cluster": {"device": "cpu", "threads": 1}, "rollout": {"temperature": 0.8, "max_response_len": 20}}
    config = RunConfig.model_validate({"model": {"hf_checkpoint": str(model)}, **sections})
    prompts = [[3, 9, 14], [20, 5]]
    job = sample_from_engine(config, prompts, full_length=True, log_path=tmp_path / "engine.log")
    found = asyncio.run(job)
    hf = AutoModelForCausalLM.from_pretrained(model)
    assert [s.tokens[: len(p)] for s, p in zip(found, prompts, strict=True)] == prompts
    for sample in found:
        expected = reference_logprobs(hf, sample.tokens, 0.8)[sample.start :]
        assert len(expected) == 20
        for log_probs in (sample.decoded, sample.prefilled):
            torch.testing.assert_close(torch.tensor(log_probs), expected, atol=1e-4, rtol=0)
    full = sample_from_engine(config, [[3] * 249], full_length=True, log_path=tmp_path / "none.log")
    with pytest.raises(MilesError, match="a prompt of 249 tokens leaves no room for a response in 248 tokens"):
        asyncio.run(full)
    assert not (tmp_path / "none.log").exists(), "no engine was started for it"


def test_a_trainer_that_fails_or_takes_too_long_is_told_with_the_reason(tmp_path):
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"cut")
    config = RunConfig.model_validate({"model": {"hf_checkpoint": str(model)}, "cluster": {"device": "cpu"}})
    with pytest.raises(MilesError, match=r"model\.safetensors"):
        score_by_trainer(config, [[3, 4, 5]], folder=tmp_path / "broken", timeout_s=240)
    with pytest.raises(MilesError, match=r"not done after 0\.05 s; the end of .*log\.txt(.|\n)*a larger --timeout"):
        score_by_trainer(config, [[3, 4, 5]], folder=tmp_path / "late", timeout_s=0.05)


def test_a_trainer_scores_without_the_reference_and_the_critic_of_its_run(tmp_path):
    model = make_model(tmp_path / "model")
    sections = {"algorithm": {"use_kl_loss": True, "advantage_estimator": "ppo"}, "rollout": {"temperature": 0.8}}
    config = RunConfig.model_validate(
        {"model": {"hf_checkpoint": str(model), "ref_load": "nowhere"}, "cluster": {"device": "cpu"}, **sections}
    )
    tokens = [3, 9, 14, 20, 5]
    found = score_by_trainer(config, [tokens], folder=tmp_path / "work", timeout_s=240)
    expected = reference_logprobs(AutoModelForCausalLM.from_pretrained(model), tokens, 0.8)
    torch.testing.assert_close(torch.tensor(found.log_probs[0]), expected, atol=1e-4, rtol=0)
    assert found.device == "CPU"
