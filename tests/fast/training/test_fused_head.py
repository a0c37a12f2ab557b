"""The Triton kernels in Triton's interpreter, where Triton is installed; tests/fast-gpu has them compiled."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from miles.backends.training_utils import fused_head, log_probs
from miles.backends.training_utils.log_probs import Entropy, TargetLogProb, TopK, WholeVocabulary

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = """
import torch
from miles.backends.training_utils import fused_head, fused_softmax
from miles.backends.training_utils.log_probs import token_log_probs

fused_softmax._BLOCK, fused_head.CHUNK_LOGITS = 64, 3 * 150
torch.manual_seed(0)
hidden, weight = torch.randn(7, 16, requires_grad=True), torch.randn(150, 16, requires_grad=True)
targets, mix = torch.randint(0, 150, (7,)), torch.linspace(-1, 2, 7)


def results(fn, entropy_weight):
    logprobs, entropy = fn(hidden, weight, targets, 0.8)
    loss = (logprobs * mix).sum() + (entropy_weight * (entropy * mix.flip(0)).sum() if entropy_weight else 0)
    return [logprobs, entropy, *torch.autograd.grad(loss, [hidden, weight])]


def fused(kept):
    return lambda *given: fused_head.linear_log_prob_entropy(*given, kept_bytes=kept)


for entropy_weight in (0.0, 0.3):
    expected = results(token_log_probs, entropy_weight)
    for kept in (0, 2 * 3 * 150 * 4, 1 << 20):
        for ours, theirs in zip(results(fused(kept), entropy_weight), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

logits = torch.tensor([[0.0, float("-inf"), 2.0], [1.0, 1.0, 1.0]])
log_p, entropy, log_z = fused_softmax.log_softmax_rows(logits, torch.tensor([2, 0]), 1.0)
log_p_CV = torch.log_softmax(logits, dim=1)
torch.testing.assert_close(log_p, log_p_CV[[0, 1], [2, 0]])
torch.testing.assert_close(entropy, torch.special.entr(log_p_CV.exp()).sum(1))
torch.testing.assert_close(log_z, torch.logsumexp(logits, dim=1))
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton comes with torch for GPUs")
def test_fused_kernels_equal_the_plain_path():
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "equal\n", done.stderr


class OnGpu:
    is_cuda, dtype = True, torch.bfloat16


class OnGpuInFp64:
    is_cuda, dtype = True, torch.float64


@pytest.mark.parametrize("triton", [True, False])
def test_the_fused_path_is_for_log_probs_over_a_whole_vocabulary_on_a_gpu(triton, monkeypatch):
    monkeypatch.setattr(log_probs, "has_triton", lambda: triton)
    target, gpu, whole = TargetLogProb(torch.zeros(1)), OnGpu(), WholeVocabulary()

    def fuses(tensor, heads, vocabulary=whole):
        return log_probs._can_fuse(tensor, tensor, heads, vocabulary)

    assert fuses(gpu, (target,)) is triton
    assert fuses(gpu, (target, Entropy())) is triton
    for heads in ((Entropy(),), (TopK(2),), (target, TopK(2)), (target, Entropy(), TopK(2)), (Entropy(), target)):
        assert not fuses(gpu, heads)
    assert not fuses(torch.zeros(1), (target,))
    assert not fuses(OnGpuInFp64(), (target,))
    assert not fuses(gpu, (target,), object())


def test_chunks_cover_every_row_once(monkeypatch):
    monkeypatch.setattr(fused_head, "CHUNK_LOGITS", 35)
    assert [(c.start, c.stop) for c in fused_head._chunks(12, 10)] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert [(c.start, c.stop) for c in fused_head._chunks(2, 100)] == [(0, 1), (1, 2)]
    assert fused_head._chunks(0, 10) == []


def test_large_chunks_are_whole_tiles():
    found = fused_head._chunks(16384, 151936)
    assert [c.stop - c.start for c in found] == [3328] * 4 + [3072]
    assert fused_head.CHUNK_LOGITS >= 3328 * 151936
