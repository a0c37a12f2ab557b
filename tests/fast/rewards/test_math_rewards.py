import asyncio
import threading
import time
from types import SimpleNamespace

import pytest

from miles.config.load import read
from miles.core.samples import Sample
from miles.rollout.rm_hub.graders import LabelError
from miles.rollout.rm_hub.hub import RewardHub
from miles.rollout.rm_hub.labels import label_problem
from miles.rollout.rm_hub.math_rewards import DapoGrader, DeepscalerGrader, GemmaMathGrader, MathGrader

TOWER = r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}"
UNENDING = r"\int_0^\infty \frac{\sin x}{x(1+x^4)} e^{-x^2} dx"


def grade(grader, response, label):
    return asyncio.run(grader.grade(response, label))


@pytest.fixture(scope="module")
def deepscaler():
    grader = DeepscalerGrader(2.0, 1)
    yield grader
    grader.close()


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        # Case A03.
        (r"The sum is 3+4. Thus \boxed{7}", "7", 1),
        (r"<think>x</think> \boxed{7}", "7", 1),
        (r"<think>x, perhaps \boxed{7}", "7", 0),
        (r"<think>a</think> b <think>so \boxed{7}", "7", 0),
        (r"<think>so \boxed{7}</think> no answer", "7", 0),
        (r"<think>so \boxed{3}</think> \boxed{7}", "3", 0),
        # Case A04.
        (r"draft \boxed{1} ###Response \boxed{2} ###Response \boxed{42}", "42", 1),
        (r"draft \boxed{1} ###Response \boxed{2} ###Response \boxed{42}", "2", 0),
        (r"<think>a</think> ###Response \boxed{42}", "42", 1),
        ("The answer is 7", "7", 0),
    ],
)
def test_deepscaler_judges_the_box_after_the_last_marker(deepscaler, response, label, reward):
    assert grade(deepscaler, response, label) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (r"<|channel>thought so \boxed{3}<channel|>It is \boxed{7}", 1),
        (r"<|channel>thought so \boxed{7}<channel|>It is \boxed{3}", 0),
        (r"<|channel>thought so \boxed{7}", 0),
        (r"It is \boxed{7}", 1),
        ("It is 7", 0),
    ],
)
def test_gemma_math_judges_the_box_after_its_thoughts(response, reward):
    grader = GemmaMathGrader(2.0, 1)
    assert grade(grader, response, "7") == reward
    grader.close()


# Case A34.
@pytest.mark.parametrize(
    ("response", "label", "right", "pred"),
    [
        ("Answer: 0", "0.5", 0, "0"),
        ("Answer: 7", "7.5", 0, "7"),
        ("Answer: 9007199254740993", "9007199254740993", 1, "9007199254740993"),
        ("Answer: 9007199254740992", "9007199254740993", 0, "9007199254740992"),
        ("Answer: 42", "42.0", 1, "42"),
        ("Answer: 2/3", "2/3", 1, "2/3"),
        ("Answer: 12", "1.2e1", 1, "12"),
        ("Answer: 12", 12, 1, "12"),
        ("answer : $34$", "34", 1, "$34$"),
        ("Answer: 1\nAnswer: 2", "2", 1, "2"),
        ("Answer: 1\nAnswer: 2", "1", 0, "2"),
        (r"Answer: \boxed{34}", "34", 1, "34"),
        ("**Answer: 34**", "34", 1, "34"),
        ("**Answer:** 34", "34", 1, "34"),
        ("34", "34", 0, None),
        (r"So \boxed{34}.", "34", 0, None),
        ("Answer: 34" + " and so on" * 40, "34", 0, None),
        ("Answer: thirty-four", "34", 0, "thirty-four"),
    ],
)
def test_dapo_scores_the_last_answer_line_exactly(response, label, right, pred):
    found = grade(DapoGrader(), response, label)
    assert found == {"score": 1.0 if right else -1.0, "acc": float(right), "pred": pred}


@pytest.mark.parametrize("label", ["x+1", "(1,2)", "Paris", "5 cm", "", None, [1], "1/0x"])
def test_dapo_refuses_labels_that_are_no_number(label):
    with pytest.raises(LabelError):
        grade(DapoGrader(), "Answer: 1", label)
    assert label_problem("dapo", label) is not None


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer_config.json").write_text("{}")
    values = {"rm_type": None, "custom_rm_path": None, "group_rm": False, "reward_key": None, "eval_reward_key": None,
              "reward_timeout_s": 30.0, "max_reward_error_rate": 1.0, "reward_num_workers": 1, "hf_checkpoint": str(folder)}  # fmt: skip
    hub = RewardHub(SimpleNamespace(**values))
    yield hub
    asyncio.run(hub.close())


@pytest.mark.parametrize("name", ["dapo", "boxed_dapo"])
def test_dapo_asks_at_start_up_which_entry_is_trained_on(name):
    run = ["--num-rollout", "3", "--label-key", "label", "--rm-type", name]
    (issue,) = read(run).issues
    assert issue.path == "reward.reward_key"
    assert f"--rm-type {name} gives an object with score, acc and pred" in issue.problem
    assert issue.fix == "--reward-key score"
    assert read([*run, "--reward-key", "score"]).issues == ()


