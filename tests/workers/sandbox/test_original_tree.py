"""Original trees: unpacked once, shared, removed by the last user, and no way out of their directory."""

import io
import os
import random
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.sandbox import original_tree
from penstock.workers.sandbox.original_tree import OriginalTree, key_of


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trees are unpacked."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(original_tree.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    return tmp_path / "temporary" / f"penstock-trees-{os.geteuid()}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "below").mkdir(parents=True)
    (source / "below" / "file").write_text("text")
    (source / "program").write_text("#!/bin/sh\n")
    (source / "program").chmod(0o4755)
    (source / "link").symlink_to("below/file")
    os.link(source / "below" / "file", source / "hard")
    os.mkfifo(source / "pipe")
    return source


def archive(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as file:
        for member in members:
            file.addfile(member, io.BytesIO(b"x" * member.size))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, **facts: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in facts.items():
        setattr(info, key, value)
    return info


def test_a_directory_is_copied_without_links_to_it_and_special_files(source: Path) -> None:
    tree = OriginalTree.of(source, None)
    assert sorted(os.listdir(tree.path)) == ["below", "hard", "link", "program"]
    assert (tree.path / "below" / "file").read_text() == "text"
    assert os.readlink(tree.path / "link") == "below/file"
    assert stat.S_IMODE((tree.path / "program").stat().st_mode) == 0o755
    for name in ("below/file", "hard"):
        assert (tree.path / name).stat().st_nlink == 1
        assert (tree.path / name).stat().st_ino != (source / name).stat().st_ino
    tree.close()


def test_users_share_a_tree_and_the_last_one_removes_it(source: Path, base: Path) -> None:
    first, second = OriginalTree.of(source, None), OriginalTree.of(source, None)
    assert first.path == second.path
    (source / "new").touch()
    changed = OriginalTree.of(source, None)
    assert changed.path != first.path
    first.close()
    first.close()
    assert second.path.exists()
    second.close()
    assert not second.path.exists()
    assert changed.path.exists()
    changed.close()
    assert os.listdir(base) == []


def test_what_a_killed_user_left_is_removed_by_the_next(source: Path, base: Path) -> None:
    base.mkdir(parents=True)
    for name in ("dead", "dead.part"):
        (base / name / "tree").mkdir(parents=True)
    (base / "dead.lock").touch()
    tree = OriginalTree.of(source, None)
    assert sorted(os.listdir(base)) == [f"{key_of(source)}", f"{key_of(source)}.lock"]
    tree.close()


def test_archives_are_unpacked(tmp_path: Path) -> None:
    plain = archive(tmp_path / "a.tar", member("one", size=3), member("run", size=1, mode=0o6755))
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as file:
        file.writestr("one", "xxx")
    for path in (plain, tmp_path / "b.zip"):
        tree = OriginalTree.of(path, None)
        assert (tree.path / "one").read_bytes() == b"xxx"
        tree.close()
    tree = OriginalTree.of(plain, None)
    assert stat.S_IMODE((tree.path / "run").stat().st_mode) == 0o755
    tree.close()


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_an_archive_whose_end_is_missing_or_changed_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.tar.{suffix}"
    with tarfile.open(path, f"w:{suffix}") as file:
        text = "".join(random.Random(5).choices("0123456789", k=200_000)).encode()
        file.addfile(member("one", size=len(text)), io.BytesIO(text))
    content = path.read_bytes()
    for broken in (content[:50_000], content[:1000] + bytes(40_000) + content[41_000:]):
        path.write_bytes(broken)
        with pytest.raises(ConfigError, match="cannot be unpacked"):
            OriginalTree.of(path, None)


@pytest.mark.parametrize(
    "members",
    [
        [member("../out", size=1)],
        [member("a/../../out", size=1)],
        [member("way", tarfile.SYMTYPE, linkname=".."), member("way/out", size=1)],
        [member("way", tarfile.SYMTYPE, linkname="/tmp"), member("way/penstock-out", size=1)],
        [member("hard", tarfile.LNKTYPE, linkname="../../../outside")],
    ],
)
def test_an_archive_that_leads_out_is_refused(tmp_path: Path, base: Path, members: list[tarfile.TarInfo]) -> None:
    (tmp_path / "temporary" / "outside").write_text("outside")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        OriginalTree.of(archive(tmp_path / "bad.tar", *members), None)
    assert not list(tmp_path.rglob("*out"))
    assert not Path("/tmp/penstock-out").exists()
    assert [name for name in os.listdir(base) if not name.endswith(".lock")] == []


def test_devices_of_an_archive_are_left_out(tmp_path: Path) -> None:
    tree = OriginalTree.of(archive(tmp_path / "a.tar", member("null", tarfile.CHRTYPE), member("one", size=1)), None)
    assert os.listdir(tree.path) == ["one"]
    tree.close()


def test_a_directory_that_others_may_write_to_is_not_used(source: Path, base: Path) -> None:
    base.mkdir(parents=True)
    base.chmod(0o777)
    with pytest.raises(ConfigError, match="only this user may write to"):
        OriginalTree.of(source, None)
    base.rmdir()
    base.symlink_to("/tmp")
    with pytest.raises(ConfigError, match="only this user may write to"):
        OriginalTree.of(source, None)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing: No such file or directory"):
        OriginalTree.of(tmp_path / "nothing", None)
