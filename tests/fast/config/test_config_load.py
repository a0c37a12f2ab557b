import argparse
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.config.dump import dump, undump
from miles.config.load import load, read, resolve
from miles.config.preflight import preflight
from miles.config.schema import RunConfig
from miles.config.walk import leaves
from miles.config.yaml_text import YamlError, read_yaml, write_yaml
from miles.errors import ConfigError, HookError

RECIPES = Path(__file__).parents[3] / "recipes"
OK = ["--num-rollout", "3", "--rm-type", "math", "--label-key", "label"]


def messages(argv: list[str], hook_arguments=None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(argv, hook_arguments)
    return {issue.path: f"{issue.problem} -> {issue.fix}" for issue in caught.value.issues}


def recipe(folder: Path, text: str, name: str = "recipe.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_flags_win_over_recipes_and_later_recipes_over_earlier(tmp_path):
    first = recipe(tmp_path, "rollout: {batch_size: 4, n_samples_per_prompt: 2}\nmodel:\n", "a.yaml")
    second = recipe(tmp_path, "rollout: {batch_size: 8}\noptimizer: {lr: 1e-4}\n", "b.yaml")
    cfg = load([first, second, *OK, "--n-samples-per-prompt", "16"])
    assert (cfg.rollout.batch_size, cfg.rollout.n_samples_per_prompt, cfg.optimizer.lr) == (8, 16, 1e-4)
    assert cfg.rollout.seed == 42


@pytest.mark.parametrize("leaf", leaves(), ids=lambda leaf: leaf.path)
def test_every_spelling_of_a_flag_sets_the_same_field(leaf):
    sample = {"int": "7", "float": "0.5", "bool": "true", "str": "text", "dict": '{"a": "b"}'}
    item = '{"name": "a", "path": "b"}' if leaf.item_type == "EvalDataset" else sample.get(leaf.item_type, "")
    value = leaf.choices[-1] if leaf.choices else "2.5" if leaf.bounds == "over 1" else item
    read_values = [read([flag, value]).config for flag in leaf.flags]
    section, _, name = leaf.path.partition(".")
    got = [getattr(getattr(c, section), name) if name else getattr(c, section) for c in read_values]
    assert all(g == got[0] for g in got)
    assert got[0] != leaf.default or leaf.type_name == "bool" or len(leaf.choices) == 1


def test_values_are_read_by_the_type_of_their_field():
    cfg = load([*OK, "--run-name", "12", "--lr", "1e-6", "--rollout-stop", "yes", "1e5", "--eval-top-p", "null"])
    assert (cfg.run.name, cfg.optimizer.lr, cfg.rollout.stop, cfg.eval.top_p) == ("12", 1e-6, ["yes", "1e5"], None)
    assert type(cfg.optimizer.lr) is float


def test_lists_take_all_words_up_to_the_next_flag():
    cfg = load([*OK, "--rollout-stop-token-ids", "1", "2", "3", "--lr=3e-4", "--rollout-stop=--end--"])
    assert (cfg.rollout.stop_token_ids, cfg.optimizer.lr, cfg.rollout.stop) == ([1, 2, 3], 3e-4, ["--end--"])


def test_negative_numbers_are_values():
    assert load([*OK, "--rollout-top-k", "-1", "--seed", "-3"]).train.seed == -3


def test_switches_stand_alone_or_take_true_and_false():
    reward = ["--group-rm", "--custom-rm-path", "my.reward"]
    cfg = load([*OK, *reward, "--save-hf", "false", "--use-tensorboard=false", "--disable-rewards-normalization"])
    assert cfg.reward.group_rm is True
    assert (cfg.checkpoint.save_hf, cfg.run.use_tensorboard) == (False, False)
    assert cfg.algorithm.rewards_normalization is False
    assert load([*OK, "--disable-rewards-normalization", "false"]).algorithm.rewards_normalization is True


def test_mappings_are_json_or_yaml_text():
    cfg = load([*OK, "--apply-chat-template-kwargs", '{"enable_thinking": false}', "--custom", "{coef: 1e-3}"])
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert cfg.custom == {"coef": 0.001}


def test_last_of_a_repeated_flag_counts():
    assert load([*OK, "--lr", "1", "--optimizer.lr", "2"]).optimizer.lr == 2


def test_custom_section_merges_by_name(tmp_path):
    base = recipe(tmp_path, "custom: {a: 1, b: {x: 1}}\n", "base.yaml")
    more = recipe(tmp_path, "b: {y: 2}\nc: 1e-6\n", "more.yaml")
    cfg = load([base, *OK, "--custom-config-path", more, "--custom", "{c: 3}"])
    assert cfg.custom == {"a": 1, "b": {"y": 2}, "c": 3}
    assert load([base, *OK, "--custom-config-path", more]).custom["c"] == 1e-6


def test_datasets_come_from_a_recipe(tmp_path):
    path = recipe(tmp_path, "eval:\n  interval: 5\n  datasets:\n    - {name: a, path: a.jsonl, temperature: 0}\n")
    assert load([path, *OK]).eval.datasets[0].temperature == 0


def test_resolved_yaml_reads_back_to_an_equal_configuration(tmp_path):
    cfg = load([*OK, "--run-name", "1e5", "--lr", "1e-6", "--custom", "{a: [1, null, '2024-01-01'], b: 'no', c: {}}"])
    text = dump(cfg)
    assert undump(text) == cfg
    assert load([recipe(tmp_path, text)]) == cfg


def test_yaml_numbers_with_an_exponent_are_numbers_both_ways():
    assert read_yaml("a: 1e-6\nb: 1E5\nc: '1e5'") == {"a": 1e-6, "b": 1e5, "c": "1e5"}
    assert read_yaml(write_yaml({"a": "1e5", "b": 1e-6})) == {"a": "1e5", "b": 1e-6}


def test_yaml_aliases_and_merge_keys_work():
    assert read_yaml("a: &x {k: 1}\nb: {<<: *x, k: 2}\nc: *x") == {"a": {"k": 1}, "b": {"k": 2}, "c": {"k": 1}}


def test_yaml_with_a_key_twice_is_refused():
    with pytest.raises(YamlError, match="line 2, column 1: the key a is given twice"):
        read_yaml("a: 1\na: 2")


# Case H01: flags.
def test_unknown_flag_names_the_nearest_one():
    assert messages([*OK, "--rollout-batchsize", "8"]) == {
        "--rollout-batchsize": "no such flag -> did you mean --rollout-batch-size?"
    }
    assert messages([*OK, "--custom-confg-path", "x"])["--custom-confg-path"].endswith("--custom-config-path?")
    assert messages([*OK, "--zzzzqqqq"]) == {"--zzzzqqqq": "no such flag -> see --help for all flags"}


# Case H01: keys of a recipe.
def test_unknown_recipe_key_names_the_nearest_one_and_the_file(tmp_path):
    path = recipe(tmp_path, "rollout: {batchsize: 3}\nrollout_batch_size: 4\nzzzzqqqq: 1\n7: 2\n")
    found = messages([path, *OK])
    assert found["rollout.batchsize"] == f"no such setting (in {path}) -> did you mean rollout.batch_size?"
    assert found["rollout_batch_size"].endswith("did you mean rollout.batch_size?")
    assert "known here: run, cluster, fault_tolerance, model" in found["zzzzqqqq"]
    assert set(found) == {"rollout.batchsize", "rollout_batch_size", "zzzzqqqq", "7"}


def test_dotted_recipe_key_is_told_to_nest(tmp_path):
    path = recipe(tmp_path, "rollout.batch_size: 3\n")
    assert messages([path, *OK])["rollout.batch_size"].endswith("nest it: `rollout: {batch_size: ...}`")


def test_wrong_types_say_what_was_found_and_what_is_wanted():
    argv = [
        "--rollout-batch-size",
        "zero",
        "--lr",
        "nan",
        "--num-cpus",
        "0",
        "--tis-level",
        "tokens",
        "--group-rm",
        "maybe",
    ]
    assert messages([*OK, *argv, "--rollout-stop-token-ids", "1", "x"]) == {
        "--rollout-batch-size": "got 'zero' -> give a whole number, 1 or more",
        "--lr": "got 'nan' -> give a number, 0 or more",
        "--num-cpus": "got '0' -> give a whole number, 1 or more, or null to unset it",
        "--tis-level": "got 'tokens' -> give one of token, sequence, geometric, or null to unset it",
        "--group-rm": "got 'maybe' -> give true or false, or nothing, which means true",
        "--rollout-stop-token-ids.1": "got 'x' -> give a list of whole numbers",
    }


def test_wrong_types_in_a_recipe_name_the_file(tmp_path):
    path = recipe(
        tmp_path, "rollout: {batch_size: yes, stop: END}\nrun: {name: 12}\nreward: 5\noptimizer: {lr: null}\n"
    )
    assert messages([path, "--num-rollout", "1"]) == {
        "rollout.batch_size": f"got true in {path} -> give a whole number, 1 or more",
        "rollout.stop": f"got 'END' in {path} -> give a list of texts",
        "run.name": f'got 12 in {path} -> give text: put it in quotes, as in "12"',
        "reward": f"is a section, but {path} gives it a number -> "
        "write its settings below it, such as `reward: {rm_type: ...}`",
        "optimizer.lr": f"got null in {path} -> give a number, 0 or more",
    }


def test_custom_section_that_is_no_mapping_is_an_issue(tmp_path):
    path = recipe(tmp_path, "custom: 5\n")
    found = messages([path, *OK, *GENERATE], declares("--my-a", default=1))
    assert found == {
        "custom": f"is a section, but {path} gives it a number -> "
        "write its settings below it, such as `custom: {name: ...}`"
    }


def test_wrong_entry_of_a_list_of_datasets_is_named(tmp_path):
    path = recipe(tmp_path, "eval: {interval: 1, datasets: [{name: a, pth: b, temperature: hot}]}\n")
    assert messages([path, *OK]) == {
        "eval.datasets.0.path": f"is missing in {path} -> add `path: ...`, text",
        "eval.datasets.0.temperature": f"got 'hot' in {path} -> give a number, 0 or more, or null to unset it",
        "eval.datasets.0.pth": f"no such setting in {path} -> did you mean path?",
    }


def test_number_of_values_is_judged():
    found = messages([*OK, "--lr", "--run-name", "a", "b", "--custom", "[1]", "--seed", "3", "more.yaml"])
    assert found["--lr"] == "has no value -> give a number, 0 or more"
    assert found["--run-name"] == "takes one value, got 2: a b -> give text"
    assert found["--custom"].startswith("got '[1]' -> give a mapping as JSON or YAML")
    assert found["--seed"].endswith("put more.yaml before the first flag: recipes come first")


def test_single_dash_and_stray_dashes_are_unknown_flags():
    assert set(messages(["-x", "--", *OK])) == {"-x", "--"}


def test_unusable_recipes_are_told_apart(tmp_path):
    recipe(tmp_path, "{}", "training.yaml")
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfrun: {name: a}\n")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}\n")
    bad = recipe(tmp_path, "run: {name: a\nrollout: 1", "bad.yaml")
    tab = recipe(tmp_path, "run:\n\tname: a\n", "tab.yaml")
    items = recipe(tmp_path, "- a\n- b\n", "items.yaml")
    missing = str(tmp_path / "trainin.yaml")
    found = messages(
        [missing, str(tmp_path / "bom.yaml"), str(tmp_path / "latin.yaml"), bad, tab, items, str(tmp_path)]
    )
    assert found[missing] == f"no such file -> did you mean {tmp_path / 'training.yaml'}?"
    assert found[str(tmp_path / "bom.yaml")] == "starts with a byte-order mark -> save it as UTF-8 without BOM"
    assert found[str(tmp_path / "latin.yaml")] == "is not UTF-8 text (byte 12) -> save it as UTF-8"
    assert found[bad].startswith("is not valid YAML: line 2, column ")
    assert "line 2, column 1: " in found[tab]
    assert "indent with spaces, not tabs" in found[tab]
    assert found[items].startswith("holds a list, not a mapping -> ")
    assert found[str(tmp_path)].startswith("is a folder, not a YAML file")
    assert len(found) == 7, "an unreadable recipe must not be blamed for settings it may well hold"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_of_the_project_loads(path):
    given_as_flags = {"eval.prompt_data"}
    assert [issue for issue in read([str(path)]).issues if issue.path not in given_as_flags] == []


def test_empty_recipe_is_a_recipe(tmp_path):
    assert load([recipe(tmp_path, "# nothing yet\n"), *OK]) == load(OK)


def test_all_problems_are_reported_at_once_and_guesses_are_not(tmp_path):
    path = recipe(tmp_path, "rollout: {batchsize: 3, top_p: 0.9}\n")
    found = messages([path, "--num-rolout", "3", "--lr", "x", "--rm-type", "exact", "--global-batch-size", "7"])
    assert set(found) == {"rollout.batchsize", "--num-rolout", "--lr", "rollout.top_p", "data.label_key"}


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(), inner, max_size=3),
    max_leaves=5,
)
FLAGS = st.sampled_from([*(flag for leaf in leaves() for flag in leaf.flags + leaf.inverted), "--custom-config-path"])


