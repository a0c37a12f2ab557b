import asyncio

import pytest

from miles.config.eval_settings import EvalSettings
from miles.core.samples import Sample
from miles.errors import ConfigError, DataError, HookError, MilesError
from miles.rollout.base_types import RolloutFnEvalInput, RolloutFnTrainInput
from miles.rollout.inference_rollout.eval_summary import summarize
from miles.rollout.inference_rollout.state import sampling_seed
from tests.fast.rollout.scripted_engine import ScriptedEngine, reply
from tests.fast.rollout.support import END, ids, make_args, make_rollout, run, write_rows

HERE = "tests.fast.rollout.support"
TEXT = {v: k for k, v in zip("0123456789+=", ids("0123456789+="), strict=True)}


def question(request):
    return int("".join(TEXT[t] for t in request["input_ids"]).split("+")[0])


def solve(request):
    """Right for even questions, wrong for odd ones."""
    n = question(request)
    text = str(n + 1) if n % 2 == 0 else "x"
    return reply([*ids(text), END], text=text)


def dataset(tmp_path, name, rows, **settings):
    path = write_rows(tmp_path / f"{name}.jsonl", [{"input": f"{i}+1=", "label": str(i + 1)} for i in range(rows)])
    return {"name": name, "path": path, **settings}


async def evaluate(tmp_path, script, datasets, **sections):
    async with ScriptedEngine(script) as engine:
        evals = {"datasets": datasets, **sections.pop("eval", {})}
        rollout = make_rollout(make_args(tmp_path, engine.url, eval=evals, **sections))
        try:
            return await rollout(RolloutFnEvalInput(rollout_id=3)), engine
        finally:
            await rollout.close()


def test_each_dataset_has_its_mean_and_results_in_order(tmp_path):
    async def test():
        sets = [dataset(tmp_path, "even", 4), dataset(tmp_path, "small", 1)]
        output, engine = await evaluate(tmp_path, solve, sets)
        assert output.metrics["eval/even"] == 0.5
        assert output.metrics["eval/small"] == 1.0
        assert output.metrics["eval/even/num_samples"] == 4.0
        assert output.metrics["eval/even/num_prompts"] == 4.0
        assert output.metrics["eval/even/failed"] == 0.0
        assert output.metrics["eval/even/none_reward_ratio"] == 0.0
        assert output.metrics["eval/even/truncated_ratio"] == 0.0
        lengths = {
            k.rpartition("/")[2]: v for k, v in output.metrics.items() if k.startswith("eval/even/response_len/")
        }
        assert lengths == {"mean": 2.0, "median": 2.0, "p95": 2.0, "max": 2.0}
        assert output.data["even"]["rewards"] == [1.0, 0.0, 1.0, 0.0]
        assert [s.index for s in output.data["even"]["samples"]] == [0, 1, 2, 3]
        assert output.data["even"]["truncated"] == [False] * 4
        assert len(engine.requests) == 5

    run(test())


def test_a_dataset_sets_its_own_sampling_and_greedy_is_temperature_0(tmp_path):
    async def test():
        sets = [
            dataset(tmp_path, "greedy", 1, temperature=0, max_response_len=3),
            dataset(tmp_path, "plain", 1, n_samples_per_eval_prompt=2),
        ]
        _, engine = await evaluate(
            tmp_path, solve, sets, eval={"temperature": 0.5, "top_k": 7}, rollout={"temperature": 1.3}
        )
        params = [r["sampling_params"] for r in engine.requests]
        assert sorted((p["temperature"], p["top_k"], p["max_new_tokens"]) for p in params) == [
            (0.0, 7, 3),
            (0.5, 7, 8),
            (0.5, 7, 8),
        ]

    run(test())


def test_an_evaluation_repeats_its_seeds_and_they_are_not_those_of_training(tmp_path):
    async def test():
        sets = [dataset(tmp_path, "d", 2, n_samples_per_eval_prompt=2)]
        seeds = []
        for _ in range(2):
            _, engine = await evaluate(tmp_path, solve, sets)
            seeds.append(sorted(r["sampling_params"]["sampling_seed"] for r in engine.requests))
        assert seeds[0] == seeds[1] == sorted(sampling_seed(42, i, "eval/d") for i in range(4))
        assert not set(seeds[0]) & {sampling_seed(42, i) for i in range(4)}

    run(test())


def test_only_the_first_max_prompts_are_evaluated(tmp_path):
    async def test():
        output, engine = await evaluate(tmp_path, solve, [dataset(tmp_path, "d", 6, max_prompts=2)])
        assert len(engine.requests) == 2
        assert output.metrics["eval/d/num_samples"] == 2.0

    run(test())


