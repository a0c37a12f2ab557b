import base64
import io
import json

import pytest
from PIL import Image

from miles.errors import DataError
from miles.rollout.data_source import RolloutDataSourceWithBuffer
from miles.rollout.dataset.media import media_of, open_image, read_media
from miles.rollout.prompts import PromptFormat, load_prompts

KEYS = {"image": "images"}
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text if p.type == 'text' else '<' ~ p.type ~ '>' }}{% endfor %}{% endif %}{% endfor %}"
)


def load(path, tokenizer=None, keys=KEYS, **format):
    return load_prompts(path, PromptFormat(input_key="input", multimodal_keys=keys, **format), tokenizer).rows


def png(color):
    data = io.BytesIO()
    Image.new("RGB", (2, 1), color).save(data, "PNG")
    return data.getvalue()


def test_placeholders_become_typed_parts_in_order_and_no_file_is_opened(write, tmp_path):
    path = write([{"input": "left: <image> right: <image>!", "images": ["a.png", "/far/b.png"]}])
    (row,) = load(path)
    assert row.prompt == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "left: "},
                {"type": "image", "image": str(tmp_path / "a.png")},
                {"type": "text", "text": " right: "},
                {"type": "image", "image": "/far/b.png"},
                {"type": "text", "text": "!"},
            ],
        }
    ]
    assert [part["image"] for part in media_of(row.prompt)] == [str(tmp_path / "a.png"), "/far/b.png"]


def test_messages_keep_their_other_keys_and_kinds_are_counted_apart(write, tmp_path):
    messages = [
        {"role": "system", "content": "a < b and <b>"},
        {"role": "user", "name": "me", "content": [{"type": "image"}, {"type": "text", "text": "<video>see <audio>"}]},
    ]
    path = write([{"input": messages, "images": "x.png", "clip": ["y.mp4"]}])
    (row,) = load(path, keys={"image": "images", "video": "clip"})
    assert row.prompt == [
        messages[0],
        {
            "role": "user",
            "name": "me",
            "content": [
                {"type": "image", "image": str(tmp_path / "x.png")},
                {"type": "video", "video": str(tmp_path / "y.mp4")},
                {"type": "text", "text": "see <audio>"},  # no key was given for sound, so it is text
            ],
        },
    ]


def test_rows_without_media_stay_as_they_are(write):
    rows = load(write([{"input": "hi"}, {"input": "hi", "images": None}, {"input": "hi", "images": []}]))
    assert [row.prompt for row in rows] == ["hi"] * 3
    assert load(write([{"input": "an <image>"}]), keys={})[0].prompt == "an <image>"


@pytest.mark.parametrize(
    ("text", "images", "problem"),
    [
        ("<image>", [], "the prompt has 1 <image> and 'images' has 0"),
        ("<image>", ["a", "b"], "the prompt has 1 <image> and 'images' has 2"),
        ("none", ["a"], "the prompt has 0 <image> and 'images' has 1"),
        ("<image>", [3], "'images' holds int at position 0, not a reference to a image"),
        ("<image>", ["https://x.org/a.png"], "'images' holds the address https://x.org/a.png"),
    ],
)
def test_what_does_not_fit_is_an_error_with_file_and_line(write, text, images, problem):
    path = write([{"input": "hi"}, {"input": text, "images": images}])
    with pytest.raises(DataError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:2: {problem}")


def test_references_are_opened_when_asked_whatever_they_are(write, write_parquet, tmp_path):
    (tmp_path / "red.png").write_bytes(png("red"))
    inline = "data:image/png;base64," + base64.b64encode(png("lime")).decode()
    (row,) = load(write([{"input": "<image><image>", "images": ["red.png", inline]}]))
    colors = [open_image(part["image"]).getpixel((0, 0)) for part in media_of(row.prompt)]
    assert colors == [(255, 0, 0), (0, 255, 0)]
    stored = [{"input": "<image>", "images": [{"bytes": png(color), "path": None}]} for color in ("red", "blue")]
    last = load(write_parquet(stored) + "@[1:]")[0]
    (part,) = media_of(json.loads(json.dumps(last.prompt)))
    assert open_image(part["image"]).getpixel((0, 0)) == (0, 0, 255)
    raw = load(write_parquet([{"input": "<image>", "images": png("blue")}], "raw.parquet"))
    assert read_media(media_of(raw[0].prompt)[0]["image"]) == png("blue")


def test_a_reference_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(DataError, match=r"gone.png: cannot be read: No such file"):
        open_image(str(tmp_path / "gone.png"))
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(DataError, match=r"text.png: is not an image"):
        open_image(str(tmp_path / "text.png"))
    with pytest.raises(DataError, match="is not base64"):
        read_media("data:image/png;base64,???")


def test_a_prompt_with_images_stays_messages_when_the_template_is_applied(write, make_args, tokenizer, tmp_path):
    template = tmp_path / "media.jinja"
    template.write_text(TEMPLATE)
    path = write([{"input": "see <image> now", "images": ["a.png"]}, {"input": "hi"}])
    args = make_args(
        path, multimodal_keys=KEYS, apply_chat_template=True, chat_template_path=str(template), n_samples_per_prompt=1
    )
    source = RolloutDataSourceWithBuffer(args)
    (first,), (second,) = source.get_samples(2)
    assert [part["type"] for part in first.prompt[0]["content"]] == ["text", "image", "text"]
    assert first.tokens == tokenizer("see <image> now", add_special_tokens=False)["input_ids"]
    assert second.prompt == "hi"
    source.add_samples([[first]])
    resumed = RolloutDataSourceWithBuffer(args)
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert resumed.get_samples(1)[0][0].prompt == first.prompt