@settings(max_examples=50, deadline=None)
@given(
    data=st.dictionaries(st.sampled_from([leaf.path for leaf in leaves()]), VALUES, max_size=6),
    sections=st.dictionaries(st.sampled_from([leaf.section for leaf in leaves()]), VALUES, max_size=2),
    words=st.lists(FLAGS | TEXT, max_size=8),
)
def test_any_input_gives_a_configuration_or_issues_and_nothing_else(data, sections, words):
    nested = dict(sections)
    for path, value in data.items():
        section, _, name = path.partition(".")
        if isinstance(nested.setdefault(section, {}), dict):
            nested[section][name] = value
    with tempfile.TemporaryDirectory() as folder:
        reading = read([recipe(Path(folder), write_yaml(nested)), *OK, *words], declares("--my-a", type=int))
    assert isinstance(reading.config, RunConfig)
    assert all(issue.path and issue.problem and issue.fix for issue in reading.issues)
    preflight(reading.config, reading.unknown)
    if not reading.issues:
        assert undump(dump(reading.config)) == reading.config


def test_resolve_takes_plain_data():
    data = {"rollout": {"num_rollout": 1}, "reward": {"rm_type": "exact"}, "data": {"label_key": "label"}}
    assert resolve(data).reward.rm_type == "exact"
    with pytest.raises(ConfigError, match=r"rollout\.batchsize: no such setting"):
        resolve({"rollout": {"batchsize": 1}})