# Case A01.
@pytest.mark.parametrize("rm_type", ["boxed_math", "boxed_deepscaler", "boxed_gemma_math"])
@pytest.mark.parametrize(
    ("response", "reward"),
    [(r"Answer: \boxed{5}", 1), (r"Answer: \boxed{6}", 0), ("Answer: 5", 0), (r"\boxed{\boxed{5}}", 1)],
)
def test_boxed_rewards_take_the_box_once_or_twice_alike(hub, rm_type, response, reward):
    sample = Sample(index=0, group_index=0, response=response, label="5", metadata={"rm_type": rm_type})
    assert asyncio.run(hub.grade(sample)) == reward


@pytest.mark.parametrize(("response", "score"), [(r"So \boxed{5}.", 1), (r"So \boxed{6}.", -1), ("Answer: 5", -1)])
def test_boxed_dapo_wants_a_box_in_place_of_the_line(hub, response, score):
    sample = Sample(index=0, group_index=0, response=response, label="5", metadata={"rm_type": "boxed_dapo"})
    hub._keys = ("score",)
    assert asyncio.run(hub.grade(sample))["score"] == score


@pytest.mark.parametrize(
    ("rm_type", "label", "problem"),
    [
        ("math", "5", None),
        ("math", r"\boxed{\frac{1}{2}}", None),
        ("math", "June 20", None),
        ("math", 0.5, None),
        ("math", r"\sum_{k=1}^n k", None),
        ("boxed_math", "x+1", None),
        ("dapo", "1.2e1", None),
        ("dapo", "2/3", None),
        ("exact", "anything at all", None),
        ("random", None, None),
        ("math", "", "the label is empty"),
        ("math", None, "the row has no label"),
        ("math", [1], "the label is list"),
        ("math", r"\boxed{}", "the label is an empty box"),
        ("math", "<unparsable gold>", "'<unparsable gold>' cannot be read as mathematics"),
        ("dapo", "x+1", "'x+1' is not a number"),
    ],
)
def test_labels_are_checked_before_anything_is_graded(rm_type, label, problem):
    found = label_problem(rm_type, label)
    assert found is None if problem is None else problem in found


# Case A18.
@pytest.mark.parametrize(
    "answer",
    [
        TOWER,
        "{" * 50_000 + "}" * 50_000,
        "100000000!",
        "((((9!)!)!)!)!",
        "9^{9^{9^{9}}}",
        "9^9^9^9^9^9",
        "10^{99999999999999999999}",
        r"\binom{1000000000}{500000000}",
        "(" * 400 + "x" + ")" * 400,
        r"\sqrt" * 180 + "2",
        r"\sin " * 180 + "2",
        "-" * 900 + "2",
        "1+" * 199 + "1",
        "2^" * 300 + "2",
        "9" * 100_000,
        ",".join(str(i) for i in range(190)),
        r"\pm" * 100 + "1",
        r"(x^{99}+1)" * 30,
        r"\sum_{k=1}^{5} 9^{9^{9^{9^9}}}",
        r"\begin{pmatrix}" + "1&" * 150 + r"1\end{pmatrix}",
    ],
    ids=range(20),
)
def test_hostile_answers_are_wrong_at_once_and_kill_no_worker(answer):
    grader = MathGrader(2.0, 1)
    start = time.process_time()
    assert grade(grader, rf"\boxed{{{answer}}}", "7") == 0
    assert time.process_time() - start < 0.5
    assert grader.metrics()["rollout/reward_timeouts"] == 0
    assert grader._pool.pids() == []
    grader.close()


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout_s=0.7, num_workers=1)
    yield grader
    grader.close()


# Cases A18 and A19.
def test_an_answer_that_sympy_does_not_finish_is_wrong_and_counted_from_any_thread(grader):
    rewards = {}

    def judge():
        rewards["easy"] = grade(grader, r"\boxed{7}", "7")
        rewards["started"] = grade(grader, r"\boxed{\max(3, 6)}", "6")
        start = time.perf_counter()
        rewards["hard"] = grade(grader, r"\boxed{\frac{1}{3}}", UNENDING)
        rewards["seconds"] = time.perf_counter() - start
        rewards["same"] = grade(grader, rf"\boxed{{{TOWER}}}", TOWER)
        rewards["after"] = grade(grader, r"\boxed{\max(3, 6)}", "6")

    thread = threading.Thread(target=judge)
    thread.start()
    thread.join(120)
    assert [rewards[key] for key in ("easy", "started", "hard", "same", "after")] == [1, 1, 0, 1, 1]
    assert rewards["seconds"] < 20
    assert grader.metrics()["rollout/reward_timeouts"] == 1


# Case A21.
def test_a_label_that_cannot_be_read_is_never_a_reward(grader):
    assert grade(grader, r"\boxed{\frac{64}{400}}", r"\frac{63}{400}") == 0
    assert grade(grader, "anything", "6") == 0
    for answer in ("5", "<unparsable", r"\frac{1}{2}"):
        with pytest.raises(LabelError, match="cannot be read as mathematics"):
            grade(grader, rf"\boxed{{{answer}}}", "<unparsable gold>")
