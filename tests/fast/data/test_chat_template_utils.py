import pytest

from miles.utils.chat_template_utils import encode_prompt, encode_texts, prompt_text

HI = [{"role": "user", "content": "hi"}]
BOS = 1


# Case C16.
def test_messages_get_one_bos_and_the_ids_of_the_tokenizers_own_template_call(tokenizer):
    ids = encode_prompt(tokenizer, HI, {})
    assert ids == tokenizer.apply_chat_template(HI, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ids.count(BOS) == 1


def test_a_plain_string_keeps_the_one_bos_of_a_base_model(tokenizer):
    ids = encode_prompt(tokenizer, "hi", {})
    assert ids == tokenizer("hi")["input_ids"]
    assert ids.count(BOS) == 1


def test_rendered_text_is_tokenised_as_the_messages_are(tokenizer):
    text = prompt_text(tokenizer, HI, {})
    assert encode_texts(tokenizer, [text], rendered=True) == [encode_prompt(tokenizer, HI, {})]
    assert encode_texts(tokenizer, [text], rendered=False)[0].count(BOS) == 2  # what the rule prevents


def test_the_prompt_as_text_is_rendered_and_never_a_python_repr(tokenizer):
    assert prompt_text(tokenizer, HI, {}) == "<bos>user: hi\nassistant: "
    assert prompt_text(tokenizer, "plain", {}) == "plain"


def test_template_arguments_reach_the_template(tokenizer):
    assert prompt_text(tokenizer, HI, {"quiet": True}).startswith("<bos>q user")
    assert prompt_text(tokenizer, HI, {"add_generation_prompt": False}) == "<bos>user: hi\n"


def test_tools_reach_the_template_and_an_empty_list_is_none(tokenizer):
    tool = {"name": "f"}
    assert prompt_text(tokenizer, HI, {}, [tool]) == '<bos>[{"name": "f"}]\nuser: hi\nassistant: '
    assert encode_prompt(tokenizer, HI, {}, [tool]) == tokenizer.apply_chat_template(
        HI, tools=[tool], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert encode_prompt(tokenizer, HI, {}, []) == encode_prompt(tokenizer, HI, {})


def test_no_template_and_a_refusing_template_are_value_errors(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match=r"has no chat template.*--chat-template-path"):
        encode_prompt(tokenizer, HI, {})
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses these messages: roles must alternate"):
        encode_prompt(tokenizer, HI, {})


def test_batches_give_the_ids_of_single_calls(tokenizer):
    texts = [f"text {i}" for i in range(2500)]
    assert (
        encode_texts(tokenizer, texts, rendered=True)[1234] == encode_texts(tokenizer, ["text 1234"], rendered=True)[0]
    )
    assert encode_texts(tokenizer, [], rendered=True) == []
