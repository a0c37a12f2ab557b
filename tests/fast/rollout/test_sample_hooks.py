import pytest

from miles.errors import HookError
from miles.rollout.base_types import RolloutFnEvalInput, RolloutFnTrainInput
from tests.fast.rollout.scripted_engine import ScriptedEngine, reply
from tests.fast.rollout.support import END, ids, make_args, make_rollout, run, write_rows

HERE = "tests.fast.rollout.test_sample_hooks"
SEEN = []


def corrects(args, sample, *, rollout_id, evaluation):
    """Rewards judge what this leaves."""
    assert sample.reward is None
    SEEN.append((rollout_id, evaluation, sample.index))
    sample.response = sample.label


async def marks(args, sample, *, rollout_id, evaluation):
    sample.metadata["seen after"] = sample.response


def cuts(args, sample, *, rollout_id, evaluation):
    sample.rollout_log_probs = []


async def one_step(tmp_path, hooks, step=5, evaluates=False):
    data = write_rows(tmp_path / "rows.jsonl", [{"input": f"{i}+1=", "label": "x"} for i in range(2)])
    evaluation = {"eval": {"prompt_data": ["heldout", data]}} if evaluates else {}
    async with ScriptedEngine(lambda request: reply([*ids("12"), END], text="12")) as engine:
        args = make_args(
            tmp_path,
            engine.url,
            data={"prompt_data": data},
            rollout={"sample_hook_path": [f"{HERE}.{name}" for name in hooks]},
            **evaluation,
        )
        rollout = make_rollout(args)
        try:
            return await rollout(RolloutFnEvalInput(step) if evaluates else RolloutFnTrainInput(step))
        finally:
            await rollout.close()


def test_each_finished_sample_passes_the_hooks_in_order_before_its_reward(tmp_path):
    async def test():
        SEEN.clear()
        output = await one_step(tmp_path, ["corrects", "marks"])
        samples = [s for group in output.samples for s in group]
        assert [s.reward for s in samples] == [1.0] * 4
        assert [s.metadata["seen after"] for s in samples] == ["x"] * 4
        assert sorted(SEEN) == [(5, False, i) for i in range(4)]

    run(test())


def test_evaluation_passes_them_too(tmp_path):
    async def test():
        SEEN.clear()
        output = await one_step(tmp_path, ["corrects"], step=7, evaluates=True)
        assert output.metrics["eval/heldout"] == 1.0
        assert sorted(SEEN) == [(7, True, 0), (7, True, 1)]

    run(test())


def test_without_hooks_the_response_is_judged_as_it_came(tmp_path):
    async def test():
        output = await one_step(tmp_path, [])
        assert [s.reward for group in output.samples for s in group] == [0.0] * 4

    run(test())


def test_a_hook_that_leaves_lengths_that_disagree_is_named(tmp_path):
    async def test():
        with pytest.raises(
            HookError, match=f"{HERE}.cuts: raised ValueError: sample .* 0 entries of rollout_log_probs"
        ):
            await one_step(tmp_path, ["cuts"])

    run(test())
