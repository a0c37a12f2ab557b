import json

import pytest

from miles.core.samples import Sample
from miles.errors import HookError, TrainingError
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.inference_rollout.compatibility import load_rollout_fn
from miles.rollout.sft_rollout import generate_rollout
from miles.rollout.train_data_conversion import to_train_batch
from tests.fast.rollout.support import END, ids, make_args, run, write_rows

USER, ASSISTANT = 2, 3


def sft(tmp_path, rows, label_key="label", n=1, **sections):
    path = write_rows(tmp_path / "sft.jsonl", rows)
    sections["data"] = {"prompt_data": path, "label_key": label_key, **sections.get("data", {})}
    sections["rollout"] = {"batch_size": len(rows), "n_samples_per_prompt": n, **sections.get("rollout", {})}
    args = make_args(tmp_path, algorithm={"loss_type": "sft_loss"}, **sections)
    return generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples


def chat(*turns):
    return [{"role": role, "content": content} for role, content in turns]


def test_prompt_and_answer_become_tokens_with_the_answer_and_its_end_trained(tmp_path):
    groups = sft(tmp_path, [{"input": "1+1=", "label": "2"}, {"input": "2+3=", "label": "5"}])
    sample = groups[0][0]
    assert sample.tokens == [*ids("1+1=2"), END]
    assert (sample.response_length, sample.loss_mask) == (2, [1, 1])
    assert sample.rollout_log_probs is None
    assert sample.response == "2"
    batch = to_train_batch(groups, require_rewards=False)
    assert batch["loss_mask"].lengths().tolist() == [2, 2]
    assert "reward" not in batch
    assert "rollout_log_probs" not in batch
    assert batch["weight_version"].values.tolist() == [-1, -1]


def test_all_samples_of_a_prompt_are_equal(tmp_path):
    (group,) = sft(tmp_path, [{"input": "1+1=", "label": "2"}], n=3)
    assert [s.tokens for s in group] == [[*ids("1+1=2"), END]] * 3
    assert group[0].tokens is not group[1].tokens


def test_the_last_assistant_message_is_the_answer(tmp_path):
    rows = [{"input": chat(("user", "hi"), ("assistant", "yo"), ("user", "2?"), ("assistant", "ok"))}]
    ((sample,),) = sft(tmp_path, rows, label_key=None)
    prompt = [USER, *ids("hi"), END, *ids(" "), ASSISTANT, *ids("yo"), END, *ids(" "), USER, *ids("2?"), END]
    assert sample.tokens == [*prompt, *ids(" "), ASSISTANT, *ids("ok"), END]
    assert (sample.response_length, sample.loss_mask) == (3, [1, 1, 1])


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
        ({"input": "1" * 60, "label": "22222"}, "label", "66 tokens, but the context holds 64"),
    ],
)
def test_a_row_that_cannot_be_trained_on_says_why(tmp_path, row, label_key, message):
    with pytest.raises(TrainingError, match=message):
        sft(tmp_path, [row], label_key=label_key)


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path):
    template = tmp_path / "counting.jinja"
    template.write_text("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"input": chat(("user", "hi"), ("assistant", "yo"))}]
    with pytest.raises(TrainingError, match="writes the prompt differently once the answer follows"):
        sft(tmp_path, rows, label_key=None, model={"chat_template_path": str(template)})


def test_it_has_no_evaluation(tmp_path):
    with pytest.raises(HookError, match="--eval-function-path"):
        generate_rollout(make_args(tmp_path), 0, None, evaluation=True)


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
    with pytest.raises(TrainingError, match="no end-of-sequence token"):
        generate_rollout(args, 0, RolloutDataSourceWithBuffer(args))
