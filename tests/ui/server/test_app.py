"""What the page is answered, and who is not."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from penstock.conf.model import FreshModelConfig
from penstock.ui.app import STATIC, make_app
from penstock.workers.fresh_model import build_fresh_model
from tests.ui.made_runs import HERE, make_run, steps, write_pictures, write_samples

LOCAL = "http://localhost:8420"
SMALL = FreshModelConfig(num_layers=1, hidden_size=16, intermediate_size=16, num_heads=2, num_kv_heads=1)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    make_run(tmp_path / "one", "start", "end", metrics=steps(30), config="max_staleness: 1\nseed: 1\n")
    make_run(tmp_path / "two", "start", metrics=steps(5), holder=HERE, config="max_staleness: 1\nseed: 2\n")
    return tmp_path


@pytest.fixture
def page(place: Path) -> Iterator[TestClient]:
    with TestClient(make_app(place), base_url=LOCAL) as client:
        yield client


def test_the_page_and_its_files_are_there_and_come_from_nowhere_else(page: TestClient) -> None:
    answer = page.get("/")
    assert "Penstock" in answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text
    assert "https://" not in answer.text
    for file in ("main.js", "style.css", "pages/run.js", "vendor/uPlot.iife.min.js"):
        assert page.get(f"/static/{file}").status_code == 200


def test_the_page_names_all_its_modules_so_that_none_waits_for_another(page: TestClient) -> None:
    """A new module needs a line in index.html."""
    named = set(re.findall(r'rel="modulepreload" href="/static/(.*?)"', page.get("/").text))
    there = {file.relative_to(STATIC).as_posix() for file in STATIC.rglob("*.js") if file.parent.name != "vendor"}
    assert named == there - {"main.js", "report.js"}


def test_a_browser_asks_whether_its_copy_of_the_page_is_still_the_same(page: TestClient) -> None:
    assert page.get("/static/main.js").headers["cache-control"] == "no-cache"


def test_runs_are_listed_and_told_one_by_one(page: TestClient) -> None:
    lines = {line["id"]: line for line in page.get("/api/runs").json()}
    assert [(name, line["state"], line["step"]) for name, line in sorted(lines.items())] == [
        ("one", "finished", 30), ("two", "running", 5),
    ]  # fmt: skip
    run = page.get("/api/run", params={"run": "one"}).json()
    assert [chart["name"] for chart in run["charts"]] == ["reward", "accuracy"]
    assert run["line"]["accuracy"] == 0.25
    assert [event["kind"] for event in run["events"]] == ["start", "end"]


def test_a_run_is_told_in_short_and_what_happened_is_marked(page: TestClient, place: Path) -> None:
    with (place / "one" / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01T00:01:00.000Z", "kind": "checkpoint", "step": 7}\n')
    run = page.get("/api/run", params={"run": "one"}).json()
    cards = {card["label"]: card for card in run["cards"]}
    assert (cards["Mean reward"]["value"], cards["Mean reward"]["good"]) == ("0.200 → 2.900", True)
    assert cards["Wall time"]["value"] == "1:00"
    assert run["marks"] == [{"step": 7, "text": "checkpoint", "level": "note", "until": None}]


def test_series_are_as_fine_as_was_asked_for(page: TestClient) -> None:
    def asked(**parameters: Any) -> Any:
        return page.get("/api/series", params={"run": "one", "key": "reward/mean", **parameters}).json()["reward/mean"]

    assert asked()["mean"] == [step / 10 for step in range(1, 31)]
    few = asked(points=3)
    assert (few["steps"], few["high"]) == ([10, 20, 30], [1.0, 2.0, 3.0])
    assert few["low"] == [0.1, 1.1, 2.1]
    assert asked(first=4, last=6)["steps"] == [4, 5, 6]


def test_several_runs_are_compared_by_what_differs(page: TestClient) -> None:
    found = page.get("/api/compare", params={"run": ["one", "two"]}).json()
    assert found["differing"] == {"seed": {"one": 1, "two": 2}}
    assert set(found["runs"]) == {"one", "two"}


def test_samples_are_found_and_one_is_told_token_by_token(page: TestClient, place: Path) -> None:
    write_samples(place / "one" / "samples", 7, [{"group": 3, "reward": 0.0}, {"group": 4, "reward": 1.0, "tokens": 2}])
    build_fresh_model(place / "one" / "model", SMALL, seed=0)
    found = page.get("/api/samples", params={"run": "one", "least_reward": "0.5"}).json()
    assert (found["total"], found["known"], found["files"], found["rows"][0]["group"]) == (1, 1, 1, 4)
    sample = page.get("/api/sample", params={"run": "one", "step": 7, "place": 1}).json()
    assert (sample["reward"], len(sample["token_texts"]), sample["response_ids"]) == (1.0, 2, [0, 1])
    assert page.get("/api/sample", params={"run": "one", "step": 8, "place": 0}).status_code == 404
    assert page.get("/api/samples", params={"run": "one", "sort": "mood"}).status_code == 400
    assert page.get("/api/samples", params={"run": "two"}).json()["files"] == 0


def test_pictures_are_handed_out_as_they_are_and_need_not_be_asked_for_again(page: TestClient, place: Path) -> None:
    data = b"\x89PNG" + b"<script>" * 1000
    png, jpg = write_pictures(place / "one", data, b"\xff\xd8 photo")
    write_samples(place / "one" / "samples", 7, [{"group": 3, "reward": 0.0, "pictures": [png, None, jpg]}])
    assert page.get("/api/sample", params={"run": "one", "step": 7, "place": 0}).json()["pictures"] == [png, None, jpg]
    answer = page.get("/picture", params={"run": "one", "name": png}, headers={"accept-encoding": "gzip"})
    assert (answer.content, answer.headers["content-type"]) == (data, "image/png")
    assert answer.headers["content-encoding"] == "identity"
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert page.get("/picture", params={"run": "one", "name": jpg}).headers["content-type"] == "image/jpeg"
    assert page.get("/picture", params={"run": "two", "name": png}).status_code == 404
    assert page.get("/picture", params={"run": "none", "name": png}).status_code == 404


@pytest.mark.parametrize("name", ["", "../config.yaml", "../pictures/{}", "/etc/passwd", "{}.png", "\x00", "é" * 9000])
def test_no_other_file_is_handed_out_as_a_picture(page: TestClient, place: Path, name: str) -> None:
    (found,) = write_pictures(place / "one", b"\x89PNG mine")
    answer = page.get("/picture", params={"run": "one", "name": name.format(found)})
    assert (answer.status_code, "mine" in answer.text) == (404, False)


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_a_picture_that_is_a_link_is_not_followed(page: TestClient, place: Path, linked: str) -> None:
    (name,) = write_pictures(place / "two", b"\x89PNG elsewhere")
    if linked == "folder":
        (place / "one" / "pictures").symlink_to(place / "two" / "pictures")
    else:
        (place / "one" / "pictures").mkdir()
        (place / "one" / "pictures" / name).symlink_to(place / "two" / "pictures" / name)
    answer = page.get("/picture", params={"run": "one", "name": name})
    assert (answer.status_code, b"elsewhere" in answer.content) == (503, False)


@pytest.mark.parametrize("run", ["../..", "/etc", "nothing", "one/../../x", "\x00", "a" * 5000])
def test_what_is_no_run_below_the_place_is_not_told(page: TestClient, run: str) -> None:
    answer = page.get("/api/run", params={"run": run})
    assert answer.status_code in (400, 404)
    assert len(answer.json()["error"]) < 2000


def test_numbers_that_are_none_are_refused(page: TestClient) -> None:
    assert page.get("/api/series", params={"run": "one", "key": "a", "points": "many"}).status_code == 400


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8420", ""])
def test_a_page_of_another_name_cannot_have_a_browser_read_it(page: TestClient, host: str) -> None:
    answer = page.get("/api/runs", headers={"host": host})
    assert answer.status_code == 403
    assert "sums" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:9", "[::1]:9", "localhost"])
def test_names_of_this_machine_are_let_in(page: TestClient, host: str) -> None:
    assert page.get("/api/runs", headers={"host": host}).status_code == 200


def test_with_a_key_its_holders_come_in_from_anywhere_and_nobody_else(place: Path) -> None:
    with TestClient(make_app(place, "secret"), base_url="http://gpu-1:8420") as client:
        assert client.get("/api/runs").status_code == 401
        assert client.get("/picture?run=one&name=x.png").status_code == 401
        assert client.get("/?key=wrong").status_code == 401
        assert client.get("/api/runs", headers={"authorization": "Bearer secret"}).status_code == 200
        first = client.get("/?key=secret&tab=1", follow_redirects=False)
        assert (first.status_code, first.headers["location"]) == (303, "/?tab=1")
        assert "httponly" in first.headers["set-cookie"].lower()
        assert client.get("/api/runs").status_code == 200
