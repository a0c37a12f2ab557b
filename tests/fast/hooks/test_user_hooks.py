from urllib.parse import urlsplit

import pytest

from miles.config.schema import RunConfig
from miles.core.hook_args import HookArgs
from miles.core.ledger import Ledger
from miles.core.plugins import hooks_of, load_function, load_hooks
from miles.core.run_facts import RunFacts
from miles.rollout.base_types import RolloutFnConstructorInput, RolloutFnTrainInput
from miles.rollout.inference_rollout.compatibility import load_rollout_fn
from miles.rollout.train_data_conversion import to_train_batch
from tests.fast.rollout.scripted_engine import ScriptedEngine, reply
from tests.fast.rollout.support import END, ids, make_model_folder, run

HERE = "tests.fast.hooks.user_hooks"


def config_of(tmp_path, **sections):
    base = {
        "model": {"hf_checkpoint": str(make_model_folder(tmp_path / "model"))},
        "data": {"source_path": f"{HERE}.SumSource"},
        "rollout": {"batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1, "max_response_len": 8},
        "reward": {"custom_rm_path": f"{HERE}.length_reward"},
    }
    return RunConfig.model_validate(
        {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    )


async def one_batch(tmp_path, script, **sections):
    """A batch, by the way the run itself takes: settings, checked hooks, data source and rollout by their paths."""
    config = config_of(tmp_path, **sections)
    load_hooks(config)
    async with ScriptedEngine(script) as engine:
        address = urlsplit(engine.url)
        facts = RunFacts(
            router_url=engine.url, sglang_router_ip=address.hostname or "", sglang_router_port=address.port or 0
        )
        args = HookArgs(config, facts)
        source = load_function(args.data_source_path)(args)
        ledger = Ledger()
        rollout = load_rollout_fn(args.rollout_function_path, RolloutFnConstructorInput(args, source, ledger))
        try:
            output = await rollout(RolloutFnTrainInput(0))
        finally:
            await rollout.close()
        ledger.assert_balanced()
        return output, engine, source, ledger


def by_sample(request):
    """Longer responses for later samples."""
    index = int(request["rid"].split("-")[1])
    text = "1" * (1 + index % 2)
    return reply([*ids(text), END], text=text)


def test_a_reward_function(tmp_path):
    async def test():
        output, *_ = await one_batch(tmp_path, lambda r: reply([5] * 8, finish="length"))
        assert [s.reward for g in output.samples for s in g] == [0.0] * 4
        output, *_ = await one_batch(tmp_path, by_sample)
        assert {s.reward for g in output.samples for s in g} <= {0.5, 1.0}

    run(test())


def test_a_group_reward_function(tmp_path):
    async def test():
        reward = {"custom_rm_path": f"{HERE}.best_of_group", "group_rm": True}
        output, *_ = await one_batch(tmp_path, by_sample, reward=reward)
        assert [[s.reward for s in g] for g in output.samples] == [[0.0, 1.0]] * 2

    run(test())


def test_a_generate_function_with_turns_of_its_own(tmp_path):
    async def test():
        rollout = {"custom_generate_function_path": f"{HERE}.two_turns"}
        output, engine, *_ = await one_batch(tmp_path, lambda r: reply(ids("12"), text="12"), rollout=rollout)
        assert len(engine.requests) == 8
        sample = output.samples[0][0]
        assert sample.tokens == [*ids(sample.prompt), *ids("12=?12")]
        assert sample.loss_mask == [1, 1, 0, 0, 1, 1]
        batch = to_train_batch(output.samples)
        assert batch["loss_mask"].row(0).tolist() == [1, 1, 0, 0, 1, 1]
        assert batch["weight_version"].values.tolist() == [-1] * 4
        assert len({r["sampling_params"]["sampling_seed"] for r in engine.requests}) == 4

    run(test())


def test_a_dynamic_filter(tmp_path):
    async def test():
        def script(request):
            group, index = map(int, request["rid"].split("-")[:2])
            text = "1" * (1 + (index % 2 if group else 0))
            return reply([*ids(text), END], text=text)

        output, _, _, ledger = await one_batch(
            tmp_path,
            script,
            rollout={"dynamic_sampling_filter_path": f"{HERE}.keep_mixed", "over_sampling_batch_size": 1},
            reward={"custom_rm_path": f"{HERE}.best_of_group", "group_rm": True},
        )
        assert [g[0].group_index for g in output.samples] == [1, 2]
        assert output.metrics["rollout/dynamic_filter/drop_all_the_same"] == 1.0
        assert ledger.dropped == {"all_the_same": 1}

    run(test())


def test_a_data_source_that_numbers_nothing(tmp_path):
    async def test():
        output, engine, source, ledger = await one_batch(tmp_path, by_sample, rollout={"over_sampling_batch_size": 3})
        assert source.issued == 3
        assert ledger.issued == 3
        kept = {g[0].group_index for g in output.samples}
        returned = {g[0].group_index for g in source.buffer}
        assert kept | returned == {0, 1, 2}
        assert not kept & returned
        assert len({s.index for g in output.samples for s in g}) == 4
        assert all(r["input_ids"][1] == ids("+")[0] for r in engine.requests)

    run(test())


@pytest.mark.parametrize("together", ["reward", "group"])
def test_all_hooks_of_a_run_work_together(tmp_path, together):
    async def test():
        def script(request):
            return reply(ids("1" * (len(script_calls) % 3 + 1)), text="1")

        script_calls: list[int] = []

        def counted(request):
            script_calls.append(1)
            return script(request)

        grouped = together == "group"
        reward = {"custom_rm_path": f"{HERE}.{'best_of_group' if grouped else 'length_reward'}", "group_rm": grouped}
        rollout = {"custom_generate_function_path": f"{HERE}.two_turns"}
        config = config_of(tmp_path, reward=reward, rollout=rollout)
        assert len(hooks_of(config)) == 4
        output, *_ = await one_batch(tmp_path, counted, reward=reward, rollout=rollout)
        assert len(to_train_batch(output.samples)) == 4

    run(test())
