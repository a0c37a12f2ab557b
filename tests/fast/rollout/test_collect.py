import asyncio
import functools
import re

import pytest

from miles.core.ledger import Ledger
from miles.core.samples import Sample
from miles.errors import ConfigError, HookError, MilesError, TrainingError
from miles.rollout.base_types import RolloutFnTrainInput
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.sglang_rollout import generate_rollout
from tests.fast.rollout import support
from tests.fast.rollout.scripted_engine import ScriptedEngine, reply
from tests.fast.rollout.support import END, ids, make_args, make_rollout, run

HERE = "tests.fast.rollout.support"


def answers(request):
    """`a` for even samples and the right digit for odd ones."""
    index = int(request["rid"].split("-")[1])
    group = int(request["rid"].split("-")[0])
    text = str(group + 1) if index % 2 else "a"
    return reply([*ids(text), END], text=text)


async def collect(tmp_path, script=answers, steps=1, rows=8, **sections):
    """Outputs of some steps, the engine, the data source and the ledger."""
    async with ScriptedEngine(script) as engine:
        args = make_args(tmp_path, engine.url, rows=rows, **sections)
        source, ledger = RolloutDataSourceWithBuffer(args), Ledger()
        rollout = make_rollout(args, source, ledger)
        try:
            outputs = [await rollout(RolloutFnTrainInput(step, weight_version=1)) for step in range(steps)]
        finally:
            await rollout.close()
            ledger.assert_balanced()
        return outputs, engine, source, ledger


def test_a_batch_has_the_groups_of_the_data_in_order_with_their_rewards(tmp_path):
    async def test():
        outputs, engine, _, ledger = await collect(tmp_path, steps=2)
        groups = [g for output in outputs for g in output.samples]
        assert [[s.group_index for s in g] for g in groups] == [[0, 0], [1, 1], [2, 2], [3, 3]]
        assert [s.index for g in groups for s in g] == list(range(8))
        assert [s.reward for g in groups for s in g] == [0.0, 1.0] * 4
        assert len(engine.requests) == 8
        assert ledger.groups("ready") == [0, 1, 2, 3]
        assert outputs[0].metrics["rollout/groups_started"] == 2.0
        assert outputs[0].metrics["rollout/groups_returned"] == 0.0

    run(test())


def test_a_run_is_the_same_again_whatever_order_replies_come_in(tmp_path):
    async def test():
        def seeded(delays):
            async def script(request):
                await asyncio.sleep(delays[int(request["rid"].split("-")[1]) % 4] / 200)
                return reply([5 + request["sampling_params"]["sampling_seed"] % 30, END])

            return script

        runs = []
        for delays in ([0, 1, 2, 3], [3, 2, 1, 0]):
            (output,), *_ = await collect(tmp_path, seeded(delays))
            runs.append([s.tokens for g in output.samples for s in g])
        assert runs[0] == runs[1]
        assert len({tuple(tokens) for tokens in runs[0]}) > 1

    run(test())


def test_dropped_groups_are_replaced_and_counted_by_reason(tmp_path):
    async def test():
        rollout = {
            "over_sampling_batch_size": 2,
            "dynamic_sampling_filter_path": "miles.rollout.filter_hub.dynamic_sampling_filters"
            ".check_reward_nonzero_std",
        }

        def script(request):
            group = int(request["rid"].split("-")[0])
            return reply([*ids("a"), END], text="a") if group == 0 else answers(request)

        (output,), _, _, ledger = await collect(tmp_path, script, rollout=rollout)
        assert output.samples[0][0].group_index == 1
        assert len(output.samples) == 2
        assert output.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 1.0
        assert ledger.dropped == {"zero_std_0.0": 1}

    run(test())


