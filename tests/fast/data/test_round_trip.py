"""Any file, in any batches, with a save and a load anywhere: every row exactly once an epoch."""

import json
from types import SimpleNamespace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.rollout.data_source import RolloutDataSourceWithBuffer

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
BLANKS = st.lists(st.sampled_from(["", " ", "\t", "  \r"]), max_size=3)


@st.composite
def files(draw):
    """Rows, and a file of them with any line ends and blank lines."""
    texts = draw(st.lists(TEXT, min_size=1, max_size=9))
    rows = [{"input": text, "label": i, draw(TEXT): i} for i, text in enumerate(texts)]
    rows = [{**row, "input": text} for row, text in zip(rows, texts, strict=True)]
    data = "\ufeff" if draw(st.booleans()) else ""
    for row in rows:
        data += "".join(blank + "\n" for blank in draw(BLANKS))
        data += json.dumps(row, ensure_ascii=draw(st.booleans())) + draw(st.sampled_from(["\n", "\r\n", " \n"]))
    return rows, data if draw(st.booleans()) else data.rstrip()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    file=files(),
    batches=st.lists(st.tuples(st.integers(1, 6), st.booleans(), st.integers(0, 2)), min_size=1, max_size=8),
    shuffle=st.booleans(),
    tokenises=st.booleans(),
)
def test_every_row_once_an_epoch_in_any_batches_with_a_resume_anywhere(
    tmp_path_factory, make_args, file, batches, shuffle, tokenises
):
    rows, data = file
    path = tmp_path_factory.mktemp("file") / "data.jsonl"
    path.write_text(data, encoding="utf-8", newline="")
    args: SimpleNamespace = make_args(
        str(path),
        rollout_shuffle=shuffle,
        label_key="label",
        n_samples_per_prompt=1,
        loss_type="policy_loss" if tokenises else "sft_loss",
    )
    source, issued = RolloutDataSourceWithBuffer(args), {}
    for count, resumes, returned in batches:
        groups = source.get_samples(count)
        for (sample,) in groups:
            assert sample.prompt == rows[sample.label]["input"]
            assert issued.setdefault(sample.group_index, sample.label) == sample.label
        source.add_samples(groups[:returned])
        if resumes:
            state = json.loads(json.dumps(source.state_dict()))
            source = RolloutDataSourceWithBuffer(args)
            source.load_state_dict(state)
    assert sorted(issued) == list(range(len(issued)))
    labels = [issued[number] for number in range(len(issued))]
    for start in range(0, len(labels), len(rows)):
        epoch = labels[start : start + len(rows)]
        assert len(set(epoch)) == len(epoch)
