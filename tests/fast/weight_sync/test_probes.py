import pytest

from miles.backends.weight_sync.probes import prompt_scores

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