def test_one_rejected_group_starts_one_more_when_groups_start_singly(tmp_path):
    # Case E03.
    async def test():
        rollout = {
            "batch_size": 8,
            "over_sampling_batch_size": 1,
            "dynamic_sampling_filter_path": "miles.rollout.filter_hub.dynamic_sampling_filters"
            ".check_reward_nonzero_std",
        }

        def script(request):
            group = int(request["rid"].split("-")[0])
            return reply([*ids("a"), END], text="a") if group == 0 else answers(request)

        (output,), engine, source, _ = await collect(tmp_path, script, rows=12, rollout=rollout)
        assert output.metrics["rollout/groups_started"] == 9.0
        assert len(engine.requests) == 18
        assert source.get_buffer_length() == 0

    run(test())


def test_surplus_groups_are_cancelled_and_come_again_as_they_were(tmp_path):
    # Cases E03, E04, E18.
    async def test():
        async def script(request):
            group = int(request["rid"].split("-")[0])
            if group in (1, 3) and not released.is_set():
                await asyncio.sleep(30)
            return answers(request)

        released = asyncio.Event()
        async with ScriptedEngine(script) as engine:
            args = make_args(tmp_path, engine.url, rollout={"over_sampling_batch_size": 4})
            source, ledger = RolloutDataSourceWithBuffer(args), Ledger()
            rollout = make_rollout(args, source, ledger)
            first = await rollout(RolloutFnTrainInput(0))
            assert [g[0].group_index for g in first.samples] == [0, 2]
            assert first.metrics["rollout/groups_returned"] == 2.0
            await asyncio.sleep(0.1)
            assert sorted(rid.split("-")[0] for rid in engine.cancelled) == ["1", "1", "3", "3"]
            assert engine.running == 0
            assert ledger.groups("partial") == [1, 3]
            assert [[s.status for s in g] for g in source.buffer] == [[Sample.Status.PENDING] * 2] * 2
            assert [[s.tokens for s in g] for g in source.buffer] == [[ids("1+1=")] * 2, [ids("3+1=")] * 2]

            released.set()
            ledger.lease([0, 2])
            ledger.train([0, 2])
            second = await rollout(RolloutFnTrainInput(1))
            assert len(second.samples) == 2
            assert {1, 3} <= set(ledger.groups("ready", "partial"))
            ledger.assert_balanced()
            assert ledger.issued == ledger.trained + len(ledger.groups("ready", "partial"))
            await rollout.close()

    run(test())


def test_finished_surplus_is_given_back_too_and_nothing_is_lost(tmp_path):
    # Case E04.
    async def test():
        (output,), _, source, ledger = await collect(tmp_path, rollout={"over_sampling_batch_size": 4})
        kept = {g[0].group_index for g in output.samples}
        returned = {g[0].group_index for g in source.buffer}
        assert kept | returned == {0, 1, 2, 3}
        assert not kept & returned
        assert all(s.response_length == 0 and s.reward is None for g in source.buffer for s in g)
        assert ledger.groups("partial") == sorted(returned)

    run(test())


def test_a_failed_group_is_tried_again_from_its_prompt(tmp_path):
    async def test():
        failed: list[str] = []

        def script(request):
            if request["rid"].startswith("0-1-") and len(failed) < 2:
                failed.append(request["rid"])
                return reply([5, 6], output_token_logprobs=[])
            return answers(request)

        (output,), _engine, _, ledger = await collect(tmp_path, script)
        assert [s.reward for g in output.samples for s in g] == [0.0, 1.0, 0.0, 1.0]
        assert output.metrics["rollout/group_retries"] == 2.0
        assert all(s.tokens[:4] == ids(f"{s.group_index}+1=") for g in output.samples for s in g)
        assert ledger.failed == {}

    run(test())


