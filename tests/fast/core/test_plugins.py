import argparse
import asyncio
import functools
import inspect
import sys

import pytest

from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.core.plugins import (
    GROUP_REWARD,
    HOOKS,
    add_arguments_of,
    check_signature,
    hooks_of,
    is_async,
    load_function,
    load_hooks,
    maybe_await,
)
from miles.errors import ConfigError, HookError

GOOD = """
import argparse
import functools

class Outer:
    class Inner:
        def __init__(self, input): pass
        async def __call__(self, input): pass

async def reward(args, sample, **kwargs): return 1.0
def reward_plain(args, sample): return 1.0
async def reward_bare(args, sample): return 1.0
async def group_reward(args, samples, **kwargs): return [1.0 for _ in samples]
async def generate(input): return input
async def generate_options(input, temperature=1.0, top_p=1.0): return input
async def generate_legacy(args, sample, sampling_params): return sample
async def generate_legacy_evaluation(args, sample, sampling_params, evaluation=False): return sample
async def generate_defaults(args, sample=None, sampling_params=None): return sample

class Generate:
    async def __call__(self, input): return input

class Rollout:
    def __init__(self, input): self.input = input
    def __call__(self, input): return input

def rollout_legacy(args, rollout_id, data_source, evaluation=False): return []

class Source:
    def __init__(self, args): pass
    def get_samples(self, num_samples): return []
    def add_samples(self, samples): pass
    def save(self, rollout_id): pass
    def load(self, rollout_id=None): pass

class StateSource:
    def __init__(self, args): pass
    def get_samples(self, num_samples): return []
    def add_samples(self, groups): pass
    def state_dict(self): return {}
    def load_state_dict(self, state): pass

def buffer_filter(args, rollout_id, buffer, num_samples): return []
def dynamic_filter(args, group, **kwargs): return True
def sample_filter(args, data): pass
def all_samples(args, all_groups, data_source): pass
def post_process(args, samples): return [], []

def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs): return fn(*args, **kwargs)
    return wrapper

@logged
async def decorated(args, sample): return 1.0

class CallableReward:
    async def __call__(self, args, sample): return 1.0
reward_object = CallableReward()
reward_partial = functools.partial(reward_bare)
number = 3

def add_arguments(parser): parser.add_argument("--my-depth", type=int, default=2)
reward.add_arguments = add_arguments
reward_bare.add_arguments = lambda: None
"""

BAD = """
async def reward_one(sample): return 1.0
async def reward_three(args, sample, extra): return 1.0
async def generate_two(args, sample): return sample
def generate_plain(input): return input
class GenerateArgs:
    def __init__(self, args): pass
    async def __call__(self, input): pass
class RolloutEmpty:
    def __init__(self): pass
    def __call__(self, input): pass
class RolloutSilent:
    def __init__(self, input): pass
def rollout_two(args, rollout_id): return []
def source(args): return None
class SourceEmpty:
    def __init__(self, args): pass
class SourceForgets:
    def __init__(self, args): pass
    def get_samples(self, num_samples): return []
    def add_samples(self, samples): pass
class SourceWrong:
    def __init__(self, args): pass
    def get_samples(self): return []
    def add_samples(self, samples): pass
def buffer_filter(buffer, num_samples): return []
def dynamic_filter(group): return True
def sample_filter(args): pass
def all_samples(args, all_groups): pass
def post_process(args, samples, more): return [], []
class FilterClass:
    def __init__(self, args, group): pass
"""


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)

    def write(**files):
        folder = tmp_path / "my_hooks"
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").touch()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    write(good=GOOD, bad=BAD)
    yield write
    for name in [n for n in sys.modules if n.split(".")[0] == "my_hooks"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("flag", "name", "form"),
    [
        ("--custom-rm-path", "reward", "sample"),
        ("--custom-rm-path", "reward_bare", "sample"),
        ("--custom-rm-path", "reward_plain", "sample"),
        ("--custom-rm-path", "decorated", "sample"),
        ("--custom-rm-path", "reward_object", "sample"),
        ("--custom-rm-path", "reward_partial", "sample"),
        (GROUP_REWARD, "group_reward", "group"),
        ("--custom-generate-function-path", "generate", "input"),
        ("--custom-generate-function-path", "generate_options", "input"),
        ("--custom-generate-function-path", "generate_legacy", "legacy"),
        ("--custom-generate-function-path", "generate_legacy_evaluation", "legacy_evaluation"),
        ("--custom-generate-function-path", "generate_defaults", "legacy"),
        ("--custom-generate-function-path", "Generate", "class"),
        ("--rollout-function-path", "Rollout", "class"),
        ("--rollout-function-path", "Outer.Inner", "class"),
        ("--eval-function-path", "rollout_legacy", "legacy"),
        ("--data-source-path", "Source", "class"),
        ("--data-source-path", "StateSource", "class"),
        ("--buffer-filter-path", "buffer_filter", "buffer"),
        ("--dynamic-sampling-filter-path", "dynamic_filter", "group"),
        ("--rollout-sample-filter-path", "sample_filter", "groups"),
        ("--rollout-all-samples-process-path", "all_samples", "all_groups"),
        ("--custom-reward-post-process-path", "post_process", "samples"),
    ],
)
def test_every_documented_form_of_a_hook_is_accepted(hooks, flag, name, form):
    assert check_signature(load_function(f"my_hooks.good.{name}"), HOOKS[flag]) == form


