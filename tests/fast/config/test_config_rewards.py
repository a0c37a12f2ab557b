import pytest

from miles.config.load import read
from miles.config.reward_types import REWARD_TYPES, is_reward_type, needs_label, split_boxed
from miles.config.walk import leaves

RUN = ["--num-rollout", "3", "--label-key", "label", "--reward-key", "score"]


def problems(*argv):
    return [f"{issue.path}: {issue.problem} -> {issue.fix}" for issue in read([*RUN, *argv]).issues]


def test_every_type_and_its_boxed_form_are_accepted():
    for name in REWARD_TYPES:
        assert problems("--rm-type", name, "--rm-url", "http://h:1") == []
        assert problems("--rm-type", f"boxed_{name}", "--rm-url", "http://h:1") == []


@pytest.mark.parametrize(
    ("name", "nearest"), [("maths", "math"), ("gqpa", "gpqa"), ("boxed_maths", "boxed_math"), ("remote", "remote_rm")]
)
def test_a_misspelt_type_gets_the_nearest_names(name, nearest):
    (found,) = problems("--rm-type", name)
    assert found.startswith(f"reward.rm_type: there is no built-in reward {name!r} -> did you mean {nearest}")
    assert found.endswith(f"the built-in rewards are {', '.join(REWARD_TYPES)}, and boxed_TYPE for the last box only")


def test_a_type_like_no_other_gets_the_list():
    assert " -> the built-in rewards are math, " in problems("--rm-type", "zzz")[0]


def test_boxed_boxed_is_no_type():
    assert not is_reward_type("boxed_boxed_math")
    assert split_boxed("boxed_math") == (True, "math")


def test_rewards_that_compare_need_a_label_key_and_the_others_do_not():
    for name in REWARD_TYPES:
        issues = read(["--num-rollout", "3", "--rm-type", name, "--rm-url", "http://h:1", "--reward-key", "s"]).issues
        assert bool(issues) == needs_label(name)
        assert all(issue.path == "data.label_key" for issue in issues)
    assert needs_label("boxed_math")
    assert not needs_label("boxed_gpqa")


def test_remote_rm_needs_a_server():
    assert problems("--rm-type", "remote_rm") == [
        "reward.rm_url: --rm-type remote_rm asks a server, and none is named -> --rm-url http://HOST:PORT"
    ]
    assert problems("--rm-type", "remote_rm", "--custom-rm-path", "my.reward") == []


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://h", "http://a:1,b:2"])
def test_an_address_that_is_none_is_refused(url):
    (found,) = problems("--rm-type", "remote_rm", "--rm-url", url)
    assert found.startswith(f"reward.rm_url: {url.rpartition(',')[2]!r} is no address of a server -> --rm-url http://")


def test_group_rewards_need_a_function():
    assert problems("--rm-type", "exact", "--group-rm") == [
        "reward.group_rm: gives whole groups to a function, and the built-in rewards judge one sample at a time -> "
        "--custom-rm-path package.module.function, or leave out --group-rm"
    ]
    assert problems("--group-rm", "--custom-rm-path", "my.reward") == []


def test_a_deterministic_run_has_no_reward_by_chance():
    (found,) = problems("--rm-type", "random", "--deterministic-mode")
    assert found == (
        "reward.rm_type: random draws anew in every run, and --deterministic-mode promises the same run again -> "
        "--rm-type deterministic_random"
    )
    assert problems("--rm-type", "deterministic_random", "--deterministic-mode") == []


def test_the_help_of_the_setting_names_every_type():
    doc = next(leaf.doc for leaf in leaves() if leaf.path == "reward.rm_type")
    assert [name for name in REWARD_TYPES if f"`{name}`" not in doc] == []
