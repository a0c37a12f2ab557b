import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.errors import DataError
from miles.rollout.dataset import line_index
from miles.rollout.dataset.line_index import LineIndex
from miles.rollout.dataset.tables import JsonlTable


@pytest.fixture
def index(write):
    fds: list[int] = []

    def index(data: bytes | str) -> LineIndex:
        path = write(data)
        fds.append(os.open(path, os.O_RDONLY))
        return LineIndex(path, fds[-1])

    yield index
    for fd in fds:
        os.close(fd)


def rows_of(index: LineIndex) -> list[tuple[int, bytes]]:
    return [(index.line(row), index.read(row).strip()) for row in range(len(index))]


def naive(data: bytes) -> list[tuple[int, bytes]]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


LINES = st.lists(
    st.sampled_from([b"", b" ", b"\r", b"\t\r", b"  \x0b", b"{}", b" {} ", b'{"a": "\xe2\x80\xa8"}', b"xyz\r"])
)


@given(lines=LINES, end=st.sampled_from([b"", b"\n", b"\r\n"]), mark=st.booleans(), chunk=st.integers(1, 9))
def test_rows_are_those_of_a_plain_reading_whatever_the_chunks(tmp_path_factory, lines, end, mark, chunk):
    data = (b"\xef\xbb\xbf" if mark else b"") + b"\n".join(lines) + end
    path = tmp_path_factory.mktemp("index") / "data.jsonl"
    path.write_bytes(data)
    before, line_index.CHUNK = line_index.CHUNK, chunk
    fd = os.open(path, os.O_RDONLY)
    try:
        assert rows_of(LineIndex(str(path), fd)) == naive(data)
    finally:
        line_index.CHUNK = before
        os.close(fd)


def test_the_first_row_comes_without_searching_the_file(index):
    found = index(b'{"a": 1}\n' * 500_000)  # 4.5 MB
    assert found.has(0)
    assert json.loads(found.read(0)) == {"a": 1}
    assert not found.complete
    assert len(found) == 500_000
    assert found.complete
    assert not found.has(500_000)


def test_a_line_of_fifty_megabytes_is_a_row(index):
    found = index(b'{"a": 1}\n{"a": "' + b"x" * 50_000_000 + b'"}\n{"a": 3}\n')
    assert len(found) == 3
    assert len(json.loads(found.read(1))["a"]) == 50_000_000
    assert (found.line(2), json.loads(found.read(2))) == (3, {"a": 3})


def test_an_empty_or_blank_file_has_no_rows(index):
    for data in (b"", b"\n", b" \r\n\t\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"):
        assert len(index(data)) == 0
        assert not index(data).has(0)


def test_another_encoding_is_refused(index):
    with pytest.raises(DataError, match="is UTF-16, not UTF-8"):
        index('{"a": 1}'.encode("utf-16"))


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error_with_its_line(write):
    path = write([{"a": i} for i in range(1000)])
    table = JsonlTable(path)
    assert len(table) == 1000
    os.truncate(path, 100)
    assert table.row(3) == {"a": 3}
    with pytest.raises(DataError, match=r"jsonl:900: is not JSON"):
        table.row(899)


def test_unicode_keys_and_line_separators_inside_strings(write):
    rows = [{"ключ": "a\u2028b\u0085c", "日本": {"é": "\x1c"}}, {"🙂": 1}]
    table = JsonlTable(write("".join(json.dumps(row, ensure_ascii=False) + "\r\n" for row in rows)))
    assert [table.row(i) for i in range(len(table))] == rows
