import json
from pathlib import Path
from typing import Any

import pytest

from examples.quickstart import make_task
from miles.config.batch_math import batch_plan
from miles.config.load import read
from miles.utils.hf import context_length, eos_token_ids
from miles.utils.hf import load_tokenizer as hf_tokenizer

RECIPES = Path(__file__).parents[3] / "recipes"


def rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recipe(name: str) -> Any:
    return read([str(RECIPES / name)]).config


def load_tokenizer(folder: Path) -> Any:
    return hf_tokenizer(folder)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    out = tmp_path_factory.mktemp("quickstart") / "made" / "here"
    assert make_task.main(["--out", str(out), "--seed", "3"]) == 0
    return out


def test_no_prompt_is_in_two_files_or_twice_in_one(task):
    prompts = [row["input"] for name in make_task.ROWS for row in rows(task / name)]
    assert len(prompts) == sum(make_task.ROWS.values())
    assert len(set(prompts)) == len(prompts)


def test_the_label_is_the_sorted_digits_of_the_prompt(task):
    for name in make_task.ROWS:
        for row in rows(task / name):
            digits = row["input"].removeprefix("sort ").removesuffix("=")
            assert row["label"] == "".join(sorted(digits))
            assert len(set(digits)) == len(digits)
            assert row["metadata"] == {}


def test_all_lengths_of_list_are_about_equally_frequent(task):
    lengths = [len(row["label"]) for row in rows(task / "heldout.jsonl")]
    assert sorted(set(lengths)) == [4, 5, 6]
    assert min(lengths.count(n) for n in (4, 5, 6)) > 0.2 * len(lengths)


def test_text_survives_the_tokenizer_unchanged_one_token_a_character(task):
    tokenizer = load_tokenizer(task / "model")
    for text in [*(row["input"] + row["label"] for row in rows(task / "heldout.jsonl")), " a  b+c = 12 "]:
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.decode([5, tokenizer.eos_token_id, tokenizer.pad_token_id]) == "3<eos><pad>"


def test_a_character_outside_the_vocabulary_is_an_error(task):
    with pytest.raises(Exception, match="UNK"):
        load_tokenizer(task / "model")("sort 1!2=")


def test_the_model_loads_with_its_weights_and_a_million_parameters(task):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(task / "model")
    tokenizer = load_tokenizer(task / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.3e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    saved = load_file(task / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in model.model.state_dict(prefix="model.").items())
    assert model.config.vocab_size == len(tokenizer)
    assert eos_token_ids(task / "model") == [tokenizer.eos_token_id]
    assert not (task / "model" / "generation_config.json").exists()


def test_one_seed_gives_the_same_files_and_another_seed_others(task, tmp_path):
    make_task.main(["--out", str(tmp_path / "again"), "--seed", "3"])
    make_task.main(["--out", str(tmp_path / "other"), "--seed", "4"])
    files = sorted(path.relative_to(task) for path in task.rglob("*") if path.is_file())
    assert [str(f) for f in files if (task / f).read_bytes() != (tmp_path / "again" / f).read_bytes()] == []
    changed = {str(f) for f in files if (task / f).read_bytes() != (tmp_path / "other" / f).read_bytes()}
    assert changed == {*make_task.ROWS, "model/model.safetensors"}


def test_the_recipes_use_each_prompt_once_and_fit_the_answers():
    sft, grpo = recipe("quickstart-sft.yaml"), recipe("quickstart-grpo.yaml")
    assert sft.rollout.num_rollout * sft.rollout.batch_size == make_task.ROWS["sft.jsonl"]
    assert grpo.rollout.num_rollout * grpo.rollout.batch_size <= make_task.ROWS["train.jsonl"]
    assert grpo.rollout.max_response_len > make_task.MAX_DIGITS
    assert batch_plan(sft).num_steps_per_rollout == 1
    assert batch_plan(grpo).global_batch_size % grpo.rollout.n_samples_per_prompt == 0
    ppo = recipe("quickstart-ppo.yaml")
    assert ppo.rollout.num_rollout * ppo.rollout.batch_size <= make_task.ROWS["train.jsonl"]
    assert ppo.rollout.max_response_len == grpo.rollout.max_response_len


def test_the_context_holds_the_longest_prompt_and_response(task):
    longest = max(len(row["input"]) for row in rows(task / "train.jsonl"))
    assert longest + recipe("quickstart-grpo.yaml").rollout.max_response_len <= context_length(task / "model")
