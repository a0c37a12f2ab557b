from collections import Counter

from miles.config.schema import RunConfig
from miles.config.walk import item_leaves, leaves, sections

BY_PATH = {leaf.path: leaf for leaf in leaves()}


def test_defaults_are_valid_and_frozen():
    assert RunConfig() == RunConfig.model_validate({})
    assert RunConfig.model_config.get("frozen") is True


def test_every_setting_and_section_is_documented():
    items = [item for leaf in leaves() for item in item_leaves(leaf)]
    assert [leaf.path for leaf in [*leaves(), *items] if not leaf.doc.endswith((".", "`"))] == []
    assert [name for name, doc in sections().items() if not doc] == []


def test_every_type_of_setting_has_words():
    plain = {"int", "float", "bool", "str", "dict"}
    assert [leaf.path for leaf in leaves() if leaf.item_type not in plain and not item_leaves(leaf)] == []


def test_no_two_settings_share_a_flag():
    counts = Counter(flag for leaf in leaves() for flag in (*leaf.flags, *leaf.inverted))
    assert [flag for flag, count in counts.items() if count > 1] == []
    assert not counts.keys() & {"--help", "--dry-run", "--custom-config-path"}


def test_no_two_settings_share_a_name_for_hooks():
    counts = Counter(leaf.attribute for leaf in leaves())
    assert [name for name, count in counts.items() if count > 1] == []
    assert [name for name in counts if not name.isidentifier()] == []


def test_every_setting_has_its_dotted_flag():
    assert [leaf.path for leaf in leaves() if leaf.flags[0] != "--" + leaf.path.replace("_", "-")] == []


def test_leaf_carries_everything_its_field_says():
    leaf = BY_PATH["rollout.batch_size"]
    assert (leaf.flags, leaf.flag) == (("--rollout.batch-size", "--rollout-batch-size"), "--rollout-batch-size")
    assert (leaf.type_name, leaf.default, leaf.bounds) == ("int", 32, "1 or more")
    assert (leaf.attribute, leaf.negated, leaf.doc) == ("rollout_batch_size", False, "Prompts per rollout step.")


def test_hook_name_of_an_inverted_switch_is_the_flag_and_negated():
    leaf = BY_PATH["algorithm.rewards_normalization"]
    assert (leaf.attribute, leaf.negated) == ("disable_rewards_normalization", True)


def test_hook_name_without_a_flag_of_its_own_is_the_path():
    leaf = BY_PATH["cluster.start_timeout_s"]
    assert (leaf.attribute, leaf.negated) == ("cluster_start_timeout_s", False)


def test_what_a_setting_wants_is_said_in_words():
    assert BY_PATH["rollout.num_rollout"].wants == "a whole number, 0 or more, or null to unset it"
    assert BY_PATH["rollout.top_p"].wants == "a number, over 0 and at most 1"
    assert BY_PATH["router.port"].wants == "a whole number, from 0 to 65535"
    assert BY_PATH["reward.rm_type"].wants == "text, or null to unset it"
    assert BY_PATH["correction.level"].wants == "one of token, sequence, geometric, or null to unset it"
    assert BY_PATH["rollout.stop_token_ids"].wants == "a list of whole numbers"
    assert BY_PATH["data.apply_chat_template_kwargs"].wants == "a mapping"
