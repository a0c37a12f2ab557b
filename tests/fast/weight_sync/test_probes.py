import asyncio

import pytest

from miles.backends.weight_sync import probes
from miles.backends.weight_sync.probes import prompt_scores, score_on_engine
from miles.core.run_facts import EngineEndpoint

TOKENS = [1, 2, 3, 4]
ENTRIES = [[None, 1], [-0.1, 2], [-0.2, 3], [-0.3, 4]]


def test_the_first_token_has_no_log_prob_and_the_others_keep_theirs():  # F13
    assert prompt_scores(ENTRIES, TOKENS) == [-0.1, -0.2, -0.3]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (ENTRIES[1:], "scored other tokens"),  # F13: shifted by one
        ([*ENTRIES[1:], [-0.4, 5]], "scored other tokens"),
        ([*ENTRIES[:2], [None, 3], ENTRIES[3]], "no log-prob for token 2 of 4"),
    ],
)
def test_scores_of_other_tokens_or_with_holes_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        prompt_scores(entries, TOKENS)


# Case B30: engine and trainer score at one temperature, that of the rollout.
def test_the_engine_is_asked_to_score_at_the_temperature_given(monkeypatch):
    asked = []

    async def post(url, body):
        asked.append((url, body))
        return {"meta_info": {"input_token_logprobs": ENTRIES}}

    monkeypatch.setattr(probes, "post", post)
    engine = EngineEndpoint(url="http://127.0.0.1:1", engine_id="engine 0", pid=1, token="")
    assert asyncio.run(score_on_engine(engine, [TOKENS], 0.7)) == [[-0.1, -0.2, -0.3]]
    ((url, body),) = asked
    assert url == "http://127.0.0.1:1/generate"
    assert (body["sampling_params"]["temperature"], body["return_logprob"]) == (0.7, True)
