import json
from collections import Counter

import pytest

from miles.core.samples import Sample
from miles.errors import DataError, HookError
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.dataset import feed


def rows(count):
    return [{"input": f"p{i}", "label": str(i)} for i in range(count)]


def prompts(groups):
    return [group[0].prompt for group in groups]


@pytest.fixture
def make(write, make_args):
    def make(count=3, **changes):
        return RolloutDataSourceWithBuffer(make_args(write(rows(count)), **changes))

    return make


# Case C18.
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


# Case C03.
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


# Case C04.
@pytest.mark.parametrize(("count", "batch"), [(30, 16), (32, 16), (20, 16), (10, 16)])
def test_no_prompt_gets_ahead_of_another_by_more_than_one(make, count, batch):
    source, seen = make(count, rollout_shuffle=True), Counter()
    for _ in range(9):
        seen.update(prompts(source.get_samples(batch)))
        assert len(seen) == min(count, seen.total())
        assert max(seen.values()) - (min(seen.values()) if len(seen) == count else 0) <= 1


# Case C06.
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


# Case C07.
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


def test_long_prompts_are_dropped_when_drawn_and_counted_and_an_epoch_counts_rows(make, caplog):
    source = make(12, rollout_max_prompt_len=3)  # <bos> p 0 has three tokens, p10 and p11 have four
    assert len(source) == 12
    assert source.metrics()["rollout/dropped_prompts"] == 0.0
    assert prompts(source.get_samples(15)) == [f"p{i}" for i in range(10)] + [f"p{i}" for i in range(5)]
    assert (source.epoch, source.offset) == (1, 5)
    assert source.metrics() == {
        "rollout/dropped_prompts": 2.0,
        "rollout/buffered_groups": 0.0,
        "rollout/epoch": 1 + 5 / 12,
    }
    assert "dropped 2 prompts so far that have more than 3 tokens (--rollout-max-prompt-len)" in caplog.text


def test_dropped_prompts_survive_a_resume_and_change_nothing_of_the_order(make):
    def source():
        return make(40, rollout_max_prompt_len=3, rollout_shuffle=True)

    whole, first, second = source(), source(), source()
    expected = [prompts(whole.get_samples(3)) for _ in range(12)]
    before = [prompts(first.get_samples(3)) for _ in range(5)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + [prompts(second.get_samples(3)) for _ in range(7)] == expected
    assert second.metrics() == whole.metrics()
    assert whole.metrics()["rollout/dropped_prompts"] == 40 * whole.epoch + whole.offset - 36


# Case C04.
@pytest.mark.parametrize(("count", "batch", "steps"), [(30, 16, 1), (32, 16, 2), (20, 16, 1), (10, 16, 0)])
def test_an_epoch_that_gives_the_steps_counts_the_prompts_that_fit_so_that_none_comes_twice(
    write, make_args, count, batch, steps
):
    long = [{"input": "x" * 20}] * 7
    args = make_args(write(rows(count) + long), rollout_max_prompt_len=5, num_epoch=1, num_rollout=None)
    source = RolloutDataSourceWithBuffer(args)
    assert len(source) == count
    assert len(source) // batch == steps
    seen = Counter(prompt for _ in range(steps) for prompt in prompts(source.get_samples(batch)))
    assert set(seen.values()) <= {1}


def test_an_epoch_without_a_prompt_that_fits_is_an_error_and_not_an_endless_loop(make):
    with pytest.raises(DataError, match=r"all 4 prompts have more than 2 tokens[\s\S]*raise --rollout-max-prompt-len"):
        make(4, rollout_max_prompt_len=2).get_samples(1)
    with pytest.raises(DataError, match="all 4 prompts"):
        len(make(4, rollout_max_prompt_len=2, num_epoch=1, num_rollout=None))


def test_an_unusable_row_of_a_large_file_stops_the_draw_and_moves_nothing(write, make_args, monkeypatch):
    monkeypatch.setattr(feed, "CHECKED_BYTES", 0)
    path = write('{"input": "a"}\n{"input": "b"}\n{bad\n')
    source = RolloutDataSourceWithBuffer(make_args(path))
    source.add_samples(source.get_samples(1))
    before = source.state_dict()
    with pytest.raises(DataError, match=r"data.jsonl:3: is not JSON"):
        source.get_samples(5)
    assert source.state_dict() == before
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"data.jsonl:3: is not JSON"):  # a small one is looked at when the run starts
        RolloutDataSourceWithBuffer(make_args(path))


