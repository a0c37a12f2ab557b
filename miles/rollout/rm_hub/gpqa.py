"""Multiple choice: whether the letter that a response settles on is the correct one."""

from __future__ import annotations

import re
from typing import Any

from miles.core.samples import Sample
from miles.rollout.rm_hub.f1 import normalize
from miles.rollout.rm_hub.final_part import final_part
from miles.rollout.rm_hub.graders import LabelError, NothingToEnd
from miles.rollout.rm_hub.letters import find_letter, is_denied, is_error, is_refusal

_DEFAULT_LETTERS = "ABCDEFGH"
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STATED = re.compile(r"\banswer\b ?(?:is\b|:|=)", re.IGNORECASE)
_LONGEST_STATEMENT = 2000


class GpqaGrader(NothingToEnd):
    """1.0 when a response settles on the correct choice, 0.0 when on another or none; see `letters.find_letter`.

    The correct letter is `metadata["correct_letter"]`, or else the label: a letter, the number of a choice from 0, or a
    choice's text. Letters are `metadata["valid_letters"]`, or one for each of `metadata["choices"]`, or A to H. A response
    without a letter is right when its final statement has the text of the correct choice, and of no other.

    What a model thinks before its last `</think>` is not judged.
    """

    async def grade_sample(self, response: str, sample: Sample) -> float:
        """Raises LabelError when neither metadata nor label says which choice is correct."""
        question = Question(sample.label, sample.metadata)
        answer = final_part(response)
        if answer is None:
            return 0.0
        letter = find_letter(answer, question.letters)
        if letter is not None:
            return float(letter == question.correct)
        return float(question.is_stated_in_words(answer))


class Question:
    """Letters, choices, and the correct one, from a row's label and metadata. Raises LabelError."""

    def __init__(self, label: Any, metadata: dict[str, Any]) -> None:
        self.choices = _choices(metadata.get("choices"))
        self.letters = _letters(metadata.get("valid_letters"), len(self.choices))
        self.correct: str | None = self._correct_letter(label, metadata)
        """None when only the text of the correct choice is known, and no choices to find it among."""
        self.text = self._correct_text(label, metadata)
        if self.correct is None and not self.text:
            raise LabelError(
                f"the label {label!r:.80} is neither one of the letters {', '.join(self.letters)}, nor the number or "
                "text of a choice, and the metadata has no correct_letter"
            )

    def is_stated_in_words(self, answer: str) -> bool:
        """Whether the final statement, or else the last line, has the correct choice's text and no other choice's."""
        target = normalize(self.text)
        if not target or is_error(answer) or is_refusal(answer):
            return False  # an empty text would be in everything
        statement = _final_statement(answer)
        plain = f" {normalize(statement)} "
        place = plain.find(f" {target} ")
        if place < 0 or is_denied(plain, place + 1, place + 1 + len(target)):
            return False
        others = [text for choice in self.choices if (text := normalize(choice)) not in ("", target)]
        rest = plain.replace(f" {target} ", "  ")
        return not any(f" {other} " in rest for other in others)

    def _correct_letter(self, label: Any, metadata: dict[str, Any]) -> str | None:
        named = metadata.get("correct_letter")
        if named is not None:
            letter = str(named).strip().strip("().").upper()
            if letter not in self.letters or len(letter) != 1:
                raise LabelError(f"correct_letter is {named!r:.80}, and the letters are {', '.join(self.letters)}")
            return letter
        text = "" if label is None or isinstance(label, list | dict) else str(label).strip()
        if (letter := text.strip("().")) and len(letter) == 1 and letter.upper() in self.letters:
            return letter.upper()
        if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(self.choices or self.letters):
            return self.letters[label]
        wanted = normalize(text)
        same = [i for i, choice in enumerate(self.choices) if wanted and normalize(choice) == wanted]
        return self.letters[same[0]] if len(same) == 1 else None

    def _correct_text(self, label: Any, metadata: dict[str, Any]) -> str:
        named = metadata.get("answer_text")
        if isinstance(named, str) and named.strip():
            return named
        if self.correct is not None:
            place = self.letters.index(self.correct)
            return self.choices[place] if place < len(self.choices) else ""
        return label.strip() if isinstance(label, str) and not self.choices else ""


def _choices(found: Any) -> list[str]:
    """The texts of the choices: of a list, or of an object by letter, in the order of its letters."""
    if isinstance(found, dict):
        found = [found[key] for key in sorted(found, key=str)]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    return [str(choice) for choice in found] if isinstance(found, list) else []


def _letters(found: Any, num_choices: int) -> str:
    if found is None:
        return _ALPHABET[:num_choices] or _DEFAULT_LETTERS
    letters = "".join(str(letter) for letter in found).upper() if isinstance(found, str | list) else ""
    if not letters or len(set(letters)) < len(letters) or not set(letters) <= set(_ALPHABET):
        raise LabelError(f"valid_letters is {found!r:.80}; give single letters, each once")
    return letters


def _final_statement(answer: str) -> str:
    """What follows the last "answer is" up to the end of its line; the last line when there is none."""
    stated = [match.end() for match in _STATED.finditer(answer)]
    if stated:
        line = answer[stated[-1] :].lstrip().partition("\n")[0]
    else:
        line = answer.rstrip().rpartition("\n")[2]
    return line[:_LONGEST_STATEMENT]
