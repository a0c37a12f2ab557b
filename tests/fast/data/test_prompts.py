import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.errors import DataError
from miles.rollout.prompts import PromptFormat, load_prompts

HI = [{"role": "user", "content": "hi"}]


def load(path, tokenizer=None, **format):
    return load_prompts(path, PromptFormat(**{"input_key": "input", **format}), tokenizer)


def error_of(path, tokenizer=None, **format):
    with pytest.raises(DataError) as caught:
        load(path, tokenizer, **format)
    return caught.value


def test_rows_carry_prompt_label_metadata_and_ids(write, tokenizer):
    path = write([{"q": "hi", "a": 4, "extra": {"k": 1}}, {"q": "yo", "a": None}])
    rows = load(path, tokenizer, input_key="q", label_key="a", metadata_key="extra").rows
    assert [(r.line, r.prompt, r.label, r.metadata) for r in rows] == [(1, "hi", 4, {"k": 1}), (2, "yo", None, {})]
    assert rows[0].tokens.tolist() == tokenizer("hi")["input_ids"]


def test_a_missing_key_names_the_keys_of_the_row_and_the_nearest(write):
    path = write([{"input": "a", "label": "b"}, {"inputs": "a", "label": "b"}])
    assert str(error_of(path)).startswith(f"{path}:2: the row has no 'input', only 'inputs', 'label'")
    assert "did you mean --input-key inputs?" in str(error_of(path))
    assert "did you mean --label-key label?" in str(error_of(path, label_key="labl"))
    assert "give the row its 'zzzzzzz', or name one of them with --input-key" in str(
        error_of(path, input_key="zzzzzzz")
    )


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        (None, "is null"),
        (3, "is int"),
        ({"role": "user"}, "is dict"),
        ("", "is an empty string"),
        ([], "is an empty list"),
        (["hi"], "holds str at position 0, not a message"),
        ([{"content": "x"}], "holds a message without a role at position 0"),
        ([*HI, {"role": "user", "content": 3}], "holds a message without content at position 1"),
    ],
)
def test_a_prompt_of_the_wrong_type_stops_with_its_line(write, prompt, problem):
    error = error_of(write([{"input": "fine"}, {"input": prompt}]))
    assert error.line == 2
    assert f"'input' {problem}" in str(error)


def test_metadata_that_is_no_object_is_an_error(write):
    assert "'metadata' is str, not an object" in str(error_of(write([{"input": "a", "metadata": "b"}])))


def test_an_empty_file_is_an_error_and_not_an_endless_loop(write):
    assert "holds no rows" in str(error_of(write("")))
    assert "holds no rows" in str(error_of(write("\n  \n")))


def test_the_template_is_applied_once_to_messages_and_to_strings(write, tokenizer):
    path = write([{"input": HI}, {"input": "hi"}])
    rows = load(path, tokenizer, apply_chat_template=True).rows
    assert [r.prompt for r in rows] == ["<bos>user: hi\nassistant: "] * 2
    expected = tokenizer.apply_chat_template(HI, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert [r.tokens.tolist() for r in rows] == [expected, expected]


def test_messages_without_the_flag_stay_messages_and_have_the_same_ids(write, tokenizer):
    row = load(write([{"input": HI}]), tokenizer).rows[0]
    assert row.prompt == HI
    assert row.tokens.tolist() == tokenizer.apply_chat_template(
        HI, tokenize=True, add_generation_prompt=True, return_dict=False
    )


def test_a_row_that_the_template_refuses_is_named(write, tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}x"
    )
    error = error_of(write([{"input": HI}, {"input": [{"role": "system", "content": "s"}]}]), tokenizer)
    assert error.line == 2
    assert "the chat template refuses these messages: no" in str(error)


def test_a_character_that_the_tokenizer_does_not_know_stops_with_its_line(write):
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    error = error_of(write([{"input": "ab"}, {"input": "aé"}]), PreTrainedTokenizerFast(tokenizer_object=backend))
    assert error.line == 2
    assert "the tokenizer refuses the prompt 'aé': " in str(error)
    assert "fix: mend the row, or use a tokenizer that knows its characters" in str(error)