GENERATE = ["--custom-generate-function-path", "my.generate"]


def declares(*names: str, **options):
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        for name in names:
            parser.add_argument(name, **options)

    return lambda path: add_arguments if path == "my.generate" else None


def test_flags_of_a_named_function_go_to_custom_with_their_defaults(tmp_path):
    path = recipe(tmp_path, "custom: {my_b: 5}\n")
    hooks = declares("--my-a", "--my-b", "--my-c", type=int, default=1)
    assert load([path, *OK, *GENERATE, "--my-a=-2"], hooks).custom == {"my_a": -2, "my_b": 5, "my_c": 1}
    assert load([path, *OK, *GENERATE, "--my-b", "7"], hooks).custom == {"my_a": 1, "my_b": 7, "my_c": 1}


def test_value_in_a_recipe_satisfies_a_required_flag(tmp_path):
    path = recipe(tmp_path, "custom: {my_a: 5}\n")
    hooks = declares("--my-a", required=True, type=int)
    assert load([path, *OK, *GENERATE], hooks).custom == {"my_a": 5}
    assert "required: --my-a" in messages([*OK, *GENERATE], hooks)["my.generate"]


def test_functions_are_asked_only_when_a_run_names_them():
    def refuse(path: str):
        raise AssertionError(path)

    default = load(OK).rollout.function_path
    assert load([*OK, "--rollout-function-path", default], refuse) == load(OK)