def test_a_bad_row_that_was_prepared_ahead_stops_the_run_only_when_its_turn_comes(write, make_args, monkeypatch):
    monkeypatch.setattr(feed, "CHECKED_BYTES", 0)
    path = write('{"input": "a"}\n{"input": "b"}\n{"input": "c"}\n{bad\n')
    source = RolloutDataSourceWithBuffer(make_args(path))
    assert prompts(source.get_samples(2)) == ["a", "b"]
    assert prompts(source.get_samples(1)) == ["c"]
    assert (source.epoch, source.offset) == (0, 3)
    with pytest.raises(DataError, match="jsonl:4: is not JSON"):
        source.get_samples(1)


@pytest.mark.parametrize("checked", [0, 1 << 20])
def test_a_wrong_key_stops_at_the_start_with_the_nearest_one_whatever_the_files_size(
    write, make_args, monkeypatch, checked
):
    monkeypatch.setattr(feed, "CHECKED_BYTES", checked)
    with pytest.raises(
        DataError, match=r"jsonl:1: the row has no 'inptu', only 'input', 'label'\n.*--input-key input"
    ):
        RolloutDataSourceWithBuffer(make_args(write(rows(3)), input_key="inptu"))


def test_several_files_follow_each_other_and_shuffle_together(write, write_parquet, make_args):
    paths = [write(rows(4)), write_parquet([{"input": f"q{i}"} for i in range(5)])]
    everything = [f"p{i}" for i in range(1, 4)] + [f"q{i}" for i in range(5)]
    sliced = [f"{paths[0]}@[1:]", paths[1]]
    source = RolloutDataSourceWithBuffer(make_args(sliced))
    assert len(source) == 8
    assert prompts(source.get_samples(9)) == [*everything, "p1"]
    shuffled = prompts(RolloutDataSourceWithBuffer(make_args(sliced, rollout_shuffle=True)).get_samples(8))
    assert shuffled != everything
    assert sorted(shuffled) == everything


def test_weighted_files_keep_their_shares_and_resume_exactly(write, make_args):
    paths = [write(rows(3)), write([{"input": f"q{i}"} for i in range(12)], "other.jsonl")]

    def source():
        return RolloutDataSourceWithBuffer(make_args(paths, prompt_data_weights=[2, 1], rollout_shuffle=True))

    whole, first, second = source(), source(), source()
    taken = prompts(whole.get_samples(36))
    assert [sum(p.startswith("p") for p in taken[: 3 * t]) for t in range(1, 13)] == [2 * t for t in range(1, 13)]
    assert Counter(p for p in taken if p.startswith("p")) == {f"p{i}": 8 for i in range(3)}
    assert sorted(p for p in taken if p.startswith("q")) == sorted(f"q{i}" for i in range(12))
    assert (whole.epoch, whole.offset) == (2, 6)  # an epoch is 15 draws, as many as there are rows
    before = prompts(first.get_samples(7))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + prompts(second.get_samples(29)) == taken
    unweighted = RolloutDataSourceWithBuffer(make_args(paths, rollout_shuffle=True))
    with pytest.raises(DataError, match=r"weights \[2, 1\]"):
        unweighted.load_state_dict(first.state_dict())


