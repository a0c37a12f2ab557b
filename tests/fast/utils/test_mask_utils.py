import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from miles.config.schema import DataConfig
from miles.utils.mask_utils import LOSS_MASK_TYPES, Conversation, mask_conversation

SPECIALS = ["<unk>", "<|im_start|>", "<|im_end|>", "<s>", "</s>"]
PRINTABLE = "\n" + "".join(map(chr, range(32, 127)))

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Begins with a system message of its own; results of tools in a row share a turn.
QWEN2 = """{% if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}Be kind.{% endif %} Tools:{% for t in tools %} {{ t.name }}{% endfor %}<|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
Be kind.<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{% endif %}<r>{{ m.content }}</r>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% elif not (tools and loop.first and m.role == 'system') %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Drops the thinking of turns before the last question, and writes an empty one into the last turn if it has none.
QWEN3 = """{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% if tools %}<|im_start|>system
Tools:{% for t in tools %} {{ t.name }}{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}{% set thought = '' %}{% if '</think>' in m.content %}{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}{% if loop.index0 > ns.last and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}{{ text }}{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""

# Drops all thinking, even that of the last turn, and opens it in the generation prompt.
DISTILL = """<s>{% for m in messages %}{% if m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] }}</s>{% else %}[U]{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[A]<think>
{% endif %}"""


def make_tokenizer(template, eos="<|im_end|>"):
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *PRINTABLE])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def shown(template, messages, kind, tools=None, eos="<|im_end|>", **template_kwargs):
    """The conversation's text, with what is trained on in [[double brackets]]."""
    tokenizer = make_tokenizer(template, eos)
    conversation = Conversation(tokenizer=tokenizer, messages=messages, tools=tools, template_kwargs=template_kwargs)
    masked = mask_conversation(conversation, kind)
    assert len(masked.token_ids) == len(masked.loss_mask)
    text = ""
    for (a, b), i in zip(
        zip([0, *masked.loss_mask], [*masked.loss_mask, 0], strict=True), masked.token_ids, strict=False
    ):
        text += ("[[" if b > a else "]]" if a > b else "") + tokenizer.convert_ids_to_tokens(i)
    return text + ("]]" if masked.loss_mask[-1] else "")


TWO_TURNS = chat(("user", "hi"), ("assistant", "yo"), ("user", "2?"), ("assistant", "ok"))
THINKING = chat(
    ("user", "hi"),
    ("assistant", "<think>\nhm\n</think>\n\nyo"),
    ("user", "2?"),
    ("assistant", "<think>\na\n</think>\n\nok"),
)
TOOLS = [{"name": "add"}]


def test_every_kind_is_a_setting_and_the_default_is_general():
    annotation = DataConfig.model_fields["loss_mask_type"].annotation
    assert set(annotation.__args__) == set(LOSS_MASK_TYPES)
    assert DataConfig().loss_mask_type == "template"


@pytest.mark.parametrize("kind", ["template", "qwen", "qwen3"])
def test_the_turns_of_the_assistant_are_trained_on_with_their_end(kind):
    assert shown(CHATML, TWO_TURNS, kind) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[yo<|im_end|>]]\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n[[ok<|im_end|>]]"
    )


# Case D09.
def test_the_mask_covers_several_turns_from_the_first_trained_token_to_the_end():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    messages = chat(("user", "uuu"), ("assistant", "aa"), ("user", "uu"), ("assistant", "aa"))
    conversation = Conversation(tokenizer=make_tokenizer(template), messages=messages)
    masked = mask_conversation(conversation, "template")
    assert masked.response_start == 3
    assert masked.loss_mask[masked.response_start :] == [1, 1, 0, 0, 1, 1]
    assert len(masked.token_ids) - masked.response_start == 6


