import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles.backends.torch_engine.chat import read_chat
from miles.backends.torch_engine.model import load_model
from miles.backends.torch_engine.request import RequestRefused
from miles.backends.torch_engine.settings import EngineSettings
from tests.fast.torch_engine.support import EOS, LETTERS, Client, ids_of, make_model

MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "say abc"}]
PROMPT = ids_of("system be kind.user say abc.assistant ")


def chat(server: Client, **fields: Any) -> Any:
    body = {"model": "any", "messages": MESSAGES, "temperature": 0, "ignore_eos": True, "max_tokens": 6}
    status, answer = server.post("/v1/chat/completions", body | fields)
    assert status == 200, answer
    return answer


def test_a_chat_is_rendered_once_and_answers_what_generate_answers(server: Client) -> None:
    native = server.generate(PROMPT, 6, temperature=0, ignore_eos=True)
    answer = chat(server)
    [choice] = answer["choices"]
    assert (answer["object"], answer["model"]) == ("chat.completion", "any")
    assert choice["message"] == {"role": "assistant", "content": native["text"]}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(PROMPT), 6)
    assert usage["total_tokens"] == len(PROMPT) + 6
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(PROMPT)}
    assert answer["metadata"] == {"weight_version": native["meta_info"]["weight_version"]}
    assert abs(answer["created"] - time.time()) < 60
    assert chat(server, rid="mine")["id"] == "mine"


def test_chat_template_kwargs_reach_the_template(server: Client) -> None:
    longer = chat(server, chat_template_kwargs={"mark": ". . "})
    assert longer["usage"]["prompt_tokens"] == len(PROMPT) + 6


def test_chat_logprobs_name_every_token_with_its_alternatives(server: Client) -> None:
    params = {"temperature": 0.7, "sampling_seed": 4, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 3, "sampling_params": params}
    meta = server.post("/generate", body)[1]["meta_info"]
    [choice] = chat(server, temperature=0.7, seed=4, logprobs=True, top_logprobs=3)["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for item, (value, token, _), top in zip(
        content, meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True
    ):
        assert item["token"] == LETTERS[token]
        assert bytes(item["bytes"]).decode() == LETTERS[token]
        assert item["logprob"] == pytest.approx(value, abs=1e-5)
        assert [entry["token"] for entry in item["top_logprobs"]] == [LETTERS[other] for _, other, _ in top]
        assert item["top_logprobs"][0]["logprob"] >= item["logprob"]
    plain = chat(server, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [item["top_logprobs"] for item in plain] == [[]] * 6


def test_a_chat_says_what_stopped_it(server: Client) -> None:
    ids = server.generate(PROMPT, 6, temperature=0, ignore_eos=True)["output_ids"]
    stop = next(token for token in ids[1:] if token > EOS)
    cut = ids.index(stop) + 1
    [choice] = chat(server, stop=[LETTERS[stop]])["choices"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", LETTERS[stop])
    assert choice["message"]["content"] == "".join(LETTERS[i] for i in ids[: cut - 1] if i > EOS)


def test_without_a_limit_a_chat_may_fill_the_context(server: Client) -> None:
    assert chat(server, max_tokens=None)["usage"]["total_tokens"] == 256
    assert chat(server, max_tokens=None, max_completion_tokens=2)["usage"]["completion_tokens"] == 2


def test_an_aborted_chat_answers_with_its_tokens_so_far(server: Client) -> None:
    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(chat, server, max_tokens=None, rid="long chat")
        while server.get("/server_info")[1]["num_running"] < 1:
            assert not task.done()
        assert server.post("/abort_request", {"rid": "long chat"})[1]["num_aborted"] == 1
        answer = task.result()
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert 0 < answer["usage"]["completion_tokens"] < 256 - len(PROMPT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mesages": []}, "did you mean messages"),
        ({"max_token": 3}, "did you mean max_tokens"),
        ({"stream": True}, "stream = True is not supported"),
        ({"n": 2}, "n = 2 is not supported"),
        ({"tools": [{"type": "function"}]}, "is not supported"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hi"}, "at least one message"),
        ({"messages": ["hi"]}, "messages[0] is 'hi'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role is None"),
        ({"messages": [{"role": "user"}]}, "messages[0].content is None"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "reads one string"),
        ({"messages": [{"role": "user", "content": "a", "rôle": "b"}]}, "unknown field messages[0].rôle"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "no tools here"),
        ({"model": 3}, "model is 3; it must be of type str"),
        ({"temperature": -1}, "temperature is -1.0; it must be 0 (greedy) or more"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "give one of them"),
        ({"max_tokens": 250}, "the context holds 256"),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"chat_template_kwargs": {"chat_template": "x", "tokenize": True}}, "holds chat_template, tokenize"),
    ],
)
def test_a_bad_chat_is_refused_with_its_reason(server: Client, fields: dict[str, Any], message: str) -> None:
    status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES} | fields)
    assert status == 400
    assert message in answer["error"]["message"]
    assert "sampling_params" not in answer["error"]["message"]


@pytest.mark.parametrize(("tokenizer", "missing"), [(True, "chat template"), (False, "tokenizer")])
def test_a_folder_without_a_template_refuses_chats(tmp_path: Path, tokenizer: bool, missing: str) -> None:
    settings = EngineSettings(str(make_model(tmp_path, tokenizer=tokenizer)), threads=1)
    model = load_model(settings)
    with pytest.raises(RequestRefused, match=f"has no {missing}; use /generate"):
        read_chat({"messages": MESSAGES}, model, lambda _: None)
