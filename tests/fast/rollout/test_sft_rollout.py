import json

import pytest

from miles.core.ledger import Ledger
from miles.core.samples import Sample
from miles.errors import DataError, HookError
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.inference_rollout.compatibility import load_rollout_fn
from miles.rollout.sft_rollout import generate_rollout
from miles.rollout.train_data_conversion import to_train_batch
from tests.fast.rollout.support import END, ids, make_args, run, write_rows

USER, ASSISTANT = 2, 3


def make_sft(tmp_path, rows, label_key="label", n=1, ledger=None, **sections):
    path = write_rows(tmp_path / "sft.jsonl", rows)
    sections["data"] = {"prompt_data": path, "label_key": label_key, **sections.get("data", {})}
    sections["rollout"] = {"batch_size": len(rows), "n_samples_per_prompt": n, **sections.get("rollout", {})}
    args = make_args(tmp_path, algorithm={"loss_type": "sft_loss"}, **sections)
    return generate_rollout(RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args), ledger))


def sft(tmp_path, rows, **sections):
    return make_sft(tmp_path, rows, **sections)(RolloutFnTrainInput(0)).samples


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_prompt_and_answer_become_tokens_with_the_answer_and_its_end_trained(tmp_path):
    groups = sft(tmp_path, [{"input": "1+1=", "label": "2"}, {"input": "2+3=", "label": "5"}])
    sample = groups[0][0]
    assert sample.tokens == [*ids("1+1=2"), END]
    assert (sample.response_length, sample.loss_mask) == (2, [1, 1])
    assert sample.rollout_log_probs is None
    assert sample.response == "2 <|end|>"
    batch = to_train_batch(groups, require_rewards=False)
    assert batch["loss_mask"].lengths().tolist() == [2, 2]
    assert "reward" not in batch
    assert "rollout_log_probs" not in batch
    assert batch["weight_version"].values.tolist() == [-1, -1]


def test_all_samples_of_a_prompt_are_equal(tmp_path):
    (group,) = sft(tmp_path, [{"input": "1+1=", "label": "2"}], n=3)
    assert [s.tokens for s in group] == [[*ids("1+1=2"), END]] * 3
    assert group[0].tokens is not group[1].tokens


TWO_TURNS = chat(("user", "hi"), ("assistant", "yo"), ("user", "2?"), ("assistant", "ok"))
PROMPT = [USER, *ids("hi"), END, *ids(" "), ASSISTANT]
BETWEEN = [*ids(" "), USER, *ids("2?"), END, *ids(" "), ASSISTANT]


# Case D09.
def test_every_turn_of_the_assistant_is_trained_on(tmp_path):
    ((sample,),) = sft(tmp_path, [{"input": TWO_TURNS}], label_key=None)
    assert sample.tokens == [*PROMPT, *ids("yo"), END, *BETWEEN, *ids("ok"), END]
    assert sample.loss_mask == [1, 1, 1, *[0] * len(BETWEEN), 1, 1, 1]
    assert sample.response_length == len(sample.loss_mask) == len(sample.tokens) - len(PROMPT)
    sample.validate()


def test_the_response_begins_at_the_first_turn_that_is_trained_on(tmp_path):
    messages = [dict(m) for m in TWO_TURNS]
    messages[1]["step_loss_mask"] = 0
    ((sample,),) = sft(tmp_path, [{"input": messages}], label_key=None)
    assert sample.tokens == [*PROMPT, *ids("yo"), END, *BETWEEN, *ids("ok"), END]
    assert (sample.response_length, sample.loss_mask) == (3, [1, 1, 1])
    ((last,),) = sft(tmp_path, [{"input": TWO_TURNS}], label_key=None, data={"loss_mask_type": "distill_qwen"})
    assert (last.tokens, last.response_length) == (sample.tokens, 3)


def test_tools_and_arguments_of_the_template_are_rendered(tmp_path):
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ mood }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    rows = [{"input": TWO_TURNS, "metadata": {"tools": [{"name": "add"}]}}]
    settings = {"model": {"chat_template_path": str(template)}, "data": {"apply_chat_template_kwargs": {"mood": "ok"}}}
    for kind in ("template", "qwen3"):
        settings["data"]["loss_mask_type"] = kind
        ((sample,),) = sft(tmp_path, rows, label_key=None, **settings)
        assert sample.tokens[:6] == [*ids("addok"), USER], kind
        assert sum(sample.loss_mask) == 6
    rows[0]["metadata"]["tools"] = "add"
    with pytest.raises(DataError, match="a list of tool declarations is wanted"):
        sft(tmp_path, rows, label_key=None, **settings)


@pytest.mark.parametrize("prompt", ["hi", chat(("user", "hi"))])
def test_a_prompt_with_a_label_is_written_by_the_template_once(tmp_path, prompt):
    rows = [{"input": prompt, "label": "yo"}]
    ((sample,),) = sft(tmp_path, rows, data={"apply_chat_template": True})
    assert sample.tokens == [USER, *ids("hi"), END, *ids(" "), ASSISTANT, *ids("yo"), END]
    assert sample.loss_mask == [1, 1, 1]