def test_a_group_that_keeps_failing_stops_the_step_and_names_its_prompt(tmp_path):
    # Case E19.
    async def test():
        def script(request):
            return reply([5], output_token_logprobs=[]) if request["rid"].startswith("1-") else answers(request)

        async with ScriptedEngine(script) as engine:
            args = make_args(tmp_path, engine.url)
            source, ledger = RolloutDataSourceWithBuffer(args), Ledger()
            rollout = make_rollout(args, source, ledger)
            message = r"output_token_logprobs(.|\n)*prompt group 1 failed 3 times; prompt: 1\+1="
            with pytest.raises(MilesError, match=message):
                await rollout(RolloutFnTrainInput(0))
            assert ledger.failed == {"EngineError": 1}
            assert [g[0].group_index for g in source.buffer] == [0]
            ledger.assert_balanced()
            assert [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("group")] == []
            await rollout.close()

    run(test())


def test_a_failing_sample_cancels_its_siblings_before_the_group_is_tried_again(tmp_path):
    async def test():
        calls: list[int] = []

        async def script(request):
            index = int(request["rid"].split("-")[1])
            calls.append(index)
            if index == 0 and calls.count(0) == 1:
                return reply([5], output_token_logprobs=[])
            if index == 1 and calls.count(1) == 1:
                await asyncio.sleep(30)
            return answers(request)

        (output,), engine, *_ = await collect(tmp_path, script)
        assert [rid.split("-")[1] for rid in engine.cancelled] == ["1"]
        assert [s.response for s in output.samples[0]] == ["a", "1"]

    run(test())


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("reward", {"custom_rm_path": f"{HERE}.broken_reward"}, r"broken_reward: .*no judge for"),
        (
            "rollout",
            {"custom_generate_function_path": f"{HERE}.broken_generate"},
            r"ConnectionError: the sandbox is gone",
        ),
        ("rollout", {"custom_generate_function_path": f"{HERE}.forgets_to_return"}, r"returned NoneType"),
        ("rollout", {"custom_generate_function_path": f"{HERE}.cancels_itself"}, r"raising CancelledError"),
        ("rollout", {"custom_generate_function_path": f"{HERE}.gives_up"}, r"samples 0 \(aborted\)|2 \(aborted\)"),
        ("rollout", {"dynamic_sampling_filter_path": f"{HERE}.broken_filter"}, r"broken_filter: .*KeyError: 'score'"),
    ],
)
def test_a_broken_hook_stops_the_step_with_its_name_and_every_prompt_accounted_for(tmp_path, section, values, message):
    async def test():
        async with ScriptedEngine(answers) as engine:
            args = make_args(tmp_path, engine.url, **{section: values})
            source, ledger = RolloutDataSourceWithBuffer(args), Ledger()
            rollout = make_rollout(args, source, ledger)
            with pytest.raises(MilesError, match=message):
                await rollout(RolloutFnTrainInput(0))
            held = {g[0].group_index for g in source.buffer}
            assert len(held) + sum(ledger.failed.values()) == ledger.issued
            await rollout.close()

    run(test())


def test_a_run_without_a_reward_stops_at_once_and_says_what_to_set(tmp_path):
    async def test():
        with pytest.raises(ConfigError, match="--rm-type"):
            await collect(tmp_path, reward={"custom_rm_path": None})

    run(test())


def test_a_filter_that_drops_everything_ends_with_an_error(tmp_path):
    async def test():
        rollout = {"dynamic_sampling_filter_path": f"{HERE}.drop_everything"}
        with pytest.raises(
            TrainingError, match=re.escape(f"{HERE}.drop_everything dropped 40 prompt groups in a row")
        ):
            await collect(tmp_path, rollout=rollout)
        rollout["max_filtered_batches"] = 2
        with pytest.raises(TrainingError) as caught:
            await collect(tmp_path, rollout=rollout)
        text = str(caught.value)
        assert "dropped 4 prompt groups in a row (--max-filtered-batches): filtered (4); 0 were kept before" in text
        assert text.count("dropped as filtered: sample") == text.count("prompt: ") == text.count("response (") == 3
        shown = r"sample \d+ \(group \d\), rewards of the group [\d., ]+\n +prompt: \d\+1=\n +response \(completed, \d tokens\): "
        assert len(re.findall(shown, text)) == 3

    run(test())