# Case C07.
def test_a_changed_file_is_refused_and_accepted_when_told_so(write, make_args, caplog):
    path = write(rows(6))
    source = RolloutDataSourceWithBuffer(make_args(path))
    source.add_samples(source.get_samples(4)[:1])
    state = json.loads(json.dumps(source.state_dict()))
    write([{"input": f"r{i}", "label": str(i)} for i in range(6)])  # as long as before
    with pytest.raises(DataError, match=r"made with .*data.jsonl[\s\S]*--accept-changed-data goes on with the data"):
        RolloutDataSourceWithBuffer(make_args(path)).load_state_dict(state)
    changed = RolloutDataSourceWithBuffer(make_args(path, accept_changed_data=True))
    changed.load_state_dict(state)
    assert "it starts at the first row (--accept-changed-data)" in caplog.text
    groups = changed.get_samples(3)
    assert prompts(groups) == ["p0", "r0", "r1"]  # the buffer is kept
    assert [group[0].group_index for group in groups] == [0, 4, 5]
    assert (changed.epoch, changed.offset) == (0, 2)
    resumed = RolloutDataSourceWithBuffer(make_args(path, accept_changed_data=True))
    resumed.load_state_dict(changed.state_dict())
    assert prompts(resumed.get_samples(1)) == ["r2"]  # the flag may stay: nothing changed since


def test_without_a_dataset_samples_are_blank_and_numbered(make_args):
    args = make_args([], disable_rollout_global_dataset=True)
    source = RolloutDataSourceWithBuffer(args)
    assert len(source) == 0
    first = source.get_samples(2)
    assert [(s.group_index, s.index, s.prompt, s.tokens) for g in first for s in g] == [
        (0, 0, "", []),
        (0, 1, "", []),
        (1, 2, "", []),
        (1, 3, "", []),
    ]
    assert source.metrics() == {"rollout/buffered_groups": 0.0}
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(1)[0][0].group_index == 2


def test_a_sample_knows_file_and_line_of_its_row(write, make_args):
    path = write('{"input": "a"}\n\n{"input": "b"}\n')
    source = RolloutDataSourceWithBuffer(make_args(path))
    samples = [group[0] for group in source.get_samples(3)]
    assert [source.place_of(sample) for sample in samples] == [(path, 1), (path, 3), (path, 1)]
    assert source.place_of(Sample()) == (path, None)


def test_tools_become_metadata_and_each_sample_has_its_own(write, make_args, tokenizer):
    tool = {"type": "function", "function": {"name": "f"}}
    hi = [{"role": "user", "content": "hi"}]
    path = write([{"input": hi, "tools": json.dumps([tool]), "metadata": {"k": 1}}])
    a, b = RolloutDataSourceWithBuffer(make_args(path, rollout_max_context_len=200)).get_samples(1)[0]
    assert a.metadata == {"k": 1, "tools": [tool]}
    assert a.tokens == tokenizer.apply_chat_template(
        hi, tools=[tool], tokenize=True, add_generation_prompt=True, return_dict=False
    )
    a.metadata["tools"][0]["function"]["name"] = "g"
    assert b.metadata["tools"] == [tool]


def test_the_models_own_limit_holds_where_no_context_length_is_set(write, make_args):
    path = write([{"input": "x" * 80}])  # the model of these tests has 64 positions
    with pytest.raises(DataError, match="has 81 tokens, and the context of 64 leaves no room"):
        RolloutDataSourceWithBuffer(make_args(path))
    assert len(RolloutDataSourceWithBuffer(make_args(path, rollout_max_context_len=100))) == 1


# Case C13.
def test_fine_tuning_gets_messages_as_the_file_has_them_whatever_the_flag(write, make_args):
    conversation = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    for flag in (False, True):
        args = make_args(write([{"input": conversation}]), loss_type="sft_loss", apply_chat_template=flag)
        sample = RolloutDataSourceWithBuffer(args).get_samples(1)[0][0]
        assert sample.prompt == conversation
        assert sample.tokens == []


def test_a_label_that_the_reward_cannot_grade_against_names_file_and_line(make_args, write):
    path = write([{"input": "a", "label": "5"}, {"input": "b", "label": "abc"}])
    args = make_args(path, label_key="label", rm_type="dapo")
    with pytest.raises(DataError, match=r":2.*'abc'"):
        RolloutDataSourceWithBuffer(args)
    RolloutDataSourceWithBuffer(make_args(path, label_key="label", rm_type="dapo", custom_rm_path="my.reward"))