def test_pass_at_k_uses_the_n_of_the_dataset(tmp_path):
    # Case E15.
    def one_of_four(request):
        position = int(request["rid"].split("-")[1]) % 4
        text = str(question(request) + 1) if position == 0 else "x"
        return reply([*ids(text), END], text=text)

    async def test():
        sets = [
            dataset(tmp_path, "four", 3, n_samples_per_eval_prompt=4),
            dataset(tmp_path, "one", 2),
        ]
        output, _ = await evaluate(tmp_path, one_of_four, sets, rollout={"n_samples_per_prompt": 8})
        found = {k: v for k, v in output.metrics.items() if "pass@" in k}
        assert found == {
            "eval/four/pass@1": pytest.approx(0.25),
            "eval/four/pass@2": pytest.approx(0.5),
            "eval/four/pass@4": pytest.approx(1.0),
            "eval/one/pass@1": 0.5,
        }

    run(test())


def test_one_failed_sample_is_counted_and_left_out(tmp_path):
    # Case E12.
    async def test():
        def script(request):
            return reply([5], output_token_logprobs=[]) if question(request) == 1 else solve(request)

        output, _ = await evaluate(tmp_path, script, [dataset(tmp_path, "d", 4)])
        assert output.metrics["eval/d/failed"] == output.metrics["eval/d/unscored"] == 1.0
        assert output.metrics["eval/d/none_reward_ratio"] == 0.25
        assert output.metrics["eval/d/num_samples"] == 4.0
        assert output.metrics["eval/d"] == pytest.approx(2 / 3)
        assert "request 1-1-" in output.data["d"]["errors"][0]

    run(test())


def test_when_every_sample_fails_the_evaluation_does_too(tmp_path):
    # Case E12.
    async def test():
        with pytest.raises(MilesError, match=r"evaluation of d .*all 2 samples failed"):
            await evaluate(tmp_path, lambda r: reply([5], finish="odd"), [dataset(tmp_path, "d", 2)])

    run(test())


async def score_and_style(args, samples, **_):
    return [{"score": 1.0, "style": None} for _ in samples]


def test_a_reward_of_none_is_counted_as_unscored():
    # Case H07.
    rewards = [0.5, None, float("nan"), 0.8, 0.6, 0.7]
    outcomes = [[[Sample(index=i, reward=r)]] for i, r in enumerate(rewards)]
    data, metrics = summarize(EvalSettings(name="d", path="p"), outcomes)
    assert metrics["eval/d"] == pytest.approx(0.65)
    assert (metrics["eval/d/num_samples"], metrics["eval/d/unscored"]) == (6.0, 2.0)
    assert data["rewards"] == [0.5, None, None, 0.8, 0.6, 0.7]
    _, unscored = summarize(
        EvalSettings(name="d", path="p", reward_key="a"), [[[Sample(index=0, reward={"a": None})]]]
    )
    assert "eval/d" not in unscored
    assert "eval/d/pass@1" not in unscored
    assert unscored["eval/d/none_reward_ratio"] == 1.0


def test_a_failed_judge_and_an_absent_reward_are_both_unscored_and_no_zeros():
    # Case E16.
    outcomes: list = [
        [[Sample(index=0, reward=1.0)]],
        [[Sample(index=1, reward=None)]],
        [HookError("judge", "is down")],
    ]
    data, metrics = summarize(EvalSettings(name="d", path="p"), outcomes)
    assert metrics["eval/d"] == 1.0
    assert (metrics["eval/d/num_samples"], metrics["eval/d/unscored"], metrics["eval/d/failed"]) == (3.0, 2.0, 1.0)
    assert data["errors"] == ["HookError: judge: is down"]


async def raises_in_the_third(args, sample, **_):
    if sample.index == 3:
        raise RuntimeError("the judge is down")
    return 1.0


async def stops_itself(input):
    raise asyncio.CancelledError


def test_one_of_eight_failing_leaves_seven(tmp_path):
    # Case E12.
    async def test():
        reward = {"custom_rm_path": f"{__name__}.raises_in_the_third"}
        output, _ = await evaluate(tmp_path, solve, [dataset(tmp_path, "d", 8)], reward=reward)
        assert len(output.data["d"]["samples"]) == 7
        assert (output.metrics["eval/d"], output.metrics["eval/d/failed"]) == (1.0, 1.0)
        assert "the judge is down" in output.data["d"]["errors"][0]

    run(test())