@pytest.mark.parametrize("kind", ["template", "qwen", "qwen3"])
def test_a_turn_with_step_loss_mask_0_is_not_trained_on(kind):
    messages = [dict(m) for m in TWO_TURNS]
    messages[1]["step_loss_mask"] = 0
    messages[3]["step_loss_mask"] = 1
    assert shown(CHATML, messages, kind).count("[[") == 1
    assert shown(CHATML, messages, kind).endswith("2?<|im_end|>\n<|im_start|>assistant\n[[ok<|im_end|>]]")
    messages[3]["step_loss_mask"] = 0
    with pytest.raises(ValueError, match="no token is trained on"):
        shown(CHATML, messages, kind)


def test_a_last_turn_that_is_not_trained_on_stays():
    messages = [dict(m) for m in TWO_TURNS]
    messages[3]["step_loss_mask"] = 0
    assert shown(CHATML, messages, "template").endswith(
        "[[yo<|im_end|>]]\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\nok<|im_end|>"
    )


def test_the_template_does_not_see_step_loss_mask():
    refusing = "{% for m in messages %}{% if m.step_loss_mask is defined %}{{ raise_exception('seen') }}{% endif %}{{ m.content }}{% endfor %}"
    messages = chat(("user", "q"), ("assistant", "a"))
    messages[1]["step_loss_mask"] = 1
    assert shown(refusing, messages, "template") == "q[[a]]"


@pytest.mark.parametrize("kind", ["template", "qwen"])
def test_a_system_message_that_the_template_adds_is_there_once(kind):
    assert shown(QWEN2, TWO_TURNS, kind) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        "[[yo<|im_end|>]]\n<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n[[ok<|im_end|>]]"
    )
    own = shown(QWEN2, [*chat(("system", "Be brief.")), *TWO_TURNS], kind)
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert "kind" not in own


@pytest.mark.parametrize("kind", ["template", "qwen"])
@pytest.mark.parametrize("system", [[], [("system", "Be brief.")]])
def test_tools_and_their_results_are_part_of_what_is_not_trained_on(kind, system):
    messages = chat(
        *system, ("user", "1+1, 2+2?"), ("assistant", "add add"), ("tool", "2"), ("tool", "4"), ("assistant", "2, 4")
    )
    text = shown(QWEN2, messages, kind, tools=TOOLS)
    first = "Be brief." if system else "Be kind."
    assert text == (
        f"<|im_start|>system\n{first} Tools: add<|im_end|>\n<|im_start|>user\n1+1, 2+2?<|im_end|>\n"
        "<|im_start|>assistant\n[[add add<|im_end|>]]\n<|im_start|>user\n<r>2</r><r>4</r><|im_end|>\n"
        "<|im_start|>assistant\n[[2, 4<|im_end|>]]"
    )


def test_qwen3_keeps_the_thinking_of_every_turn():
    assert shown(QWEN3, THINKING, "qwen3") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n[[<think>\nhm\n</think>\n\nyo<|im_end|>]]\n"
        "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n[[<think>\na\n</think>\n\nok<|im_end|>]]"
    )
    with_tools = shown(QWEN3, THINKING, "qwen3", tools=TOOLS)
    assert with_tools.startswith("<|im_start|>system\nTools: add<|im_end|>\n<|im_start|>user\nhi")
    assert with_tools.count("Tools") == 1


def test_arguments_of_the_template_decide_what_the_generation_prompt_is():
    text = shown(QWEN3, TWO_TURNS, "qwen3", enable_thinking=False)
    assert text.count("assistant\n<think>\n\n</think>\n\n[[") == 2
    assert shown(QWEN3, TWO_TURNS, "qwen3").count("assistant\n[[<think>") == 2
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) is written as .* generation prompt"):
        shown(QWEN3, THINKING, "qwen3", enable_thinking=False)


def test_a_template_that_drops_thinking_is_refused_by_the_general_kind_with_the_turn_and_the_way_out():
    with pytest.raises(ValueError, match="does not only append") as caught:
        shown(QWEN3, THINKING, "template")
    text = str(caught.value)
    assert "message 1 (assistant) is written differently once message 3 (assistant) follows" in text
    assert "'<think>\\nhm" in text
    assert "becomes 'yo" in text
    for way_out in ("--loss-mask-type qwen3", "qwen for", "distill_qwen", "--chat-template-path"):
        assert way_out in text


