import asyncio
import sys

import pytest

from miles.core.samples import Sample
from miles.errors import ConfigError, HookError
from miles.rollout.rm_hub.graders import LabelError
from miles.rollout.rm_hub.ifbench import InstructionGrader

REGISTRY = """
class Instruction:
    def __init__(self, name): self.name = name
    def get_instruction_args(self): return self.__dict__

class Words(Instruction):
    def build_description(self, *, least=None, most=None):
        self.least, self.most = least or 0, 100 if most is None else most
    def check_following(self, text): return self.least <= len(text.split()) <= self.most

class Repeats(Instruction):
    def build_description(self, *, prompt=None): self.prompt = prompt
    def check_following(self, text): return text.startswith(self.prompt)

class Raises(Instruction):
    def build_description(self): pass
    def check_following(self, text): raise LookupError("punkt is not here")

INSTRUCTION_DICT = {NAMES}
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with the modules and the class interface of if-verifiable."""
    for name, registered in (
        ("ifbench", "'words': Words, 'repeats': Repeats, 'raises': Raises"),
        ("ifeval", "'eval:words': Words"),
    ):
        folder = tmp_path / "if_verifiable" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text("")
        (folder / "instructions_registry.py").write_text(REGISTRY.replace("NAMES", registered))
    (tmp_path / "if_verifiable" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith("if_verifiable")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def grade(package):
    grader = InstructionGrader(10.0, 1)
    yield lambda response, prompt="say it", **metadata: asyncio.run(
        grader.grade_sample(response, Sample(prompt=prompt, metadata=metadata))
    )
    grader.close()


def test_all_instructions_must_be_followed(grade):
    rows = [
        ("a b c", ["words"], [{"least": 2, "most": None}], 1),
        ("a", ["words"], [{"least": 2}], 0),
        ("a b", ["words", "eval:words"], [{"least": 2}, {"most": 1}], 0),
        ("a b", ["words", "eval:words"], [{"least": 2}, {"most": 2}], 1),
        ("", ["words"], [{}], 0),
        (" \n", ["words"], None, 0),
        ("x", ["words"], [None], 1),
    ]
    for response, names, kwargs, reward in rows:
        assert grade(response, instruction_id_list=names, kwargs=kwargs) == reward


def test_the_prompt_comes_from_the_metadata_or_the_sample(grade):
    assert grade("copy me: yes", instruction_id_list=["repeats"], kwargs=[{}], prompt_text="copy me") == 1
    assert grade("say it: yes", instruction_id_list=["repeats"], kwargs=[{}]) == 1
    assert grade("no", instruction_id_list=["repeats"], kwargs=[{}]) == 0


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({}, "has no instruction_id_list"),
        ({"instruction_id_list": "words"}, "has no instruction_id_list"),
        ({"instruction_id_list": ["words"], "kwargs": []}, "no list of 1 objects"),
        ({"instruction_id_list": ["wrods", "words"], "kwargs": [{}, {}]}, "no instruction is called wrods"),
        ({"instruction_id_list": ["words"], "kwargs": [{"fewest": 1}]}, "kwargs of words do not fit"),
    ],
)
def test_rows_that_cannot_be_judged_are_named(grade, metadata, problem):
    with pytest.raises(LabelError, match=problem):
        grade("x", **metadata)


def test_an_instruction_that_raises_is_an_error_and_no_zero(grade):
    with pytest.raises(HookError, match="LookupError: punkt is not here"):
        grade("x", instruction_id_list=["raises"], kwargs=[{}])


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"if-verifiable, which is not here\n\s+fix: pip install 'miles\[ifbench\]'"):
        InstructionGrader(1.0, 1)


def test_the_real_package_judges():
    pytest.importorskip("if_verifiable.ifeval.instructions_registry")
    grader = InstructionGrader(30.0, 1)
    metadata = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    try:
        verdicts = [
            asyncio.run(grader.grade_sample(text, Sample(metadata=metadata))) for text in ("no comma", "one, comma")
        ]
    finally:
        grader.close()
    assert verdicts == [1.0, 0.0]
