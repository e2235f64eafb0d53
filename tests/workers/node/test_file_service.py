"""Files by content: a node that has them uses them, another gets a copy that was checked."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.conf.errors import ResourceError
from penstock.network.connection import new_token
from penstock.workers.node.node_agent import NodeAgent
from penstock.workers.node.node_transfers import FileSet
from penstock.workers.runtime.url_files import SavedFile

HOST = "127.0.0.1"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "sub").mkdir(parents=True)
    (directory / "weights").write_bytes(bytes(range(256)) * 10_000)
    (directory / "sub" / "config.json").write_text("{}")
    (directory / "empty").write_text("")
    return directory


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[tuple[NodeAgent, NodeAgent]]:
    token = new_token()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = NodeAgent(tmp_path / "penstock-a", "a", HOST, token, files_dir=str(tmp_path / "a"))
    second = NodeAgent(tmp_path / "penstock-b", "b", HOST, token, files_dir=str(tmp_path / "b"))
    yield first, second
    first.close()
    second.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.real
def test_a_node_without_the_files_gets_a_copy(agents: tuple[NodeAgent, NodeAgent], model: Path, tmp_path: Path) -> None:
    has, lacks = agents
    files = FileSet.of_directory(model)
    has.files.offer(files, model)
    place = Path(lacks.files.obtain(files, tmp_path / "elsewhere", has.facts.address))
    assert place != model
    assert contents(place) == contents(model)
    again = lacks.files.obtain(files, tmp_path / "elsewhere", has.facts.address)
    assert Path(again) == place
    lacks.close()
    assert not place.exists()  # copies go with the run
    assert contents(model)


@pytest.mark.real
def test_a_node_with_the_same_files_at_the_same_path_uses_them(
    agents: tuple[NodeAgent, NodeAgent], model: Path
) -> None:
    has, shares = agents
    (model / "of somebody else").write_text("not asked for")
    files = FileSet.of_directory(model)
    (model / "of somebody else").unlink()
    wanted = FileSet(tuple(file for file in files.files if file.name != "of somebody else"))
    assert shares.files.obtain(wanted, model, has.facts.address) == str(model)


@pytest.mark.real
def test_the_same_path_with_other_content_is_not_used(
    agents: tuple[NodeAgent, NodeAgent], model: Path, tmp_path: Path
) -> None:
    has, differs = agents
    files = FileSet.of_directory(model)
    has.files.offer(files, model)
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    for name, content in contents(model).items():
        (other / name).write_bytes(content[::-1] if name == "weights" else content)
    place = Path(differs.files.obtain(files, other, has.facts.address))
    assert place != other
    assert contents(place) == contents(model)


@pytest.mark.real
def test_a_file_that_changes_meanwhile_is_refused(
    agents: tuple[NodeAgent, NodeAgent], model: Path, tmp_path: Path
) -> None:
    has, lacks = agents
    files = FileSet.of_directory(model)
    has.files.offer(files, model)
    (model / "weights").write_bytes(bytes(2_560_000))
    with pytest.raises(ResourceError, match="weights arrived damaged"):
        lacks.files.obtain(files, tmp_path / "elsewhere", has.facts.address)
    (model / "weights").unlink()
    with pytest.raises(ResourceError, match="weights is not what it was: FileNotFoundError"):
        lacks.files.obtain(files, tmp_path / "elsewhere", has.facts.address)


@pytest.mark.real
def test_a_source_that_is_gone_is_named(agents: tuple[NodeAgent, NodeAgent], model: Path, tmp_path: Path) -> None:
    has, lacks = agents
    address = has.facts.address
    has.close()
    with pytest.raises(ResourceError, match=r"cluster\.files_dir"):
        lacks.files.obtain(FileSet.of_directory(model), tmp_path / "elsewhere", address)


@pytest.mark.real
def test_what_another_node_has_written_is_collected_and_goes_there(
    agents: tuple[NodeAgent, NodeAgent], model: Path, tmp_path: Path
) -> None:
    wrote, collects = agents
    target = tmp_path / "target"
    target.mkdir()
    (target / "of another node").write_text("stays")
    scratch = wrote.files.scratch()
    model.rename(scratch / "model")
    files = FileSet.of_directory(scratch)
    wrote.files.offer(files, scratch)
    collects.files.collect(files, target, wrote.facts.address)
    expected = contents(scratch)
    wrote.files.discard(scratch)
    assert contents(target) == expected | {"of another node": b"stays"}
    assert not scratch.exists()


@pytest.mark.real
def test_a_name_that_leads_out_of_its_directory_is_refused(agents: tuple[NodeAgent, NodeAgent], tmp_path: Path) -> None:
    has, lacks = agents
    place = tmp_path / "out" / "deep"
    place.mkdir(parents=True)
    (place.parent / "loose").write_bytes(b"x")
    files = FileSet((SavedFile.of_bytes("../loose", b"x"),))
    has.files.offer(files, place)
    with pytest.raises(ResourceError, match=r"'../loose' is no name of a file below"):
        lacks.files.collect(files, tmp_path / "target" / "deep", has.facts.address)
    assert not (tmp_path / "target" / "loose").exists()


def test_code_is_a_file_with_its_neighbours_and_packages(tmp_path: Path) -> None:
    taken = "helper.py", "package/__init__.py", "package/deep/part.py", "rewards.py"
    for name in (*taken, "data.bin", "plain/other.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    files = FileSet.of_code(tmp_path / "rewards.py")
    assert [file.name for file in files.files] == list(taken)


def test_a_model_is_sent_without_what_lies_beside_it(tmp_path: Path) -> None:
    taken = "chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"
    for name in (*taken, ".git/lfs/big", "checkpoint-5/model.safetensors", "onnx/model.onnx", "train.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "vocab.pipe")
    (tmp_path / "vocab.txt").symlink_to(tmp_path / "gone")
    assert [file.name for file in FileSet.of_model(tmp_path).files] == list(taken)


def test_equal_content_has_an_equal_address(model: Path, tmp_path: Path) -> None:
    first = FileSet.of_directory(model)
    model.rename(tmp_path / "moved")
    assert FileSet.of_directory(tmp_path / "moved").address == first.address
    (tmp_path / "moved" / "empty").write_text("x")
    assert FileSet.of_directory(tmp_path / "moved").address != first.address
