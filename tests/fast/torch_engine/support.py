"""Tiny model folders, an engine in this process, and a client of a served one."""

import json
import string
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from miles.backends.torch_engine.engine import Engine
from miles.backends.torch_engine.model import load_model
from miles.backends.torch_engine.request import Request
from miles.backends.torch_engine.sampling import SamplingParams
from miles.backends.torch_engine.settings import EngineSettings

PAD, EOS = 0, 1
LETTERS = ["<pad>", "<eos>", *string.ascii_lowercase, *string.digits, " ", ".", ",", "!"]
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def ids_of(text: str) -> list[int]:
    return [LETTERS.index(character) for character in text]


def make_model(folder: Path, family: str = "qwen3", tokenizer: bool = True, **overrides: Any) -> Path:
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": len(LETTERS),
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if family == "qwen3":
        values["head_dim"] = 16
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**(values | overrides)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@contextmanager
def running_engine(folder: Path, **settings: Any) -> Iterator[Engine]:
    settings = {"threads": 1, "kv_cache_mb": 64, "sibling_wait_s": 0.002} | settings
    chosen = EngineSettings(str(folder), **settings)
    engine = Engine(load_model(chosen), chosen).start()
    try:
        yield engine
    finally:
        engine.stop()


def request(ids: list[int], max_new_tokens: int, **values: Any) -> Request:
    own = {name: values.pop(name) for name in ("extra_key", "logprob_start_len", "stop_ids") if name in values}
    params = SamplingParams(max_new_tokens=max_new_tokens, **values)
    return Request(input_ids=ids, params=params, return_logprob=True, **own)


def reference_logprobs(hf: Any, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [T - 1] of tokens 1.. under a whole forward pass of transformers."""
    with torch.no_grad():
        logits = hf(torch.tensor([ids], device=hf.device)).logits[0].float() / temperature
    return logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:], device=hf.device)[:, None])[:, 0]


def assert_matches_reference(hf: Any, finished: Request, tolerance: float = 1e-4) -> None:
    assert finished.error is None
    temperature = finished.params.temperature or 1.0
    whole = reference_logprobs(hf, finished.input_ids + finished.output_ids, temperature)
    expected = whole[len(finished.input_ids) - 1 :]
    torch.testing.assert_close(torch.tensor(finished.output_logprobs), expected, atol=tolerance, rtol=0)


class Client:
    """Calls a served engine; every call returns (status, JSON)."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> tuple[int, Any]:
        return self._call(urllib.request.Request(self.url + path, headers=self._headers))

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        return self._call(urllib.request.Request(self.url + path, data, headers))

    def generate(self, ids: list[int], max_new_tokens: int, **sampling: Any) -> Any:
        body = {"input_ids": ids, "return_logprob": True}
        status, answer = self.post(
            "/generate", body | {"sampling_params": {"max_new_tokens": max_new_tokens, **sampling}}
        )
        assert status == 200, answer
        return answer

    def _call(self, http: urllib.request.Request) -> tuple[int, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(http, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())