def test_sample_filter_and_all_samples_hook_see_their_groups(tmp_path):
    async def test():
        support.SEEN.clear()
        rollout = {
            "dynamic_sampling_filter_path": f"{HERE}.drop_even_groups",
            "sample_filter_path": f"{HERE}.remove_wrong",
            "all_samples_process_path": f"{HERE}.remember_all",
            "over_sampling_batch_size": 4,
        }
        (output,), *_ = await collect(tmp_path, rollout=rollout)
        assert [g[0].group_index for g in output.samples] == [1, 3]
        assert [s.remove_sample for g in output.samples for s in g] == [True, False] * 2
        assert {1, 3} <= set(support.SEEN[0])
        assert support.SEEN[0] == sorted(support.SEEN[0])

    run(test())


def test_several_samples_of_one_prompt_become_one_trajectory(tmp_path):
    async def test():
        from miles.rollout.train_data_conversion import to_train_batch

        rollout = {"custom_generate_function_path": f"{HERE}.two_fragments"}
        (output,), engine, *_ = await collect(tmp_path, rollout=rollout)
        assert engine.requests == []
        batch = to_train_batch(output.samples)
        assert batch["trajectory"].values.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert len(set(batch["reward"].values.tolist())) == 2

    run(test())


def test_cancelling_a_step_gives_all_its_prompts_back(tmp_path):
    async def test():
        async def slow(request):
            await asyncio.sleep(30)

        async with ScriptedEngine(slow) as engine:
            args = make_args(tmp_path, engine.url)
            source, ledger = RolloutDataSourceWithBuffer(args), Ledger()
            rollout = make_rollout(args, source, ledger)
            step = asyncio.create_task(rollout(RolloutFnTrainInput(0)))
            while len(engine.requests) < 4:
                await asyncio.sleep(0.01)
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert [g[0].group_index for g in source.buffer] == [0, 1]
            assert ledger.groups("partial") == [0, 1]
            await rollout.close()

    run(test())


def test_a_data_source_that_returns_too_few_groups_is_named(tmp_path):
    class ShortSource:
        def get_samples(self, num_samples):
            return [[Sample(tokens=[5])]] * (num_samples - 1)

        def add_samples(self, groups): ...

    async def test():
        args = make_args(tmp_path)
        rollout = make_rollout(args, ShortSource())
        with pytest.raises(HookError, match=r"ShortSource.get_samples: returned 1 groups, but 2 were asked for"):
            await rollout(RolloutFnTrainInput(0))
        await rollout.close()

    run(test())


class OneWaySource:
    """Issues groups and cannot take them back."""

    def __init__(self):
        self.issued = 0

    def get_samples(self, num_samples):
        self.issued += num_samples
        if self.issued > 4:
            raise OSError("the disk is gone")
        return [[Sample(prompt="1+1=", tokens=ids("1+1="), label="2")] for _ in range(num_samples)]

    def add_samples(self, groups):
        raise NotImplementedError("one way only")


def test_a_data_source_that_raises_is_named_with_the_line(tmp_path):
    async def test():
        async with ScriptedEngine(answers) as engine:
            rollout = make_rollout(make_args(tmp_path, engine.url), OneWaySource())
            for step in range(2):
                await rollout(RolloutFnTrainInput(step))
            with pytest.raises(
                HookError, match=r"OneWaySource.get_samples: raised OSError: the disk is gone\n.*raise OS"
            ):
                await rollout(RolloutFnTrainInput(2))
            await rollout.close()

    run(test())


