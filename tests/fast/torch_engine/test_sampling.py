from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from miles.backends.torch_engine.sampling import BatchSampling, SamplingParams, hashed_uniforms, sample
from tests.fast.torch_engine.support import LETTERS, request, running_engine

LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.15, 0.1, 0.04, 0.01]))


def draw(count: int, banned: tuple[int, ...] = (), **params: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch = BatchSampling([SamplingParams(**params)] * count, torch.device("cpu"))
    bans = [(row, banned) for row in range(count)] if banned else []
    return sample(LOGITS.repeat(count, 1), batch, [], np.random.default_rng(0), bans)


def frequencies(tokens: torch.Tensor) -> torch.Tensor:
    return torch.bincount(tokens, minlength=len(LOGITS)) / len(tokens)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_distribution(temperature: float) -> None:
    tokens, logprobs = draw(40_000, temperature=temperature)
    expected = (LOGITS / temperature).log_softmax(-1)
    torch.testing.assert_close(frequencies(tokens), expected.exp(), atol=0.012, rtol=0)
    torch.testing.assert_close(logprobs, expected[tokens])


@pytest.mark.parametrize(
    ("cut", "survivors"),
    [
        ({"top_k": 2}, 2),
        ({"top_p": 0.65}, 2),
        ({"top_p": 0.72}, 3),
        ({"min_p": 0.3}, 3),
        ({"top_k": 3, "top_p": 0.5}, 2),
        ({"top_p": 1e-9}, 1),
    ],
)
def test_cuts_keep_the_best_tokens_and_report_the_uncut_logprob(cut: dict[str, Any], survivors: int) -> None:
    tokens, logprobs = draw(20_000, **cut)
    expected = LOGITS.softmax(-1)[:survivors]
    torch.testing.assert_close(frequencies(tokens)[:survivors], expected / expected.sum(), atol=0.015, rtol=0)
    assert int(tokens.max()) == survivors - 1
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[tokens])


def test_a_cut_wider_than_the_candidates_first_looked_at_is_exact() -> None:
    vocab = 5000
    batch = BatchSampling([SamplingParams(top_p=0.9)] * 1500, torch.device("cpu"))
    logits = torch.zeros(1500, vocab)
    tokens, _ = sample(logits, batch, [], np.random.default_rng(0))
    assert len(tokens.unique()) > 1100


def test_greedy_rows_cut_rows_and_plain_rows_share_a_batch() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=1),
        SamplingParams(),
        SamplingParams(temperature=0.1),
    ]
    batch = BatchSampling(params, torch.device("cpu"))
    tokens, logprobs = sample(LOGITS.repeat(4, 1), batch, [], np.random.default_rng(1))
    assert tokens[:2].tolist() == [0, 0]
    torch.testing.assert_close(logprobs[:2], LOGITS.log_softmax(-1)[:1].expand(2))
    torch.testing.assert_close(logprobs[3], (LOGITS / 0.1).log_softmax(-1)[tokens[3]])


def test_banned_tokens_are_not_drawn_and_leave_logprobs_alone() -> None:
    tokens, logprobs = draw(2000, banned=(0, 1))
    assert int(tokens.min()) == 2
    torch.testing.assert_close(logprobs, LOGITS.log_softmax(-1)[tokens])
    greedy, _ = draw(1, banned=(0,), temperature=0.0)
    assert greedy.tolist() == [1]


def test_hashed_uniforms_depend_on_seed_and_position_and_look_uniform() -> None:
    positions = np.arange(100_000)
    one = hashed_uniforms(np.full(100_000, 5, dtype=np.uint64), positions)
    two = hashed_uniforms(np.full(100_000, 6, dtype=np.uint64), positions)
    assert one.min() >= 0
    assert one.max() < 1
    counts = np.histogram(one, bins=20, range=(0, 1))[0]
    assert ((counts - 5000) ** 2 / 5000).sum() < 50
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.02
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 0.02
    assert hashed_uniforms(np.array([5], dtype=np.uint64), np.array([77]))[0] == one[77]


def test_a_seeded_request_draws_the_same_tokens_alone_and_among_31_others(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        [alone] = engine.generate([request([5, 6, 7], 40, sampling_seed=11)])
        others = [request([3 + i % 9] * (1 + i % 20), 10 + i, temperature=0.9, sampling_seed=i) for i in range(31)]
        among = request([5, 6, 7], 40, sampling_seed=11)
        engine.generate([*others[:15], among, *others[15:]])
        assert among.output_ids == alone.output_ids


def test_requests_without_a_seed_draw_differently_from_each_other(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        done = engine.generate([request([5, 6, 7], 20) for _ in range(4)])
        assert len({tuple(r.output_ids) for r in done}) == 4


def test_min_new_tokens_holds_stop_tokens_back(model_folder: Path) -> None:
    everything = frozenset(range(len(LETTERS)))
    with running_engine(model_folder) as engine:
        allowed = everything - {9}
        [ended] = engine.generate([request([5, 6], 30, min_new_tokens=7, stop_ids=allowed)])
        assert ended.output_ids[:7] == [9] * 7
        assert len(ended.output_ids) > 7 or ended.finish_reason == {"type": "length", "length": 30}
