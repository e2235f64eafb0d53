"""Workspaces whose tree is a whole file system: a directory, or an image in the OCI's layout."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.conf.errors import ConfigError
from penstock.workers.sandbox.workspace import Workspaces
from tests.sandbox.conftest import in_a_loop
from tests.workers.sandbox.conftest import Room

pytestmark = pytest.mark.real

PROGRAMS = ("sh", "cat", "ls", "rm", "touch", "id")


def files_of_programs() -> dict[str, bytes | str]:
    """Files of a small system: content by path, or the target of a link."""
    found: dict[str, bytes | str] = {"bin": "usr/bin"}
    for name in PROGRAMS:
        path = str(shutil.which(name))
        found[f"usr/bin/{name}"] = Path(path).read_bytes()
        needed = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
        found |= {library[1:]: Path(library).read_bytes() for library in re.findall(r"/\S+", needed)}
    return found


def layer(files: Mapping[str, bytes | str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.mode, member.size = 0o755, len(content)
            if isinstance(content, str):
                member.type, member.linkname, member.size = tarfile.SYMTYPE, content, 0
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return buffer.getvalue()


def make_layout(directory: Path, *layers: bytes, tags: tuple[str, ...] = ("latest",)) -> Path:
    """A directory in the layout of an image, with these layers."""

    def blob(content: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (directory / "blobs" / "sha256" / digest).write_bytes(content)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(content)}

    (directory / "blobs" / "sha256").mkdir(parents=True)
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    ids = [f"sha256:{hashlib.sha256(gzip.decompress(one)).hexdigest()}" for one in layers]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": ids}, "config": {}}
    manifest = {
        "schemaVersion": 2,
        "config": blob(json.dumps(config).encode(), "config.v1+json"),
        "layers": [blob(one, "layer.v1.tar+gzip") for one in layers],
    }
    described = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    manifests = [{**described, "annotations": {"org.opencontainers.image.ref.name": tag}} for tag in tags]
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
    return directory


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    first = {**files_of_programs(), "testbed/old": b"old\n", "testbed/data/one": b"1\n", "etc/os": b"first\n"}
    second = {
        "testbed/.wh.old": b"",
        "testbed/data/.wh..wh..opq": b"",
        "testbed/data/two": b"2\n",
        "etc/os": b"second\n",
    }
    return make_layout(tmp_path_factory.mktemp("image") / "layout", layer(first), layer(second))


def test_an_image_is_the_file_system_of_commands(image):
    room = Room(image, root=True, at="/testbed")
    ws = room.open()
    outcome = room.run(ws, "pwd; ls / /testbed/data; cat /etc/os; ls old; ls /usr/bin/python3 /original /rootfs")
    assert outcome.stdout.split("\n")[:1] == ["/testbed"], outcome
    listed = outcome.stdout.split()
    assert {"etc", "usr", "tmp", "proc", "dev", "testbed"} <= set(listed)
    assert {"two", "second"} <= set(listed)
    assert "one" not in listed
    assert outcome.stderr.count("No such file") == 4
    assert not room.run(ws, "cat < /proc/1/root/../../original/etc/os").is_success
    room.run(ws, "echo new > data/new; echo 3 > /etc/os; echo x > /tmp/x; echo more > /usr/bin/more")
    room.do(ws.write("/etc/other", "o\n"))
    assert room.do(ws.read("data/new")) == b"new\n"
    assert "+++ b/etc/os\n@@ -1 +1 @@\n-second\n+3\n" in room.do(ws.diff())
    fork = room.do(ws.fork())
    assert room.run(fork, "cat data/new /etc/os /etc/other /tmp/x /usr/bin/more").stdout == "new\n3\no\nx\nmore\n"
    checked = room.do(ws.check("cat /etc/os data/new hidden; ls /tmp", files={"hidden": "h\n", "/etc/os": "4\n"}))
    assert checked.stdout == "4\nnew\nh\n", checked
    assert room.do(ws.shell().run("cd /usr/bin && PATH=$PATH:/x")).reason == "exited"
    ws.worker.rest()
    assert room.run(ws, "cat data/new").stdout == "new\n"
    before = room.do(ws.snapshot())
    room.run(ws, "rm -r /usr/bin/more data")
    room.do(ws.restore(before))
    assert room.run(ws, "cat data/new; ls /proc/1/exe").stdout.startswith("new\n")
    fork.close()
    room.close()


@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_directory_is_one_too(tmp_path, kind):
    for path, content in {**files_of_programs(), "file": b"f\n"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            (tmp_path / path).symlink_to(content)
        else:
            (tmp_path / path).write_bytes(content)
            (tmp_path / path).chmod(0o755)
    room = Room(tmp_path, root=True)
    room.workspaces.first_kind = kind
    ws = room.open()
    assert room.run(ws, "id -u; cat file; rm file; touch /dev/shm/x; ls /tmp").stdout == "65533\nf\nx\n"
    assert "deleted file" in room.do(ws.diff())
    room.close()


@in_a_loop
async def test_what_is_no_image_is_refused_by_name(tmp_path, image, monkeypatch):
    workspaces = Workspaces()
    two = make_layout(tmp_path / "two", layer({"x": b"x"}), tags=("one", "two"))
    with pytest.raises(ConfigError, match="not one image with a tag, but 2"):
        await workspaces.open(two, root=True).__aenter__()
    broken = make_layout(tmp_path / "broken", layer({"x": b"x"}))
    shutil.rmtree(broken / "blobs" / "sha256")
    with pytest.raises(ConfigError, match="cannot be unpacked"):
        await workspaces.open(broken, root=True).__aenter__()
    with pytest.raises(ConfigError, match="root=True shows nothing else"):
        await workspaces.open(image, root=True, show=[os.path.dirname(os.__file__)]).__aenter__()
    monkeypatch.setenv("PATH", "")
    (tmp_path / "two" / "index.json").touch()
    with pytest.raises(ConfigError, match="no umoci on the PATH"):
        await workspaces.open(two, root=True).__aenter__()
    await workspaces.close()