def test_a_data_source_that_takes_nothing_back_does_not_hide_why_the_step_failed(tmp_path):
    async def test():
        def script(request):
            return reply([5], output_token_logprobs=[])

        async with ScriptedEngine(script) as engine:
            rollout = make_rollout(make_args(tmp_path, engine.url), OneWaySource())
            with pytest.raises(MilesError, match="failed 3 times") as caught:
                await rollout(RolloutFnTrainInput(0))
            assert "OneWaySource.add_samples: raised NotImplementedError" in caught.value.__notes__[0]
            await rollout.close()
        async with ScriptedEngine(answers) as engine:
            args = make_args(tmp_path, engine.url, rollout={"over_sampling_batch_size": 4})
            rollout = make_rollout(args, OneWaySource())
            with pytest.raises(HookError, match=r"OneWaySource.add_samples: raised NotImplementedError"):
                await rollout(RolloutFnTrainInput(0))
            await rollout.close()

    run(test())


def test_the_function_face_returns_the_same_batch(tmp_path):
    async def test():
        async with ScriptedEngine(answers) as engine:
            args = make_args(tmp_path, engine.url)
            source = RolloutDataSourceWithBuffer(args)
            output = await asyncio.to_thread(functools.partial(generate_rollout, args, 0, source))
            assert [s.reward for g in output.samples for s in g] == [0.0, 1.0, 0.0, 1.0]

    run(test())


def delayed(delays):
    """Answers after a time that depends on the group, whichever group it is."""

    async def script(request):
        await asyncio.sleep(delays[int(request["rid"].split("-")[0]) % len(delays)] / 100)
        return reply([5 + request["sampling_params"]["sampling_seed"] % 30, END])

    return script


DETERMINISTIC = {"deterministic": True}


@pytest.mark.parametrize("dropping", [False, True])
def test_in_order_of_issue_what_a_step_does_is_the_same_whatever_order_groups_finish_in(tmp_path, dropping):
    async def test():
        rollout: dict = {"over_sampling_batch_size": 3}
        if dropping:
            rollout["dynamic_sampling_filter_path"] = f"{HERE}.drop_even_groups"
        seen = []
        for delays in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]):
            outputs, _, source, ledger = await collect(
                tmp_path, delayed(delays), 3, rows=20, rollout=rollout, run=DETERMINISTIC
            )
            seen.append(
                {
                    "samples": [[s.to_dict() for g in output.samples for s in g] for output in outputs],
                    "counts": [{k: v for k, v in o.metrics.items() if not k.endswith("_s")} for o in outputs],
                    "source": source.state_dict(),
                    "ledger": ledger.state_dict(),
                }
            )
        assert seen[0] == seen[1] == seen[2]
        kept = [s["group_index"] for s in seen[0]["samples"][0][::2]]
        assert kept == ([1, 3] if dropping else [0, 1])
        assert seen[0]["counts"][0]["rollout/groups_returned"] == (2.0 if dropping else 1.0)

    run(test())


def test_in_order_of_issue_a_group_that_finished_early_waits_for_those_before_it(tmp_path):
    async def test():
        first_may_go = asyncio.Event()
        finished: set[int] = set()

        async def script(request):
            group = int(request["rid"].split("-")[0])
            if group == 0:
                await first_may_go.wait()
            finished.add(group)
            if finished == {1, 2, 3}:
                asyncio.get_running_loop().call_later(0.05, first_may_go.set)
            return answers(request)

        (output,), _, source, _ = await collect(
            tmp_path, script, rollout={"over_sampling_batch_size": 4}, run=DETERMINISTIC
        )
        assert [g[0].group_index for g in output.samples] == [0, 1]
        assert [g[0].group_index for g in source.buffer] == [2, 3]

    run(test())


def test_in_order_of_issue_a_group_that_is_tried_again_keeps_its_place(tmp_path):
    async def test():
        failed: list[str] = []

        async def script(request):
            if request["rid"].startswith("0-0-") and len(failed) < 2:
                failed.append(request["rid"])
                await asyncio.sleep(0.02)
                return reply([5, 6], output_token_logprobs=[])
            return answers(request)

        (output,), *_ = await collect(tmp_path, script, rollout={"over_sampling_batch_size": 4}, run=DETERMINISTIC)
        assert [g[0].group_index for g in output.samples] == [0, 1]
        assert output.metrics["rollout/group_retries"] == 2.0

    run(test())


