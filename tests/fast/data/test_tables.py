import json
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from miles.errors import DataError
from miles.rollout.dataset import fingerprint, tables
from miles.rollout.dataset.tables import open_part
from miles.rollout.prompts import PromptFormat, load_prompts


def rows_of(part):
    return [part.row(i) for i in range(len(part))]


# Case C09.
def test_parquet_renders_tools_as_jsonl_does(write, write_parquet, tokenizer):
    hi = [{"role": "user", "content": "hi"}]
    rows = [
        {"input": hi, "tools": [{"function": {"name": "f", "parameters": {"a": {"type": "int"}}}}]},
        {"input": hi, "tools": [{"function": {"name": "g", "parameters": {"b": {"type": "str"}}}}]},
    ]
    format = PromptFormat(input_key="input", tool_key="tools", apply_chat_template=True)
    texts = [
        [row.prompt for row in load_prompts(path, format, tokenizer).rows]
        for path in (write(rows), write_parquet(rows))
    ]
    assert texts[0] == texts[1]
    assert "null" not in texts[1][0]
    explicit = [{"input": hi, "tools": [{"function": {"name": "f", "default": None}}]}]
    assert '"default": null' in str(load_prompts(write(explicit), format, tokenizer).rows[0].prompt)


def test_parquet_rows_have_the_same_values_in_any_order_and_however_little_is_kept(write_parquet, monkeypatch):
    rows = [{"input": f"p{i}", "label": i, "metadata": {"k": [i, None]}} for i in range(7)]
    part = open_part(write_parquet(rows, group=3))
    assert rows_of(part) == rows
    monkeypatch.setattr(tables, "ARROW_BYTES", 0)
    assert [part.row(i) for i in (6, 0, 5, 1, 3)] == [rows[i] for i in (6, 0, 5, 1, 3)]
    assert part.line(6) == 7


def test_parquet_decodes_a_row_group_when_a_row_of_it_is_asked_for(write_parquet, monkeypatch):
    part = open_part(write_parquet([{"input": f"p{i}"} for i in range(10)], group=2))
    asked: list[int] = []
    read = part.table._file.read_row_group
    monkeypatch.setattr(
        part.table, "_file", type("File", (), {"read_row_group": lambda _, n: (asked.append(n), read(n))[1]})()
    )
    assert [part.row(i)["input"] for i in (4, 5, 9)] == ["p4", "p5", "p9"]
    assert asked == [2, 4]


def test_a_label_of_null_stays_and_values_json_lacks_become_text(write_parquet):
    rows = [{"label": None, "n": 2**53 + 1, "d": Decimal("0.10"), "t": date(2026, 1, 2)}, {"label": "x"}]
    found = rows_of(open_part(write_parquet(rows)))
    assert found[0] == {"label": None, "n": 2**53 + 1, "d": "0.10", "t": "2026-01-02"}
    json.dumps(found)


def test_what_is_no_parquet_file_is_a_data_error(write, write_parquet):
    with pytest.raises(DataError, match=r"data.parquet: is not a Parquet file"):
        open_part(write("{}", "data.parquet"))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_part("/nowhere/data.parquet")
    path = write_parquet([{"input": "a" * 100} for _ in range(4)])
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:4] + b"\xff" * 56 + data[60:])
    with pytest.raises(DataError, match=r"row group 0 cannot be read"):
        open_part(path).row(0)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    "text",
    ["[:]", "[2:5]", "[-3:]", "[:-4]", "[-5:-2]", "[3:]", "[:99]", "[-99:3]", "[1:-1]", "[0:0]", "[5:2]", "[20:]"],
)
def test_slices_are_pythons(write, write_parquet, kind, text):
    rows = [{"input": str(i)} for i in range(9)]
    path = write(rows) if kind == "jsonl" else write_parquet(rows, group=4)
    start, stop = (int(x) if x else None for x in text[1:-1].split(":"))
    expected = rows[start:stop]
    if not expected:
        with pytest.raises(DataError, match="takes none of the 9 rows"):
            open_part(f"{path}@{text}")
        return
    part = open_part(f"{path}@{text}")
    assert rows_of(part) == expected
    assert [part.has(i) for i in range(10)] == [i < len(expected) for i in range(10)]
    assert part.line(0) == 1 + rows.index(expected[0])


def test_a_file_is_known_by_its_whole_contents_and_a_large_one_by_samples(write, monkeypatch):
    def digest(data):
        return open_part(write(data)).table.digest

    rows = [{"input": "x" * 50, "n": i} for i in range(2000)]
    changed = [{**row, "input": "y" + "x" * 49} if row["n"] == 1000 else row for row in rows]
    assert digest(rows) == digest(rows) != digest(changed)
    for name, value in (("WHOLE", 1000), ("EDGE", 500), ("BLOCK", 10), ("BLOCKS", 4)):
        monkeypatch.setattr(fingerprint, name, value)
    assert digest(rows) == digest(changed)  # between the samples: not seen, as documented
    assert digest(rows) != digest([{**rows[0], "input": "z" * 50}, *rows[1:]])
    assert digest(rows) != digest([*rows[:-1], {**rows[-1], "input": "z" * 50}])
