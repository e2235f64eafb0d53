"""Pictures of datasets: each form of them becomes bytes at its place, and what cannot be read is told with its row."""

import base64
import http.server
import io
import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from penstock.conf.data import ColumnsConfig, DataConfig, EvaluationConfig
from penstock.conf.errors import DataError
from penstock.conf.model import FreshModelConfig
from penstock.workers.agents.adapters.agent import row_of as as_told
from penstock.workers.agents.environment import Task
from penstock.workers.fresh_model import END, IMAGE, START, character_tokenizer, fresh_processor
from penstock.workers.pictures.prompt_pictures import PromptPictures
from penstock.workers.prompts import row_pictures
from penstock.workers.prompts.data_identity import problem_of
from penstock.workers.prompts.dataset import open_dataset
from penstock.workers.prompts.dataset_row import DatasetRow
from penstock.workers.prompts.row_pictures import RowPictures
from penstock.workers.prompts.source import PromptSource
from penstock.workers.prompts.tokenization import PromptEncoder, PromptTooLong, TokenLimits


def picture(shade: int, kind: str = "PNG", size: tuple[int, int] = (4, 4)) -> bytes:
    written = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(written, format=kind)
    return written.getvalue()


RED, DARK, JPEG = picture(255), picture(100), picture(200, "JPEG")