REWARD = "async def fn(args, sample, **kwargs) -> float"


@pytest.mark.parametrize(
    ("flag", "name", "message"),
    [
        (
            "--custom-rm-path",
            "reward_one",
            "reward.custom_rm_path my_hooks.bad.reward_one(sample): is called as fn(args, sample)\n    fix: " + REWARD,
        ),
        ("--custom-rm-path", "reward_three", "reward_three(args, sample, extra): is called as fn(args, sample)"),
        (GROUP_REWARD, "reward_one", "reward_one(sample): is called as fn(args, samples)"),
        (
            "--custom-generate-function-path",
            "generate_two",
            "generate_two(args, sample): is called as fn(input) or fn(args, sample, sampling_params, evaluation=...) "
            "or fn(args, sample, sampling_params)",
        ),
        ("--custom-generate-function-path", "generate_plain", "generate_plain(input): is a plain function"),
        ("--custom-generate-function-path", "GenerateArgs", "GenerateArgs(args): is made as GenerateArgs()"),
        ("--rollout-function-path", "RolloutEmpty", "RolloutEmpty(): is made as RolloutEmpty(input)"),
        ("--rollout-function-path", "RolloutSilent", "RolloutSilent: has no method __call__"),
        ("--rollout-function-path", "rollout_two", "is called as fn(args, rollout_id, data_source, evaluation=...)"),
        ("--data-source-path", "source", "source(args): is a function, and a class is wanted"),
        ("--data-source-path", "SourceEmpty", "SourceEmpty: has no method get_samples"),
        ("--data-source-path", "SourceForgets", "has neither state_dict and load_state_dict or save and load"),
        ("--data-source-path", "SourceWrong", "SourceWrong.get_samples(self): is called as get_samples(num_samples)"),
        ("--buffer-filter-path", "buffer_filter", "is called as fn(args, rollout_id, buffer, num_samples)"),
        ("--dynamic-sampling-filter-path", "dynamic_filter", "dynamic_filter(group): is called as fn(args, group)"),
        ("--dynamic-sampling-filter-path", "FilterClass", "FilterClass: is a class, and a function is wanted"),
        ("--rollout-sample-filter-path", "sample_filter", "is called as fn(args, groups)"),
        ("--rollout-all-samples-process-path", "all_samples", "is called as fn(args, all_groups, data_source)"),
        ("--custom-reward-post-process-path", "post_process", "is called as fn(args, samples)"),
    ],
)
def test_a_wrong_signature_shows_what_was_found_and_what_is_wanted(hooks, flag, name, message):
    with pytest.raises(HookError) as caught:
        check_signature(load_function(f"my_hooks.bad.{name}"), HOOKS[flag])
    text = str(caught.value).replace(" while it runs", "")
    assert message in text
    assert text.startswith(f"{HOOKS[flag].path} my_hooks.bad.")
    assert text.endswith(HOOKS[flag].example)


def test_the_table_has_every_setting_that_is_an_import_path():
    paths = {leaf.path for leaf in leaves(RunConfig) if leaf.path.endswith(("_path", ".source_path"))}
    paths -= {"model.chat_template_path"}
    assert {contract.path for contract in HOOKS.values()} == paths
    flags = {flag for leaf in leaves(RunConfig) for flag in leaf.flags}
    assert {flag.split(" with ")[0] for flag in HOOKS} <= flags


def test_only_the_generate_function_must_be_async():
    assert [flag for flag, contract in HOOKS.items() if contract.must_be_async] == ["--custom-generate-function-path"]


def test_the_example_of_every_contract_fits_it(hooks):
    for flag, contract in HOOKS.items():
        for form in contract.example.split("  or  "):
            if form.startswith(("def ", "async def ")):
                scope = {"Sample": None, "GenerateFnOutput": None, "DynamicFilterOutput": bool}
                exec(f"{form.split(' -> ')[0]}: pass", scope)
                assert check_signature(scope["fn"], contract), flag


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "my_hooks.god.reward",
            "my_hooks.god.reward: there is no module my_hooks.god\n    fix: did you mean my_hooks.good?",
        ),
        ("my_hooks.zzz.reward", "there is no module my_hooks.zzz\n    fix: check the spelling"),
        ("no_such_package.reward", "there is no module no_such_package"),
        ("reward", "is not an import path\n    fix: write package.module.function"),
        ("my_hooks.good:reward", "is not an import path"),
        ("my_rewards.py", "is the name of a file, not an import path\n    fix: write my_rewards.FUNCTION"),
        ("./my_hooks/good.py:reward", "not an import path\n    fix: write my_hooks.good.reward"),
        ("my_hooks.good.rewrad", "my_hooks.good has no attribute 'rewrad'\n    fix: did you mean reward?"),
        ("my_hooks.good.Outer.Iner", "Outer has no attribute 'Iner'\n    fix: did you mean Inner?"),
        ("my_hooks.good.number", "is int 3, which cannot be called"),
    ],
)
def test_a_path_that_names_nothing_says_so(hooks, path, message):
    with pytest.raises(HookError) as caught:
        load_function(path)
    assert message in str(caught.value)