def test_long_prompts_are_dropped_counted_and_logged(write, tokenizer, caplog):
    loaded = load(write([{"input": "short"}, {"input": "long" * 10}, {"input": "also"}]), tokenizer, max_prompt_len=10)
    assert [r.prompt for r in loaded.rows] == ["short", "also"]
    assert loaded.num_dropped == 1
    assert "dropped 1 of 3 prompts that have more than 10 tokens (--rollout-max-prompt-len)" in caplog.text
    assert "all 1 prompts have more than 2 tokens" in str(
        error_of(write([{"input": "short"}]), tokenizer, max_prompt_len=2)
    )


def test_the_length_filter_counts_what_the_template_arguments_add(write, tokenizer):
    path = write([{"input": "hi"}, {"input": "hi"}])
    length = len(load(path, tokenizer, apply_chat_template=True).rows[0].tokens)
    kept = {"apply_chat_template": True, "max_prompt_len": length}
    assert load(path, tokenizer, **kept).num_dropped == 0
    assert "all 2 prompts" in str(error_of(path, tokenizer, **kept, template_kwargs={"quiet": True}))


# Case C10.
def test_the_length_filter_counts_the_tools(write, tokenizer):
    tools = [{"name": "f" * 35}]
    without = {"input": [{"role": "user", "content": "x" * 21}]}
    lengths = [
        len(load(write([row]), tokenizer, tool_key="tools").rows[0].tokens)
        for row in (without, {**without, "tools": tools})
    ]
    assert lengths == [40, 90]
    loaded = load(write([without, {**without, "tools": tools}]), tokenizer, tool_key="tools", max_prompt_len=50)
    assert (len(loaded.rows), loaded.num_dropped) == (1, 1)
    assert (
        load(write([{**without, "tools": tools}]), tokenizer, max_prompt_len=50).num_dropped == 0
    )  # key not asked for


@pytest.mark.parametrize(
    ("tools", "problem"),
    [
        ("{", "'tools' is text but not JSON: Expecting"),
        ('{"name": "f"}', "'tools' is dict, not a list"),
        (3, "'tools' is int, not a list"),
        (["f"], "'tools' holds str, not an object"),
    ],
)
def test_tools_that_are_none_stop_with_their_line(write, tools, problem):
    error = error_of(write([{"input": "a"}, {"input": "a", "tools": tools}]), tool_key="tools")
    assert error.line == 2
    assert problem in str(error)
    assert "--tool-key" in str(error)


def test_rows_without_tools_have_none(write):
    rows = load(
        write([{"input": "a"}, {"input": "a", "tools": None}, {"input": "a", "tools": ""}]), tool_key="tools"
    ).rows
    assert [(row.metadata, row.tools) for row in rows] == [({}, None), ({}, None), ({"tools": []}, None)]


def test_a_label_that_the_given_check_refuses_stops_with_its_line(write):
    path = write([{"input": "a", "label": "4"}, {"input": "a", "label": "four"}])
    error = error_of(
        path, label_key="label", label_problem=lambda label, _: None if label.isdigit() else "is no number"
    )
    assert error.line == 2
    assert ":2: is no number\n" in str(error)


def test_a_prompt_that_fills_the_context_is_an_error_with_both_lengths_and_the_flag(write, tokenizer):
    path = write([{"input": "short"}, {"input": "x" * 31}])
    error = error_of(path, tokenizer, max_context_len=32)
    assert str(error).startswith(f"{path}:2: the prompt has 32 tokens, and the context of 32 leaves no room")
    assert "--rollout-max-prompt-len 31" in str(error)
    assert load(path, tokenizer, max_context_len=32, max_prompt_len=31).num_dropped == 1
    assert len(load(path, tokenizer, max_context_len=33).rows) == 2


def test_slices_of_a_file_count_as_python_does(write):
    path = write([{"input": str(i)} for i in range(1, 11)])
    for text, expected in (("[:3]", "1 2 3"), ("[-2:]", "9 10"), ("[2:-6]", "3 4"), ("[8:99]", "9 10")):
        assert " ".join(r.prompt for r in load(f"{path}@{text}").rows) == expected
    assert "takes none of the 10 rows" in str(error_of(f"{path}@[20:]"))


def test_ten_thousand_prompts_load_in_seconds(write, tokenizer):
    path = write([{"input": f"what is {i} plus {i + 1}?"} for i in range(10_000)])
    start = time.perf_counter()
    assert len(load(path, tokenizer, apply_chat_template=True).rows) == 10_000
    assert time.perf_counter() - start < 15