def test_a_function_that_cancels_itself_fails_like_any_other_and_does_not_cancel_the_evaluation(tmp_path):
    # Case E12.
    async def test():
        sets = [dataset(tmp_path, "d", 2, custom_generate_function_path=f"{__name__}.stops_itself")]
        with pytest.raises(MilesError, match=r"ended its own task(.|\n)*all 2 samples failed"):
            await evaluate(tmp_path, solve, sets)

    run(test())


def test_cancelling_an_evaluation_goes_through(tmp_path):
    # Case E12.
    async def test():
        async def hang(request):
            await asyncio.sleep(30)

        work = asyncio.create_task(evaluate(tmp_path, hang, [dataset(tmp_path, "d", 2)]))
        await asyncio.sleep(0.2)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    run(test())


def test_an_evaluation_between_steps_with_surplus_runs_as_any_other(tmp_path):
    async def test():
        async def script(request):
            group = int(request["rid"].split("-")[0])
            if group == 1 and len(engine.requests) <= 8:
                await asyncio.sleep(30)
            return solve(request)

        async with ScriptedEngine(script) as engine:
            args = make_args(
                tmp_path,
                engine.url,
                eval={"datasets": [dataset(tmp_path, "d", 4)]},
                rollout={"over_sampling_batch_size": 4},
            )
            rollout = make_rollout(args)
            first = await rollout(RolloutFnTrainInput(0))
            assert first.metrics["rollout/groups_returned"] == 2.0
            output = await rollout(RolloutFnEvalInput(0))
            assert output.metrics["eval/d"] == 0.5
            assert output.metrics["eval/d/failed"] == 0.0
            assert len((await rollout(RolloutFnTrainInput(1))).samples) == 2
            await rollout.close()

    run(test())


def test_truncated_responses_are_reported(tmp_path):
    async def test():
        output, _ = await evaluate(tmp_path, lambda r: reply([5] * 8, finish="length"), [dataset(tmp_path, "d", 2)])
        assert output.metrics["eval/d/truncated_ratio"] == 1.0
        assert output.data["d"]["truncated"] == [True, True]

    run(test())


def test_a_group_reward_gets_the_samples_of_one_prompt(tmp_path):
    async def test():
        reward = {"custom_rm_path": f"{__name__}.score_and_style", "group_rm": True, "reward_key": "score"}
        sets = [dataset(tmp_path, "d", 2, n_samples_per_eval_prompt=3)]
        output, _ = await evaluate(tmp_path, solve, sets, reward=reward)
        assert output.metrics["eval/d"] == 1.0
        reward["eval_reward_key"] = "style"
        with pytest.raises(HookError, match=r"score_and_style: on sample 0 .*the reward is None"):
            await evaluate(tmp_path, solve, sets, reward=reward)

    run(test())


def test_evaluation_shares_the_concurrency_of_the_rollout(tmp_path):
    async def test():
        async def slow(request):
            await asyncio.sleep(0.02)
            return solve(request)

        sets = [dataset(tmp_path, "a", 6), dataset(tmp_path, "b", 6)]
        _, engine = await evaluate(tmp_path, slow, sets, engine={"concurrency": 3})
        assert engine.most_running == 3

    run(test())


def test_pairs_of_name_and_file_are_datasets_too(tmp_path):
    async def test():
        path = dataset(tmp_path, "gsm", 2)["path"]
        output, engine = await evaluate(
            tmp_path, solve, [], eval={"prompt_data": ["gsm", path], "n_samples_per_eval_prompt": 2}
        )
        assert output.metrics["eval/gsm"] == 0.5
        assert len(engine.requests) == 4

    run(test())


def test_a_missing_file_is_an_error_at_start_that_names_the_dataset(tmp_path):
    # Case H13.
    args = make_args(tmp_path, eval={"datasets": [{"name": "gsm", "path": str(tmp_path / "no.jsonl")}]})
    with pytest.raises(DataError, match=r"no\.jsonl.*evaluation dataset 'gsm'"):
        make_rollout(args)


def test_names_and_files_must_come_in_pairs_and_names_be_distinct(tmp_path):
    path = dataset(tmp_path, "gsm", 1)["path"]
    with pytest.raises(ConfigError, match="3 values are not pairs"):
        make_rollout(make_args(tmp_path, eval={"prompt_data": ["gsm", path, "aime"]}))
    with pytest.raises(ConfigError, match="gsm is the name of several datasets"):
        make_rollout(make_args(tmp_path, eval={"prompt_data": ["gsm", path, "gsm", path]}))