def base64_of(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def rows_of(folder: Path, *rows: dict[str, Any], parquet: bool = False, **columns: Any) -> list[DatasetRow]:
    """Rows as they are read from a file of the folder."""
    if parquet:
        pq.write_table(pa.Table.from_pylist(list(rows)), folder / "train.parquet")
    else:
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, path = ("huggingface", folder) if parquet else ("jsonl", folder / "train.jsonl")
    given = {"prompt": "prompt", "answer": None, "pictures": "images", **columns}
    data = DataConfig(source=source, path=str(path), columns=ColumnsConfig(**given))
    dataset = open_dataset(data, EvaluationConfig(every_steps=0))
    assert dataset is not None
    return [dataset.row(index) for index in range(len(dataset))]


def row_of(folder: Path, row: dict[str, Any], **options: Any) -> DatasetRow:
    return rows_of(folder, row, **options)[0]


def asks(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "How many?"}


def test_paths_and_base64_are_read_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    (tmp_path / "b.jpg").write_bytes(JPEG)
    given = ["a.png", f"{tmp_path}/b.jpg", base64_of(DARK), str(tmp_path / "a.png"), {"path": "b.jpg"}]
    row = row_of(tmp_path, {"prompt": "How many?", "images": given, "level": 3})
    assert row.pictures == (RED, JPEG, DARK, RED, JPEG)
    assert row.prompt == "<image>" * 5 + "How many?"
    assert json.loads(row.to_json()) == {"level": 3, "prompt": row.prompt, "answer": None, "index": 0}


def test_verls_rows_of_parquet_have_their_pictures_at_the_marks(tmp_path: Path) -> None:
    """Bytes, and Hugging Face's `Image`, as its parquet files hold them."""
    said = [{"role": "user", "content": "First <image>, then <image>: which?"}]
    rows = [
        {"prompt": said, "images": [{"bytes": RED, "path": None}, {"bytes": JPEG, "path": "b.jpg"}]},
        {"prompt": [{"role": "user", "content": "No picture"}], "images": []},
        {"prompt": [{"role": "user", "content": "None"}], "images": None},
    ]
    with_two, *without = rows_of(tmp_path, *rows, parquet=True)
    assert with_two.pictures == (RED, JPEG)
    assert (with_two.prompt, list(with_two.messages)) == (said[0]["content"], said)
    assert "images" not in with_two.extra
    assert [row.pictures for row in without] == [(), ()]
    (one,) = rows_of(
        tmp_path, {"prompt": said[:0] or "One <image>", "images": {"bytes": RED, "path": None}}, parquet=True
    )
    assert one.pictures == (RED,)


def test_pictures_that_one_array_has_no_room_for_are_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{shade}?", "images": [{"bytes": picture(shade), "path": None}]} for shade in range(4)]
    for number in (0, 1):
        table = pa.Table.from_pylist(rows[2 * number :][:2])
        pq.write_table(table, tmp_path / f"train-{number:05d}-of-00002.parquet", row_group_size=1)
    columns = ColumnsConfig("prompt", None, pictures="images")
    for most in (2**31 - 1, 100):
        monkeypatch.setattr("penstock.workers.prompts.raw_rows.MOST_TOGETHER", most)
        data = DataConfig(source="huggingface", path=str(tmp_path), columns=columns)
        dataset = open_dataset(data, EvaluationConfig(every_steps=0))
        assert dataset is not None
        assert [dataset.row(index).pictures for index in range(4)] == [(picture(shade),) for shade in range(4)]


def test_parts_of_messages_take_the_columns_pictures_in_order(tmp_path: Path) -> None:
    """TRL's rows."""
    said = asks({"type": "image"}, TEXT, {"type": "image", "text": None})
    row = row_of(tmp_path, {"prompt": said, "images": [base64_of(RED), base64_of(DARK)]})
    assert row.pictures == (RED, DARK)
    assert list(row.messages) == [
        {"role": "system", "content": "Look."}, {"role": "user", "content": "<image>How many?<image>"},
    ]  # fmt: skip


def test_parts_may_hold_their_pictures(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(DARK)
    said = asks(
        TEXT,
        {"type": "image_url", "image_url": {"url": base64_of(RED)}},
        {"type": "image", "image": "a.png"},
    )
    row = row_of(tmp_path, {"prompt": said}, pictures=None)
    assert row.pictures == (RED, DARK)
    assert row.prompt == "How many?<image><image>"


def test_pictures_without_a_place_stand_before_the_users_first_text(tmp_path: Path) -> None:
    said = [{"role": "system", "content": "Look."}, *({"role": "user", "content": word} for word in ("one", "two"))]
    row = row_of(tmp_path, {"prompt": said, "images": base64_of(RED)})
    assert [message["content"] for message in row.messages] == ["Look.", "<image>one", "two"]


def test_another_format_is_written_as_png_and_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(picture(77, "GIF"))
    (found,) = row_of(tmp_path, {"prompt": "?", "images": "a.gif"}).pictures
    with Image.open(io.BytesIO(found)) as image:
        assert (image.format, image.convert("RGB").getpixel((0, 0))) == ("PNG", (77, 0, 0))


def test_pictures_that_a_function_makes_are_written_as_png(tmp_path: Path) -> None:
    (tmp_path / "shapes.py").write_text(
        "from PIL import Image\n"
        "def rows(seed):\n"
        "    yield {'prompt': '?', 'images': [Image.new('RGB', (4, 4), (255, 0, 0))]}\n"
    )
    columns = ColumnsConfig("prompt", None, pictures="images")
    data = DataConfig(source="python", path=f"{tmp_path}/shapes.py:rows", columns=columns)
    dataset = open_dataset(data, EvaluationConfig(every_steps=0))
    assert dataset is not None
    assert dataset.row(0).pictures == (RED,)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"images": ["no.png"]}, r"line 2: picture 1 cannot be read: .*No such file.*no\.png"),
        ({"images": ["memory://no.png"]}, r"line 2: picture 1 cannot be read: memory: is not fetched: http and https"),
        ({"images": ["file:///etc/passwd"]}, r"line 2: picture 1 cannot be read: file: is not fetched: http and https"),
        ({"images": ["http://169.254.169.254/a.png"]}, r"169\.254\.169\.254 is a private address, which data\.priv"),
        ({"images": [base64_of(b"text")]}, "line 2: picture 1 cannot be read: its 4 bytes are no picture"),
        ({"images": [base64_of(RED[:-20])]}, "line 2: picture 1 cannot be read: "),
        ({"images": ["data:image/png,xx"]}, "line 2: picture 1 cannot be read: .* is not in base64"),
        ({"images": [None]}, "line 2: picture 1 is nothing, where bytes, a path, a URL"),
        ({"images": [3]}, "line 2: picture 1 is int 3, where bytes, a path, a URL"),
        ({"images": [{"bytes": None, "path": None}]}, "line 2: picture 1 is nothing"),
        ({}, "line 2: no column 'images', which data.columns.pictures names"),
        ({"prompt": "<image>", "images": []}, "line 2: 1 places in the prompt .* and 0 pictures"),
        ({"prompt": "<image><image>", "images": ["a.png"]}, "line 2: 2 places in the prompt .* and 1 pictures"),
        ({"prompt": asks(TEXT, {"type": "image"}), "images": []}, "message 2, part 2: it names no picture"),
        ({"prompt": asks({"type": "image"}), "images": ["a.png"] * 2}, "line 2: 1 places in the prompt .* and 2 pict"),
        ({"prompt": asks({"type": "image", "image": "a.png"}), "images": ["a.png"]}, "1 places .* and 2 pictures"),
        ({"prompt": asks({"type": "video"}), "images": []}, "part 1: 'video' is neither a text nor a picture"),
        ({"prompt": asks({"type": "image", "image": "no"}), "images": []}, "part 1: its picture cannot be read: .*no"),
    ],
)
def test_what_cannot_be_read_is_told_with_its_row(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path, {"prompt": "fine", "images": ["a.png"]}, {"prompt": "?", **row})


