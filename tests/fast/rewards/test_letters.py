import time

import pytest

from miles.rollout.rm_hub.letters import find_letter

SETTLED = {
    # Case A24.
    "Answer: I think it is C": "C",
    "Answer: not B; the answer is D": "D",
    "Answer: C is excluded, so D remains": "D",
    "Answer: D, not B": "D",
    # Case A25.
    "Having weighed all of them, the answer is C.": "C",
    "Both readings fit the third option.\n\nC": "C",
    "The answer is (c)": "C",
    "Answer: b": "B",
    "Answer: a": "A",
    "**Answer: C**": "C",
    "ANSWER IS D": "D",
    "answer = D": "D",
    "Choice: C": "C",
    "The correct answer is:\n\n(C)": "C",
    "The answer is: **D) 1.5 m/s**": "D",
    "The answer is “C”": "C",
    r"The final answer is $\boxed{\text{B}}$.": "B",
    r"\boxed{C) 42}": "C",
    r"\boxed{42} Therefore, the answer: \(C\)": "C",
    "<answer>D</answer>": "D",
    "The answer to the question is therefore option B.": "B",
    "The answer is probably C": "C",
    "The answer is A because it is cold": "A",
    "Answer - B": "B",
    "Hence answer B.": "B",
    "A. true\nB. false\nThe statement is true, so A.": "A",
    r"The final answer is: $\boxed{\text{(B)}}$": "B",
    "Answer: B\nExplanation: A is wrong because of C": "B",
    "**Final Answer:** B": "B",
    "The correct answer is **(B) 5.2 MeV**.": "B",
    "Answer: The correct option is B": "B",
    "Therefore, option C is the correct answer.": "C",
    "The answer is D (not B).": "D",
    "Option D is correct.": "D",
    "C is the best answer": "C",
    "I would choose B.": "B",
    "I'll go with option (A).": "A",
    "It must be D": "D",
    "If the answer is C, then x < 0. So the answer is D.": "D",
    "The answer is B. Wait, no. The answer is D.": "D",
    "The answer is C, since A and B fail": "C",
    "The answer is B, and A is wrong": "B",
    "Options:\nA) x\nB) y\n\nThe answer is B": "B",
    "C) photosynthesis": "C",
    "(C)": "C",
    "C.": "C",
    "Option C": "C",
}
UNSETTLED = [
    "",
    "no letter at all",
    "The answer is not C.",
    "The answer isn't C",
    "The answer can't be B",
    "Answer: A is wrong",
    "I cannot say that the answer is C.",
    "I do not think the answer is C",
    "Neither B nor C is the answer",
    "The answer is A or B",
    "The answer is either A or B.",
    "Answer: A, B",
    "The answer is C or maybe D",
    "Options: A, B, C, D",
    "none of A, B, C or D",
    "Answer: A and B",
    "Answer: A/B",
    "Answer: B and C are both wrong",
    "The answer is B? No.",
    "Answer: AB",
    "so A photon",
    "The answer is a matter of debate",
    "the answer is a",
    "Answer: A photon is emitted",
    "A photon",
    "The answer is Cat",
    "The answer is E",
    "Vitamin C is best",
    # Errors and refusals are no answers, whatever letters they have.
    "Error: quota exceeded, aborted",
    "Error: A connection could not be made",
    "HTTP 500: the answer is A",
    "Traceback (most recent call last): answer: A",
    "ValueError: B",
    "I cannot answer this question. A",
    "I'm sorry, but I can't help with option A",
    "As an AI I am unable to choose.\nB",
]


@pytest.mark.parametrize("text", SETTLED)
def test_a_plain_statement_is_found(text):
    assert find_letter(text, "ABCD") == SETTLED[text]


@pytest.mark.parametrize("text", UNSETTLED)
def test_what_settles_on_no_letter_has_none(text):
    assert find_letter(text, "ABCD") is None


def test_only_the_letters_of_the_question_count():
    assert find_letter("The answer is E", "ABCDE") == "E"
    assert find_letter("The answer is (i)", "GHI") == "I"
    assert find_letter("I think that I know", "GHI") is None


def test_a_box_outranks_prose():
    assert find_letter(r"The answer is A. No: \boxed{B}. Earlier I wrote that the answer is A.", "AB") == "B"


def test_the_end_of_a_long_response_is_read_and_its_beginning_shows_an_error():
    assert find_letter("the answer is A. " + "word " * 20_000 + "the answer is B", "AB") == "B"
    assert find_letter("Error: " + "word " * 20_000 + "the answer is B", "AB") is None


@pytest.mark.parametrize(
    "unit",
    ["answer is the ", "A, ", "the answer is A or ", "answer:\n\n", "\n", " ", "(", r"\boxed{", "I cannot ", "it is ",
     "answer to the x y z ", "<answer>", "not ", "Error: ", "\ud800", "$$", r"\text{", "a", "option A is the most "],
)  # fmt: skip
def test_a_hundred_kilobytes_of_anything_take_no_time(unit):
    text = (unit * (100_000 // len(unit) + 1))[:100_000]
    began = time.process_time()
    find_letter(text, "ABCDEFGH")
    assert time.process_time() - began < 0.5