def test_a_module_of_the_working_directory_is_found_though_the_script_lies_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "rewards_beside_me.py").write_text("async def score(args, sample): return 1.0\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with pytest.raises(HookError, match="there is no module rewards_beside_me"):
        load_function("rewards_beside_me.score")
    monkeypatch.chdir(tmp_path)
    assert is_async(load_function("rewards_beside_me.score"))
    monkeypatch.delitem(sys.modules, "rewards_beside_me")


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("x = 1\nimport no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'", 2),
        ("from math import no_such_name\n", "ImportError: cannot import name 'no_such_name'", 1),
        ("def f(:\n    pass\n", "SyntaxError: invalid syntax", 1),
        ("\n\nvalue = {}['key']\n", "KeyError: 'key'", 3),
        ("def f():\n    raise OSError('no disk')\nf()\n", "OSError: no disk", 2),
    ],
)
def test_a_module_that_does_not_import_shows_its_own_error_and_line(hooks, text, message, line):
    folder = hooks(broken=text)
    with pytest.raises(HookError) as caught:
        load_function("my_hooks.broken.f")
    shown = str(caught.value)
    assert f"module my_hooks.broken does not import: {message}" in shown
    assert f"at {folder / 'broken.py'}:{line}: {text.splitlines()[line - 1].strip()}" in shown


def test_all_wrong_hooks_of_a_config_are_reported_at_once(hooks):
    config = RunConfig.model_validate(
        {
            "data": {"source_path": "my_hooks.good.Source"},
            "rollout": {
                "function_path": "my_hooks.good.rollout_legacy",
                "dynamic_sampling_filter_path": "my_hooks.bad.dynamic_filter",
                "custom_generate_function_path": "my_hooks.good.generat",
            },
            "reward": {"custom_rm_path": "my_hooks.bad.reward_one"},
        }
    )
    with pytest.raises(ConfigError) as caught:
        load_hooks(config)
    assert [(i.path, i.problem) for i in caught.value.issues] == [
        (
            "rollout.custom_generate_function_path my_hooks.good.generat",
            "my_hooks.good has no attribute 'generat'",
        ),
        ("reward.custom_rm_path my_hooks.bad.reward_one(sample)", "is called as fn(args, sample)"),
        ("rollout.dynamic_sampling_filter_path my_hooks.bad.dynamic_filter(group)", "is called as fn(args, group)"),
    ]


def test_a_group_reward_is_checked_as_one(hooks):
    settings = {
        "data": {"source_path": "my_hooks.good.StateSource"},
        "rollout": {"function_path": "my_hooks.good.Rollout"},
        "reward": {"custom_rm_path": "my_hooks.good.group_reward", "group_rm": True},
    }
    config = RunConfig.model_validate(settings)
    load_hooks(config)
    assert (HOOKS[GROUP_REWARD], "my_hooks.good.group_reward") in hooks_of(config)
    assert HOOKS["--custom-rm-path"] not in [contract for contract, _ in hooks_of(config)]


def test_the_default_hooks_load():
    defaults = RunConfig()
    load_hooks(defaults)
    paths = {path for _, path in hooks_of(defaults)}
    assert {defaults.rollout.function_path, defaults.data.source_path} <= paths


def test_flags_of_a_hook_are_found(hooks):
    parser = argparse.ArgumentParser()
    declare = add_arguments_of("my_hooks.good.reward")
    assert declare is not None
    declare(parser)
    assert parser.parse_args(["--my-depth", "5"]).my_depth == 5
    assert add_arguments_of("my_hooks.good.generate") is None
    with pytest.raises(HookError, match=r"is called as add_arguments\(parser\)"):
        add_arguments_of("my_hooks.good.reward_bare")


def test_call_awaits_what_must_be_awaited():
    async def later(x, *, y):
        return x + y

    async def story():
        return [
            await maybe_await(later(1, y=2)),
            await maybe_await(5),
            await maybe_await(functools.partial(later, 1)(y=1)),
        ]

    assert asyncio.run(story()) == [3, 5, 2]
    assert is_async(later)
    assert not is_async(inspect.isawaitable)