def test_flag_that_no_named_function_declares_stays_unknown():
    hooks = declares("--my-turns", type=int, default=1)
    found = messages([*OK, *GENERATE, "--my-turn", "2"], hooks)
    assert found == {"--my-turn": "no such flag -> did you mean --my-turns?"}


def test_wrong_value_of_a_functions_flag_is_an_issue():
    found = messages([*OK, *GENERATE, "--my-a", "x"], declares("--my-a", type=int))
    assert found == {
        "my.generate": "argument --my-a: invalid int value: 'x' -> give its flags as it declares them: --my-a"
    }


def test_function_that_ends_the_program_is_an_issue():
    hooks = declares("--my-version", action="version", version="1.0")
    assert messages([*OK, *GENERATE, "--my-version"], hooks)["my.generate"].startswith("its flags end the program -> ")


def test_function_whose_declaration_raises_is_an_issue():
    found = messages([*OK, *GENERATE], declares("--my-a", "--my-a"))
    assert "its add_arguments raised ArgumentError" in found["my.generate"]


def test_function_that_takes_a_flag_of_miles_is_an_issue():
    found = messages([*OK, *GENERATE], declares("--lr"))
    assert found["my.generate"].startswith("its add_arguments declares --lr, which Miles has")


def test_function_that_does_not_import_is_an_issue():
    def hooks(path: str):
        raise HookError(path, "no module named my", "correct the path")

    assert messages([*OK, *GENERATE], hooks)["my.generate"].startswith("no module named my")
