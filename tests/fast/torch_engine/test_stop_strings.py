import pytest

from miles.backends.torch_engine.stop_strings import StopMatcher

PIECES = {1: "an", 2: "s", 3: "wer", 4: "\n", 5: "DONE", 6: "x", 7: " DO"}
BYTES = {10: b"\xe2", 11: b"\x82", 12: b"\xac", 13: b"a"}


def first_match(stops: list[str], ids: list[int], pieces: dict[int, str] = PIECES) -> tuple[int, str] | None:
    matcher = StopMatcher(stops, lambda some: "".join(pieces[i] for i in some))
    for count in range(1, len(ids) + 1):
        if (found := matcher.feed(ids[:count])) is not None:
            return count, found
    return None


@pytest.mark.parametrize(
    ("stops", "ids", "expected"),
    [
        (["answer"], [6, 1, 2, 3, 6], (4, "answer")),
        (["s"], [1, 2], (2, "s")),
        (["x", "answer"], [1, 2, 3, 6], (3, "answer")),
        (["ONE", "DO"], [6, 5], (2, "DO")),
        (["DODO"], [7, 5], (2, "DODO")),
        (["ns"], [1, 4, 2], None),
        (["ssss"], [2, 2, 2, 2, 2], (4, "ssss")),
    ],
)
def test_a_stop_string_is_found_at_the_token_that_completes_it(
    stops: list[str], ids: list[int], expected: tuple[int, str] | None
) -> None:
    assert first_match(stops, ids) == expected


def test_characters_of_several_bytes_are_matched_once_they_are_complete() -> None:
    matcher = StopMatcher(["€a"], lambda some: b"".join(BYTES[i] for i in some).decode(errors="replace"))
    ids = [13, 10, 11, 12, 13]
    assert [matcher.feed(ids[: n + 1]) for n in range(5)] == [None, None, None, None, "€a"]


def test_text_that_depends_on_the_token_before_it_is_matched() -> None:
    def decode(ids: list[int]) -> str:
        return " ".join(PIECES[i] for i in ids)

    matcher = StopMatcher(["an s"], decode)
    assert [matcher.feed(ids) for ids in ([6], [6, 1], [6, 1, 2])] == [None, None, "an s"]
