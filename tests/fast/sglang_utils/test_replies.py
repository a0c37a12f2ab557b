import json
from pathlib import Path

import pytest

from miles.backends.weight_sync import lifecycle, proof
from miles.backends.weight_sync.probes import prompt_scores
from miles.backends.weight_sync.records import SentWeights
from miles.errors import WeightSyncError

REPLIES = json.loads((Path(__file__).parent / "replies_0_5_17.json").read_text())
SENT = SentWeights(
    version=2, nbytes={"a": 1}, checksums={}, expected_nbytes={"a": 1}, learned=True, buckets=1, seconds=0.1
)


def test_scores_of_a_prompt_are_read():
    entries = REPLIES["generate_score"]["meta_info"]["input_token_logprobs"]
    assert prompt_scores(entries, [5, 6, 7, 8]) == [entry[0] for entry in entries[1:]]


def test_a_reply_has_ids_and_their_log_probs_in_the_order_that_the_client_reads():
    reply = REPLIES["generate"]
    entries = reply["meta_info"]["output_token_logprobs"]
    assert [entry[1] for entry in entries] == reply["output_ids"]
    assert all(entry[0] < 0 for entry in entries)
    assert reply["meta_info"]["finish_reason"]["type"] == "length"
    assert reply["meta_info"]["weight_version"] == "0"


def test_checksums_are_by_the_engines_own_names_and_rank():
    found = lifecycle._checksums_of(REPLIES["weights_checker checksum"])
    assert "model.layers.0.self_attn.qkv_proj.weight of tensor-parallel rank 0" in found
    assert len(found) == 4


def test_engines_with_the_same_parameters_must_agree():
    held = lifecycle._checksums_of(REPLIES["weights_checker checksum"])
    name = next(iter(held))
    proof.check_agree(SENT, {"engine-0": held, "engine-1": dict(held), "engine-2": {"another layout": "1"}})
    with pytest.raises(WeightSyncError, match="engine-1 and engine-0 hold different weights after update 2") as error:
        proof.check_agree(SENT, {"engine-0": held, "engine-1": held | {name: "other"}})
    assert name in str(error.value)


def test_an_engine_that_held_the_same_before_got_stale_weights():
    held = lifecycle._checksums_of(REPLIES["weights_checker checksum"])
    with pytest.raises(WeightSyncError, match="brought exactly the weights of the update before"):
        proof.check_changed(SENT, held, dict(held))
