import itertools
import math

import numpy as np
import pytest

from miles.backends.training_utils.parity import (
    ParityBounds,
    ParityCause,
    ScoredSequence,
    compare,
    explain,
    hold_against,
    parity_error,
)
from miles.errors import ParityError

BOUNDS = ParityBounds(1e-3, 1e-2)
LOGITS = np.random.default_rng(0).normal(size=(12, 12)) * 2


def score(sequences, temperature):
    scaled = LOGITS / temperature
    log_p = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
    return [[log_p[a, b] for a, b in itertools.pairwise(s)] for s in sequences]


def sequences(engine, response=10, mask=None):
    rng = np.random.default_rng(1)
    tokens = [rng.integers(0, 12, 16).tolist() for _ in range(3)]
    rows = engine(tokens)
    mask = [True] * response if mask is None else mask
    return [
        ScoredSequence(sample=i, tokens=t, engine_R=list(r[-response:]), mask_R=mask)
        for i, (t, r) in enumerate(zip(tokens, rows, strict=True))
    ]


def cause(engine, **kwargs):
    return explain(sequences(engine), score, **{"bounds": BOUNDS, "temperature": 1.0} | kwargs)


def test_report_has_mean_p99_max_count_and_the_worst_sample():
    trainer = np.full(200, -1.0)
    engine = trainer.copy()
    engine[150] += 0.5
    report = compare(trainer, engine, np.repeat([7, 8], 100))
    assert report.mean == pytest.approx(0.0025)
    assert report.p99 == 0
    assert (report.max, report.count, report.worst_sample) == (0.5, 200, 8)
    assert not report.within(BOUNDS)
    assert report.within(ParityBounds(0.01, 0.01))


def test_nothing_to_compare_is_within_bounds_and_nan_never_is():
    assert compare([], []).within(BOUNDS)
    report = compare([-1.0, float("nan")], [-1.0, -1.0], [3, 4])
    assert not report.within(BOUNDS)
    assert report.worst_sample == 4


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match=r"2 log-probs of the trainer but 1 of the engine"):
        compare([1, 2], [1])


@pytest.mark.parametrize("engine_temperature", [1.0, 0.7, 0.83, 1.4])
def test_another_temperature_is_named_with_its_value(engine_temperature):
    found = cause(lambda t: score(t, engine_temperature), temperature=0.95)
    assert found.name == "temperature"
    assert f"temperature {engine_temperature:.3g}" in found.evidence


@pytest.mark.parametrize("shift", [1, -1])
def test_shifted_log_probs_are_named_tokens(shift):
    found = cause(lambda t: [np.roll(r, -shift) for r in score(t, 1.0)])
    assert found.name == "tokens"
    assert f"t{shift:+d}" in found.evidence


def test_a_renormalised_distribution_is_named_top_p():
    rng = np.random.default_rng(5)

    def engine(tokens):
        return [np.asarray(r) + rng.random(len(r)) for r in score(tokens, 1.0)]

    assert cause(engine, top_p=0.9).name == "top-p"
    assert cause(engine).name == "weights"


def test_mixed_or_unexpected_weight_versions_are_named():
    rng = np.random.default_rng(5)

    def engine(tokens):
        return [np.asarray(r) + 0.01 * rng.normal(size=len(r)) for r in score(tokens, 1.0)]

    assert cause(engine, weight_versions=["3", "4"]).name == "weights"
    found = cause(engine, weight_versions=["3"], expected_version="4")
    assert found.name == "weights"
    assert "versions 3, the trainer is at 4" in found.evidence
    assert cause(engine, weight_versions=["4"], expected_version="4").name == "dtype"


def test_masked_tokens_are_not_compared():
    rows = sequences(lambda t: score(t, 0.7), mask=[i % 2 == 0 for i in range(10)])
    for row in rows:
        row.engine_R[1::2] = [float("nan")] * 5
    assert explain(rows, score, bounds=BOUNDS, temperature=1.0).name == "temperature"


def test_the_error_has_numbers_bounds_cause_and_remedy():
    found = cause(lambda t: score(t, 0.7))
    error = parity_error(compare([-1.0], [-2.0], [5]), BOUNDS, found, "samples of rollout step 3")
    text = str(error)
    for piece in (
        "samples of rollout step 3",
        "mean 1, p99 1, max 1 over 1 tokens, worst in sample 5",
        "mean 0.001, p99 0.01",
        "cause: temperature",
        "fix: ",
    ):
        assert piece in text


def test_beyond_bounds_that_only_warn_the_run_goes_on_unless_something_is_not_a_number(caplog):
    def never():
        raise AssertionError("no cause is sought for a warning")

    warn = ParityBounds(0.15, 1.5, warn=True)
    hold_against(compare([-1.0, -2.0], [-1.1, -2.1]), warn, "samples of rollout step 3", never)
    assert caplog.text == ""
    hold_against(compare([-1.0, -2.0], [-1.5, -2.0]), warn, "samples of rollout step 3", never)
    assert "samples of rollout step 3: trainer and engine differ in log-probability: mean 0.25" in caplog.text
    cause = ParityCause("weights", "e", "f")
    for trainer, bounds in (([math.nan], warn), ([-9.0], ParityBounds(0.15, 1.5))):
        with pytest.raises(ParityError, match="cause: weights"):
            hold_against(compare(trainer, [-1.0]), bounds, "here", lambda: cause)
