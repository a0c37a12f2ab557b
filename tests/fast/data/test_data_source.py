import json
from collections import Counter

import pytest

from miles.core.samples import Sample
from miles.errors import DataError, HookError
from miles.rollout.data_source import RolloutDataSourceWithBuffer


def rows(count):
    return [{"input": f"p{i}", "label": str(i)} for i in range(count)]


def prompts(groups):
    return [group[0].prompt for group in groups]


@pytest.fixture
def make(write, make_args):
    def make(count=3, **changes):
        return RolloutDataSourceWithBuffer(make_args(write(rows(count)), **changes))

    return make


def test_a_group_is_n_samples_of_one_prompt_with_rising_numbers(make, tokenizer):
    source = make(3, label_key="label", n_samples_per_prompt=2)
    first, second = source.get_samples(2)
    assert [(s.group_index, s.index, s.prompt, s.label) for s in first + second] == [
        (0, 0, "p0", "0"),
        (0, 1, "p0", "0"),
        (1, 2, "p1", "1"),
        (1, 3, "p1", "1"),
    ]
    assert first[0].tokens == tokenizer("p0")["input_ids"]
    assert first[0].status is Sample.Status.PENDING


def test_siblings_share_nothing_that_can_be_changed(write, make_args):
    path = write([{"input": [{"role": "user", "content": "hi"}], "label": [1], "metadata": {"k": [1]}}])
    source = RolloutDataSourceWithBuffer(make_args(path, label_key="label"))
    a, b = source.get_samples(1)[0]
    tokens = list(b.tokens)
    a.tokens.append(9)
    a.metadata["k"].append(2)
    a.label.append(2)
    a.prompt[0]["content"] = "changed"
    for other in (b, source.get_samples(1)[0][0]):
        assert (other.metadata, other.label, other.prompt[0]["content"]) == ({"k": [1]}, [1], "hi")
        assert other.tokens == tokens


def test_more_groups_than_rows_wrap_over_as_many_epochs_as_needed(make):
    source = make(3, rollout_shuffle=True)
    taken = source.get_samples(8)
    assert len(taken) == 8
    assert (source.epoch, source.offset) == (2, 2)
    assert set(Counter(prompts(taken)).values()) == {2, 3}
    assert [sorted(prompts(taken)[i : i + 3]) for i in (0, 3)] == [["p0", "p1", "p2"]] * 2
    resumed = make(3, rollout_shuffle=True)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert [[s.to_dict() for s in g] for g in resumed.get_samples(8)] == [
        [s.to_dict() for s in g] for g in source.get_samples(8)
    ]


def test_each_epoch_has_its_own_order_and_each_seed_its_own(make):
    def epochs(seed):
        taken = prompts(make(10, rollout_shuffle=True, rollout_seed=seed).get_samples(20))
        return taken[:10], taken[10:]

    assert sorted(epochs(1)[0]) == sorted(epochs(1)[1]) == sorted(f"p{i}" for i in range(10))
    assert epochs(1)[0] != epochs(1)[1]
    assert epochs(1) == epochs(1)
    assert epochs(1)[0] != epochs(7)[0]
    assert prompts(make(3).get_samples(4)) == ["p0", "p1", "p2", "p0"]


@pytest.mark.parametrize(("count", "batch"), [(30, 16), (32, 16), (20, 16), (10, 16)])
def test_no_prompt_gets_ahead_of_another_by_more_than_one(make, count, batch):
    source, seen = make(count, rollout_shuffle=True), Counter()
    for _ in range(9):
        seen.update(prompts(source.get_samples(batch)))
        assert len(seen) == min(count, seen.total())
        assert max(seen.values()) - (min(seen.values()) if len(seen) == count else 0) <= 1


def test_a_resume_inside_a_later_epoch_goes_on_in_that_epochs_order(make):
    def source():
        return make(10, rollout_shuffle=True)

    whole, first = source(), source()
    uninterrupted = [prompts(whole.get_samples(2)) for _ in range(15)]
    before = [prompts(first.get_samples(2)) for _ in range(7)]
    second = source()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    together = before + [prompts(second.get_samples(2)) for _ in range(8)]
    assert together == uninterrupted
    ids = [prompt for step in together for prompt in step]
    assert all(len(set(ids[e : e + 10])) == 10 for e in (0, 10, 20))


def test_a_state_of_another_file_is_refused_with_the_way_out(make, write, make_args):
    state = make(100).state_dict()
    other = write([{"input": f"q{i}"} for i in range(20)], "other.jsonl")
    with pytest.raises(
        DataError, match=r"other.jsonl: the checkpoint was made with .*data.jsonl[\s\S]*start a new run"
    ):
        RolloutDataSourceWithBuffer(make_args(other)).load_state_dict(state)