def test_a_mark_is_text_where_no_pictures_are_named(tmp_path: Path) -> None:
    row = row_of(tmp_path, {"prompt": "What is <image> in HTML?", "images": ["no.png"]}, pictures=None)
    assert (row.prompt, row.pictures) == ("What is <image> in HTML?", ())


def test_the_same_question_about_another_picture_is_another_problem(tmp_path: Path) -> None:
    shown = [{"prompt": "How many?", "images": base64_of(data)} for data in (RED, DARK, RED)]
    red, dark, again = map(problem_of, rows_of(tmp_path, *shown))
    assert red == again != dark


def test_an_encoder_of_text_refuses_pictures(tmp_path: Path) -> None:
    row = row_of(tmp_path, {"prompt": "How many?", "images": base64_of(RED)})
    encoder = PromptEncoder(None, DataConfig(), TokenLimits(10, 10, ""))
    for ask in (encoder.text, encoder.messages, encoder.prompt):
        with pytest.raises(DataError, match=r"line 1: the prompt has 1 pictures, and rollout\.max_pictures=0\. Raise"):
            ask(row)


FRESH = FreshModelConfig(num_vision_layers=1)


def encoder_of_fresh(*, chat_template: bool, most: int = 2, room: int = 100) -> PromptEncoder:
    data = DataConfig(chat_template=chat_template)
    return PromptEncoder(
        character_tokenizer(FRESH), data, TokenLimits(room, room, "room"), None, fresh_processor(FRESH), most
    )


@pytest.mark.parametrize("chat_template", [True, False])
def test_the_places_of_pictures_are_expanded_once(tmp_path: Path, chat_template: bool) -> None:
    encoder, wide = encoder_of_fresh(chat_template=chat_template), picture(9, size=(56, 28))
    row = row_of(tmp_path, {"prompt": "a<image>b<image>", "images": [base64_of(wide), base64_of(RED)]})
    marked = f"{START}{IMAGE}{END}"
    assert encoder.text(row).removesuffix("\n") == f"a{marked}b{marked}"
    prompt = encoder.prompt(row)
    assert encoder.tokenizer.decode(prompt.ids).strip() == f"a{START}{IMAGE * 2}{END}b{marked}"
    assert prompt.columns() == {"prompt_ids": prompt.ids, "pictures": [wide, RED], "picture_ranges": [2, 2, 7, 1]}
    assert PromptPictures.of(prompt.columns()) == prompt.pictures == PromptPictures((wide, RED), ((2, 2), (7, 1)))


