from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fast.torch_engine.support import Client, ids_of, request, running_engine

IDS = ids_of("hello, 12")


def ask(server: Client, new: int, **fields: Any) -> Any:
    params = {"max_new_tokens": new, "temperature": 0.6, "ignore_eos": True}
    body = {"input_ids": IDS, "return_logprob": True, "sampling_params": params}
    status, answer = server.post("/generate", body | fields)
    assert status == 200, answer
    return answer["meta_info"]


def expected_logprobs(server: Client, ids: list[int], temperature: float) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(server.get("/model_info")[1]["model_path"])
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0].float() / temperature).log_softmax(-1)


def test_top_logprobs_of_prompt_and_output_equal_a_full_forward(server: Client) -> None:
    meta = ask(server, 5, logprob_start_len=2, top_logprobs_num=4)
    output = [token for _, token, _ in meta["output_token_logprobs"]]
    whole = expected_logprobs(server, IDS + output, 0.6)
    assert meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"]) == len(meta["input_token_logprobs"]) == len(IDS) - 2
    assert len(meta["output_top_logprobs"]) == 5
    positions = meta["input_top_logprobs"][1:] + meta["output_top_logprobs"]
    for entries, row in zip(positions, whole[2:-1], strict=True):
        values, tokens = row.topk(4)
        assert [token for _, token, _ in entries] == tokens.tolist()
        assert all(text is None for _, _, text in entries)
        torch.testing.assert_close(torch.tensor([v for v, _, _ in entries]), values, atol=1e-4, rtol=0)
    assert "output_token_ids_logprobs" not in meta


def test_logprobs_of_asked_ids_come_in_their_order_at_every_position(server: Client) -> None:
    asked = [9, 2, 30]
    meta = ask(server, 4, logprob_start_len=0, token_ids_logprob=asked)
    output = [token for _, token, _ in meta["output_token_logprobs"]]
    whole = expected_logprobs(server, IDS + output, 0.6)
    assert meta["input_token_ids_logprobs"][0] is None
    positions = meta["input_token_ids_logprobs"][1:] + meta["output_token_ids_logprobs"]
    for entries, row in zip(positions, whole[:-1], strict=True):
        assert [token for _, token, _ in entries] == asked
        torch.testing.assert_close(torch.tensor([v for v, _, _ in entries]), row[asked], atol=1e-4, rtol=0)
    assert "output_top_logprobs" not in meta


def test_a_prompt_that_is_not_scored_has_no_alternatives_and_scoring_alone_has_no_output(server: Client) -> None:
    meta = ask(server, 2, top_logprobs_num=1, token_ids_logprob=[3])
    assert (meta["input_top_logprobs"], meta["input_token_ids_logprobs"]) == ([], [])
    assert (len(meta["output_top_logprobs"]), len(meta["output_token_ids_logprobs"])) == (2, 2)
    meta = ask(server, 0, top_logprobs_num=1, token_ids_logprob=[3], logprob_start_len=len(IDS) - 1)
    assert (meta["input_top_logprobs"], meta["input_token_ids_logprobs"]) == ([None], [None])
    assert (meta["output_top_logprobs"], meta["output_token_ids_logprobs"]) == ([], [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1"),
        ({"top_logprobs_num": 43}, "between 0 and the vocabulary's 42"),
        ({"top_logprobs_num": True}, "must be of type int"),
        ({"token_ids_logprob": []}, "at least one token id below 42"),
        ({"token_ids_logprob": [42]}, "at least one token id below 42"),
        ({"token_ids_logprob": ["a"]}, "at least one token id below 42"),
        ({"token_ids_logprob": [3], "return_logprob": False}, "need return_logprob: true"),
        ({"top_logprobs_num": 3, "return_logprob": False}, "need return_logprob: true"),
    ],
)
def test_bad_alternatives_are_refused_with_their_reason(server: Client, fields: dict[str, Any], message: str) -> None:
    status, answer = server.post("/generate", {"input_ids": IDS, "return_logprob": True} | fields)
    assert status == 400
    assert message in answer["error"]["message"]


def test_a_long_prompt_is_scored_in_chunks(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_engine(model_folder) as engine:
        [whole] = engine.generate([request(IDS, 0, logprob_start_len=0)])
        monkeypatch.setattr("miles.backends.torch_engine.decoder._ROWS_AT_ONCE", 3)
        [parts] = engine.generate([request(IDS, 0, logprob_start_len=0)])
        assert len(IDS) - 1 == len(parts.input_logprobs or [])
        assert parts.input_logprobs == pytest.approx(whole.input_logprobs, abs=1e-5)


def test_scoring_with_nan_weights_fails_the_request(model_folder: Path) -> None:
    with running_engine(model_folder) as engine:
        norm = engine.model.hf.model.norm.weight
        engine.call(lambda: norm.data.fill_(float("nan"))).result()
        for new in (0, 3):
            [broken] = engine.generate([request(IDS, new, logprob_start_len=0)])
            assert "not finite in the prompt" in (broken.error or "")
            assert broken.output_ids == []