def test_a_turn_that_does_not_follow_its_generation_prompt_is_named():
    with pytest.raises(ValueError, match=r"message 1 \(assistant\) does not follow its generation prompt: '<think>"):
        shown(DISTILL, TWO_TURNS, "template", eos="</s>")


def test_a_single_turn_of_qwen3_needs_no_family():
    assert shown(QWEN3, THINKING[2:], "template") == shown(QWEN3, THINKING[2:], "qwen3")


def test_distill_qwen_trains_on_the_last_turn_with_its_thinking():
    messages = chat(
        ("user", "hi"), ("assistant", "<think>\nx</think>yo"), ("user", "2?"), ("assistant", "<think>\nhm</think>ok")
    )
    assert (
        shown(DISTILL, messages, "distill_qwen", eos="</s>")
        == "<s>[U]hi[A]yo</s>[U]2?[A]<think>\n[[hm</think>ok</s>]]"
    )
    messages[-1]["content"] = "hm</think>ok</s>"
    assert shown(DISTILL, messages, "distill_qwen", eos="</s>").endswith("<think>\n[[hm</think>ok</s>]]")
    assert shown(CHATML, TWO_TURNS, "distill_qwen").endswith("\n[[ok<|im_end|>]]")
    messages[-1] = {"role": "assistant", "content": None}
    with pytest.raises(ValueError, match=r"message 3 \(assistant\) has no text"):
        shown(DISTILL, messages, "distill_qwen", eos="</s>")


@pytest.mark.parametrize("kind", sorted(LOSS_MASK_TYPES))
@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "the last message is not the assistant's"),
        (TWO_TURNS[:3], "the last message is not the assistant's"),
        (TWO_TURNS[1:], "the first message is the assistant's"),
    ],
)
def test_a_conversation_without_prompt_or_answer_is_refused(kind, messages, problem):
    with pytest.raises(ValueError, match=problem):
        shown(CHATML, messages, kind)


def test_a_template_that_writes_messages_by_their_company_is_for_no_family():
    counting = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    for kind in ("qwen", "qwen3"):
        with pytest.raises(ValueError, match="in other company"):
            shown(counting, TWO_TURNS, kind)


@pytest.mark.parametrize("kind", ["template", "qwen", "qwen3"])
def test_a_token_at_the_beginning_of_the_sequence_is_there_once(kind):
    assert shown("<s>" + CHATML, TWO_TURNS, kind) == "<s>" + shown(CHATML, TWO_TURNS, kind)


def test_the_end_of_turn_need_not_be_the_end_of_sequence():
    assert shown(CHATML, TWO_TURNS[:2], "template", eos="</s>").endswith("[[yo<|im_end|>]]")


def test_special_tokens_inside_an_answer_do_not_end_it():
    messages = chat(("user", "hi"), ("assistant", "a<s>b"))
    assert shown("{% for m in messages %}{{ m.content }} {% endfor %}", messages, "template").endswith("[[a<s>b ]]")


def test_tokens_that_depend_on_what_stands_before_them_are_those_of_the_whole():
    vocabulary = {"<unk>": 0, "q": 1, "_a": 2, "a": 3}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.Replace(Regex("^a"), "_a")])
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("_?."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    masked = mask_conversation(
        Conversation(tokenizer=tokenizer, messages=chat(("user", "q"), ("assistant", "a"))), "template"
    )
    assert (masked.token_ids, masked.loss_mask) == ([1, 3], [0, 1])


def test_text_that_the_tokenizer_joins_across_a_turn_is_refused():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "q": 1, ":": 2, "a": 3, ":a": 4}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(":a|[a-z:]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if m.role == 'user' %}:{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="does not follow its generation prompt: its tokens merge"):
        mask_conversation(
            Conversation(tokenizer=tokenizer, messages=chat(("user", "q"), ("assistant", "a"))), "template"
        )