def test_in_order_of_issue_a_group_that_keeps_failing_stops_the_step_only_when_its_turn_comes(tmp_path):
    async def test():
        async def script(request):
            group = int(request["rid"].split("-")[0])
            if group == broken:
                return reply([5], output_token_logprobs=[])
            await asyncio.sleep(0.1)
            return answers(request)

        sections = {"rollout": {"over_sampling_batch_size": 4}, "run": DETERMINISTIC}
        broken = 3
        (output,), _, source, ledger = await collect(tmp_path, script, **sections)
        assert [g[0].group_index for g in output.samples] == [0, 1]
        assert [g[0].group_index for g in source.buffer] == [2, 3]
        assert ledger.failed == {}
        broken = 1
        with pytest.raises(MilesError, match="prompt group 1 failed 3 times"):
            await collect(tmp_path, script, **sections)

    run(test())


def test_a_batch_that_fills_slowly_is_not_starved(tmp_path):
    async def test():
        rollout = {"dynamic_sampling_filter_path": f"{HERE}.drop_even_groups", "max_filtered_batches": 1}
        (output,), *_ = await collect(tmp_path, rollout=rollout | {"over_sampling_batch_size": 1})
        assert output.metrics["rollout/dynamic_filter/dropped"] == 2.0

    run(test())


def test_several_filters_are_asked_in_order_and_each_reason_is_counted(tmp_path):
    async def test():
        hub = "miles.rollout.filter_hub.dynamic_sampling_filters"
        filters = [f"{hub}.check_reward_nonzero_std", f"{HERE}.drop_even_groups"]

        def script(request):
            group = int(request["rid"].split("-")[0])
            return reply([*ids("a"), END], text="a") if group == 1 else answers(request)

        (output,), *_ = await collect(tmp_path, script, rollout={"dynamic_sampling_filter_path": filters})
        counts = {k: v for k, v in output.metrics.items() if "dynamic_filter/drop_" in k}
        assert counts["rollout/dynamic_filter/drop_zero_std_0.0"] == 1.0
        assert counts["rollout/dynamic_filter/drop_filtered"] >= 2.0
        assert [g[0].group_index for g in output.samples] == [3, 5]

    run(test())


def test_a_group_that_hangs_is_cancelled_and_tried_again_then_reported(tmp_path):
    # Case E19.
    async def test():
        seen: list[int] = []

        async def script(request):
            group = int(request["rid"].split("-")[0])
            seen.append(group)
            if group == 2:
                await asyncio.sleep(30)
            return answers(request)

        rollout = {"batch_size": 4, "group_timeout_s": 0.3, "max_group_retries": 1}
        with pytest.raises(MilesError, match=r"longer than 0\.3 s(.|\n)*prompt group 2 failed 2 times; prompt: 2\+1="):
            await collect(tmp_path, script, rollout=rollout)
        assert seen.count(2) == 4

    run(test())


def test_raised_and_hung_groups_of_one_batch_are_both_tried_again(tmp_path):
    # Case E19.
    async def test():
        tries: dict[int, int] = {}

        async def script(request):
            group, index = (int(x) for x in request["rid"].split("-")[:2])
            tries[index] = tries.get(index, 0) + 1
            if group == 1 and tries[index] == 1:
                return reply([5], output_token_logprobs=[])
            if group == 2 and tries[index] == 1:
                await asyncio.sleep(30)
            return answers(request)

        (output,), _, _, ledger = await collect(tmp_path, script, rollout={"batch_size": 4, "group_timeout_s": 0.5})
        assert [g[0].group_index for g in output.samples] == [0, 1, 2, 3]
        assert output.metrics["rollout/group_retries"] == 2.0
        assert ledger.failed == {}

    run(test())
