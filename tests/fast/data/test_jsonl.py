import pytest

from miles.errors import DataError
from miles.utils.jsonl import read_jsonl


def error_of(path):
    with pytest.raises(DataError) as caught:
        list(read_jsonl(path))
    return caught.value


# Case C01.
def test_blank_lines_are_skipped_and_line_numbers_count_them(write):
    assert list(read_jsonl(write('{"id":1}\n\n   \r\n{"id":2}'))) == [(1, {"id": 1}), (4, {"id": 2})]


def test_a_byte_order_mark_does_not_cost_the_first_row(write):
    assert list(read_jsonl(write(b'\xef\xbb\xbf{"id":1}\n{"id":2}\n'))) == [(1, {"id": 1}), (2, {"id": 2})]


# Case C01.
def test_bad_json_stops_with_file_line_and_reason(write):
    path = write('{"id":1}\n{bad\n{"id":3}\n')
    error = error_of(path)
    assert str(error).startswith(f"{path}:2: is not JSON: ")
    assert "{bad" in str(error)
    assert "column 2" in str(error)


@pytest.mark.parametrize(
    ("text", "kind"), [("[1]", "array"), ("3", "number"), ("null", "null"), ('"x"', "string"), ("true", "boolean")]
)
def test_a_row_that_is_no_object_is_named(write, text, kind):
    error = error_of(write('{"id":1}\n' + text))
    assert error.line == 2
    assert f"holds a JSON {kind}, not an object" in str(error)


def test_text_that_is_not_utf8_is_an_error_with_its_line(write):
    assert "not UTF-8" in str(error_of(write(b'{"a":1}\n{"a":"\xff"}\n')))
    assert error_of(write(b'{"a":1}\n{"a":"\xff"}\n')).line == 2
    assert "is UTF-16" in str(error_of(write('{"a":1}'.encode("utf-16"))))


def test_a_missing_file_is_a_data_error():
    assert "No such file" in str(error_of("/nowhere/data.jsonl"))


def test_large_integers_keep_every_digit(write):
    assert next(read_jsonl(write('{"label": 9007199254740993123456789}'))) == (1, {"label": 9007199254740993123456789})


def test_line_separators_inside_strings_do_not_split_rows(write):
    assert list(read_jsonl(write('{"a":"x\u2028y"}\n'))) == [(1, {"a": "x\u2028y"})]