@pytest.mark.parametrize(
    ("row", "label_key", "message"),
    [
        ({"input": "just text"}, None, "no answer: name its key with --label-key, or give lists of chat messages"),
        ({"input": chat(("user", "hi"))}, None, "the last message is not the assistant's"),
        ({"input": chat(("user", "hi"), ("assistant", "yo")), "label": "yo"}, "label", "and there is a label too"),
        ({"input": "1+1=", "label": 2}, "label", "the label is int, but an answer is text"),
        (
            {"input": "1" * 60, "label": "22222"},
            "label",
            "66 tokens, but the context holds 64\n    fix: shorten the row, or drop",
        ),
        ({"input": [{**m, "step_loss_mask": 0} for m in TWO_TURNS]}, None, "no token is trained on"),
        ({"input": chat(("assistant", "yo"))}, None, "the first message is the assistant's"),
    ],
)
def test_a_row_that_cannot_be_trained_on_says_why(tmp_path, row, label_key, message):
    rows = [{"input": chat(("user", "a"), ("assistant", "b")), "label": None}, row]
    if label_key:
        rows[0] = {"input": "1", "label": "1"}
    with pytest.raises(DataError, match=message) as caught:
        sft(tmp_path, rows, label_key=label_key)
    assert (caught.value.path, caught.value.line) == (str(tmp_path / "sft.jsonl"), 2)


def test_conversations_longer_than_the_given_context_are_dropped_counted_and_replaced(tmp_path):
    rows = [{"input": text, "label": "2"} for text in ("1", "1" * 9, "11", "1" * 8, "111")]
    ledger = Ledger()
    rollout = make_sft(tmp_path, rows, ledger=ledger, rollout={"batch_size": 2, "max_context_len": 9})
    first, second = rollout(RolloutFnTrainInput(0)), rollout(RolloutFnTrainInput(1))
    assert [g[0].group_index for g in first.samples] == [0, 2]
    assert [g[0].group_index for g in second.samples] == [4, 5]
    assert first.metrics == second.metrics == {"rollout/dropped_too_long": 1.0}
    assert ledger.dropped == {"too_long": 2}
    assert ledger.groups("ready") == [0, 2, 4, 5]
    ledger.assert_balanced()


def test_data_that_is_all_too_long_ends_with_an_error(tmp_path):
    with pytest.raises(DataError, match="3 conversations in a row are longer than 5 tokens"):
        sft(tmp_path, [{"input": "1" * 9, "label": "2"}] * 3, rollout={"max_context_len": 5})


def test_a_mask_type_for_text_without_turns_is_refused(tmp_path):
    rows = [{"input": "1+1=", "label": "2"}]
    with pytest.raises(DataError, match="a string prompt has no turns to mask, and --loss-mask-type is qwen"):
        sft(tmp_path, rows, data={"loss_mask_type": "qwen"})
    assert sft(tmp_path, rows, data={"loss_mask_type": "qwen", "apply_chat_template": True})


def test_a_template_that_never_ends_a_turn_is_told_once(tmp_path, caplog):
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    sft(tmp_path, [{"input": TWO_TURNS}] * 2, label_key=None, model={"chat_template_path": str(template)})
    assert [r.message for r in caplog.records if "does not learn to stop" in r.message] != []
    assert len(caplog.records) == 1


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path):
    template = tmp_path / "counting.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"input": chat(("user", "hi"), ("assistant", "yo"))}]
    with pytest.raises(DataError, match="does not follow its generation prompt: '1hi' becomes '2hiyo'"):
        sft(tmp_path, rows, label_key=None, model={"chat_template_path": str(template)})


def test_it_has_no_evaluation(tmp_path):
    with pytest.raises(HookError, match="--eval-function-path"):
        generate_rollout(RolloutFnConstructorInput(make_args(tmp_path), None))(RolloutFnEvalInput(0))


def test_it_loads_as_a_rollout_function(tmp_path):
    async def test():
        path = write_rows(tmp_path / "sft.jsonl", [{"input": "1+1=", "label": "2"}])
        args = make_args(
            tmp_path,
            algorithm={"loss_type": "sft_loss"},
            data={"prompt_data": path},
            rollout={"batch_size": 1, "n_samples_per_prompt": 1},
        )
        rollout = load_rollout_fn(
            "miles.rollout.sft_rollout.generate_rollout",
            RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args)),
        )
        output = await rollout(RolloutFnTrainInput(0))
        assert output.samples[0][0].status is Sample.Status.COMPLETED
        await rollout.close()

    run(test())


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    make_args(tmp_path)
    settings = tmp_path / "model" / "tokenizer_config.json"
    path = write_rows(tmp_path / "sft.jsonl", [{"input": "1+1=", "label": "2"}])
    args = make_args(
        tmp_path, algorithm={"loss_type": "sft_loss"}, data={"prompt_data": path}, rollout={"batch_size": 1}
    )
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "eos_token"}))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        generate_rollout(RolloutFnConstructorInput(args, RolloutDataSourceWithBuffer(args)))(RolloutFnTrainInput(0))