def test_a_state_of_another_order_or_another_number_of_rows_is_refused(make):
    state = make(5, rollout_shuffle=True).state_dict()
    for changes in ({"rollout_seed": 7}, {"rollout_shuffle": False}, {"n_samples_per_prompt": 3}):
        source = make(5, **{"rollout_shuffle": True, **changes})
        if "n_samples_per_prompt" in changes:
            source.load_state_dict(state)  # nothing is buffered, so new groups may have another size
        else:
            with pytest.raises(DataError, match="the checkpoint was made with"):
                source.load_state_dict(state)
    with pytest.raises(DataError, match="version 9"):
        make(5).load_state_dict({**state, "version": 9})


def test_a_state_with_groups_of_another_size_in_its_buffer_is_refused(make):
    source = make(5, n_samples_per_prompt=2)
    source.add_samples(source.get_samples(1))
    with pytest.raises(DataError, match="buffer holds groups of 2 samples and --n-samples-per-prompt is 3"):
        make(5, n_samples_per_prompt=3).load_state_dict(source.state_dict())


def test_a_state_of_other_rows_of_the_same_file_is_refused_though_they_are_as_many(write, make_args):
    path = write(rows(6))
    state = RolloutDataSourceWithBuffer(make_args(f"{path}@[0:3]")).state_dict()
    with pytest.raises(DataError, match="the checkpoint was made with"):
        RolloutDataSourceWithBuffer(make_args(f"{path}@[3:6]")).load_state_dict(state)
    RolloutDataSourceWithBuffer(make_args(f"{path}@[:-3]")).load_state_dict(state)


def test_the_same_file_in_another_place_is_accepted(make, write, make_args):
    source = make(5)
    source.get_samples(3)
    moved = RolloutDataSourceWithBuffer(make_args(write(rows(5), "moved.jsonl")))
    moved.load_state_dict(source.state_dict())
    assert prompts(moved.get_samples(1)) == ["p3"]


def test_groups_that_came_back_are_issued_first_and_survive_a_resume(make):
    source = make(5)
    taken = source.get_samples(2)
    taken[1][0].append_response([4, 5], [-0.1, -0.2], "ab", "3")
    source.add_samples(taken)
    assert source.get_buffer_length() == 2
    resumed = make(5)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    again = resumed.get_samples(3)
    assert [g[0].group_index for g in again] == [0, 1, 2]
    assert again[1][0].version_spans == [(0, "3")]
    assert again[1][0].response_length == 2
    assert resumed.get_buffer_length() == 0


def test_a_group_of_another_size_cannot_go_back(make):
    source = make(5, n_samples_per_prompt=2)
    with pytest.raises(ValueError, match="a group of 1 samples cannot go back: groups have 2"):
        source.add_samples([source.get_samples(1)[0][:1]])


BUFFER_FILTERS = """
def newest(args, rollout_id, buffer, num_samples):
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]
def keeps(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]
def too_many(args, rollout_id, buffer, num_samples):
    taken = list(buffer)
    buffer.clear()
    return taken
def nothing(args, rollout_id, buffer, num_samples):
    return None
def raises(args, rollout_id, buffer, num_samples):
    raise KeyError("x")
"""


def test_a_buffer_filter_chooses_and_its_mistakes_are_named(make, tmp_path, monkeypatch):
    (tmp_path / "buffer_filters_of_test.py").write_text(BUFFER_FILTERS)
    monkeypatch.syspath_prepend(tmp_path)

    def filtered(name, count):
        source = make(5, buffer_filter_path=f"buffer_filters_of_test.{name}")
        source.add_samples(source.get_samples(3))
        return [g[0].group_index for g in source.get_samples(count)]

    assert filtered("newest", 4) == [2, 1, 0, 3]
    for name, problem in (
        ("keeps", "still in the buffer"),
        ("too_many", "returned 3 groups when asked for 1"),
        ("nothing", "returned NoneType"),
        ("raises", "raised KeyError"),
    ):
        with pytest.raises(HookError, match=rf"buffer_filters_of_test.{name}: .*{problem}"):
            filtered(name, 1)


def test_dropped_prompts_and_the_epoch_are_metrics(make):
    source = make(12, rollout_max_prompt_len=3)  # <bos> p 0 has three tokens, p10 and p11 have four
    assert len(source) == 10
    source.get_samples(15)
    assert source.metrics() == {
        "rollout/dropped_prompts": 2.0,
        "rollout/buffered_groups": 0.0,
        "rollout/epoch": 1.5,
    }


def test_the_models_own_limit_holds_where_no_context_length_is_set(write, make_args):
    path = write([{"input": "x" * 80}])  # the model of these tests has 64 positions
    with pytest.raises(DataError, match="has 81 tokens, and the context of 64 leaves no room"):
        RolloutDataSourceWithBuffer(make_args(path))
    assert len(RolloutDataSourceWithBuffer(make_args(path, rollout_max_context_len=100))) == 1


def test_fine_tuning_gets_messages_as_the_file_has_them_whatever_the_flag(write, make_args):
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for flag in (False, True):
        args = make_args(write([{"input": conversation}]), loss_type="sft_loss", apply_chat_template=flag)
        sample = RolloutDataSourceWithBuffer(args).get_samples(1)[0][0]
        assert sample.prompt == conversation
        assert sample.tokens == []