@pytest.mark.parametrize("chat_template", [True, False])
def test_a_prompt_without_pictures_has_none_and_its_marks_are_text(tmp_path: Path, chat_template: bool) -> None:
    encoder = encoder_of_fresh(chat_template=chat_template)
    prompt = encoder.prompt(row_of(tmp_path, {"prompt": "An <image>?"}, pictures=None))
    assert encoder.tokenizer.decode(prompt.ids).strip() == "An <image>?"
    assert prompt.columns() == {"prompt_ids": prompt.ids, "pictures": [], "picture_ranges": []}
    assert PromptPictures.of(prompt.columns()) is None


def test_what_a_prompt_with_pictures_may_not_have_is_told_with_its_row(tmp_path: Path) -> None:
    shown = {"prompt": "?", "images": [base64_of(RED)] * 2}
    with pytest.raises(DataError, match=r"line 1: the prompt has 2 pictures, and rollout\.max_pictures=1"):
        encoder_of_fresh(chat_template=True, most=1).prompt(row_of(tmp_path, shown))
    with pytest.raises(PromptTooLong, match="the prompt has 8 tokens, more than"):
        encoder_of_fresh(chat_template=True, room=7).prompt(row_of(tmp_path, shown))
    with pytest.raises(DataError, match=r"line 1: 2 placeholders .* for 1 pictures"):
        encoder_of_fresh(chat_template=True).prompt(
            row_of(tmp_path, {"prompt": f"<image>{IMAGE}", "images": [base64_of(RED)]})
        )


def test_the_environment_gets_the_conversation_with_its_pictures(tmp_path: Path) -> None:
    shown = asks({"type": "image"}, "Which of ", {"type": "image"}, "?")
    row_of(tmp_path, {"prompt": shown, "images": [base64_of(RED), base64_of(DARK)]})
    columns = ColumnsConfig(prompt="prompt", answer=None, pictures="images")
    data = DataConfig(path=str(tmp_path / "train.jsonl"), columns=columns)
    dataset = open_dataset(data, EvaluationConfig(every_steps=0))
    assert dataset is not None
    (group,) = PromptSource(dataset, encoder_of_fresh(chat_template=True), rows_are="tasks").next_groups(1)
    assert group["pictures"] == [RED, DARK]
    task = Task.from_json(group["task"], group["pictures"])
    assert [message["content"] for message in task.messages] == ["Look.", [
        {"type": "image", "image": RED}, {"type": "text", "text": "Which of "},
        {"type": "image", "image": DARK}, {"type": "text", "text": "?"},
    ]]  # fmt: skip
    told = as_told(task)["messages"][1]["content"]
    assert told[0] == {"type": "image_url", "image_url": {"url": base64_of(RED)}}
    assert json.loads(json.dumps(told)) == told


class Pictures(http.server.BaseHTTPRequestHandler):
    """Serves a picture, one that is too large, one that never comes, and a redirect to the first."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("location", "/a.png")
        self.end_headers()
        if self.path == "/never":
            self.rfile.read()
        elif self.path != "/moved":
            self.wfile.write(RED if self.path == "/a.png" else bytes(2**16))

    def log_message(self, format: str, *arguments: Any) -> None: ...


def test_urls_of_rows_are_fetched_within_bounds_and_not_from_private_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_pictures, "MOST_FETCHED_BYTES", 2**15)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"http://127.0.0.1:{server.server_port}"

        def read(path: str, **allowed: bool) -> tuple[bytes, ...]:
            row = RowPictures("line 1", tmp_path, [f"{place}{path}"], **allowed)
            return row.placed(["?"])[1]

        assert read("/a.png", private_urls=True) == read("/moved", private_urls=True) == (RED,)
        with pytest.raises(DataError, match=r"127\.0\.0\.1 is a private address"):
            read("/a.png")
        with pytest.raises(DataError, match="more than 32,768 bytes"):
            read("/large", private_urls=True)
        monkeypatch.setattr(row_pictures, "FETCH_S", 0.1)
        with pytest.raises(DataError, match=r"did not come within 0\.1 s"):
            read("/never", private_urls=True)
        server.shutdown()
