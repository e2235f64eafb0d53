"""Debian packages are installed where that is allowed, and named before anything runs where it is not; the driver of
GPUs is looked at. The commands that the scripts call are made here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).parents[2]
PROGRAMS = ("g++", "chromium", "prometheus", "umoci", "ip", "tc")
INSTALL = "install -y --no-install-recommends"


class System:
    """One with these programs, whose commands write down how they were called."""

    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "log"
        (place / "bin").mkdir()
        for name in (*PROGRAMS, "python"):
            self.command(name)
        (place / "bin" / "env").symlink_to(shutil.which("env") or "/usr/bin/env")
        self.command("install", "while read -r line; do :; done")  # of what keeps services from being started
        self.command("rm")
        self.is_user(1000)
        self.apt_get()

    def command(self, name: str, does: str = "") -> None:
        file = self.place / "bin" / name
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)

    def lacks(self, *names: str) -> None:
        for name in names:
            (self.place / "bin" / name).unlink()

    def is_user(self, number: int) -> None:
        self.command("id", f"echo {number}")

    def apt_get(self, exit_code: int = 0) -> None:
        self.command("apt-get", f'echo "$*" >>"{self.log}"\nexit {exit_code}')

    def run(self, what: str = "verify") -> "subprocess.CompletedProcess[str]":
        bash = shutil.which("bash")
        assert bash is not None
        return subprocess.run(
            [bash, str(ROOT / "requirements" / "debian.sh"), what, "python"],
            env={"PATH": str(self.place / "bin")}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=900,
        )  # fmt: skip

    @property
    def installed(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


@pytest.mark.parametrize("user", [0, 1000])
def test_where_everything_is_there_nothing_is_done(system: System, user: int) -> None:
    system.is_user(user)
    done = system.run()
    assert (done.returncode, done.stdout, done.stderr, system.installed) == (0, "", "", [])


@pytest.mark.parametrize("sudo", ["is not there", "refuses"])
def test_where_nobody_may_install_the_packages_are_named_in_one_line(system: System, sudo: str) -> None:
    system.lacks("chromium", "prometheus")
    if sudo == "refuses":
        system.command("sudo", "exit 1")
    done = system.run()
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "make verify" in line
    assert f"As root: apt-get {INSTALL} chromium prometheus" in line
    assert (done.stdout, system.installed) == ("", [])


def test_where_there_is_no_apt_get_the_packages_are_named_in_one_line(system: System) -> None:
    system.lacks("chromium", "apt-get")
    system.is_user(0)
    done = system.run()
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert "there is no apt-get here" in line
    assert "chromium" in line


def test_the_setup_of_another_system_names_what_it_may_lack_and_goes_on(system: System) -> None:
    system.lacks("g++", "apt-get")
    done = system.run("setup")
    assert (done.returncode, done.stderr) == (0, "")
    assert "this system may lack g++ (Debian's names)" in done.stdout


def test_a_machine_with_gpus_needs_no_library_of_the_cpu_build(system: System) -> None:
    system.command("python", 'case "$*" in *libnuma*) exit 1;; esac')
    assert "libnuma1" in system.run("setup").stderr
    system.command("nvidia-smi")
    assert (system.run("setup").returncode, system.installed) == (0, [])


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose pip installs nothing and whose torch can use one GPU, on a machine with two."""
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "pyproject.toml").touch()
    commands = {
        ".venv/bin/python": 'case "$*" in *device_count*) echo 1;; esac',
        "bin/nvidia-smi": 'case "$1" in -L) echo "GPU 0: one"; echo "GPU 1: two";; --*) echo "$DRIVER";; esac',
    }
    for name, does in commands.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)
    return tmp_path


def installed(checkout: Path, driver: str) -> "subprocess.CompletedProcess[str]":
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [checkout / "requirements" / "install.sh"], capture_output=True, text=True, timeout=900,
        env={"PATH": path, "DRIVER": driver, "PYTHON": str(checkout / ".venv" / "bin" / "python")},
    )  # fmt: skip


def test_a_driver_that_is_too_old_ends_the_setup_before_it_installs(checkout: Path) -> None:
    done = installed(checkout, "550.54.15")
    assert done.returncode == 2
    assert "the NVIDIA driver is 550.54.15, and CUDA 13 needs 580 or newer." in done.stderr
    assert "VARIANT=cpu make setup" in done.stderr
    assert not (checkout / ".venv" / "setup.log").exists()


def test_gpus_that_torch_cannot_use_are_named_at_the_end_of_the_setup(checkout: Path) -> None:
    done = installed(checkout, "580.65.06")
    assert (done.returncode, done.stderr) == (0, "")
    assert "the driver lists 2 GPU(s), torch can use 1." in done.stdout
    assert "setup: done in" in done.stdout


def test_root_installs_what_is_missing_and_nothing_else(system: System) -> None:
    system.lacks("chromium", "g++")
    system.is_user(0)
    done = system.run()
    assert (done.returncode, done.stderr) == (0, "")
    assert system.installed == ["update -q", f"{INSTALL} g++ chromium -q"]


def test_one_who_may_use_sudo_installs_by_it(system: System) -> None:
    system.lacks("prometheus")
    system.command("sudo", f'[ "$1" = -n ] && exit\necho "sudo $1" >>"{system.log}"\nexec "$@"')
    assert system.run().returncode == 0
    called = [line for line in system.installed if line not in ("sudo install", "sudo rm")]
    assert called == ["sudo apt-get", "update -q", "sudo env", f"{INSTALL} prometheus -q"]


def test_the_first_tier_of_tests_needs_a_browser_alone(system: System) -> None:
    system.lacks("prometheus", "umoci", "ip", "tc")
    assert system.run("test").returncode == 0
    assert system.installed == []
    system.lacks("chromium")
    assert "make test needs Debian packages that are missing" in system.run("test").stderr


def test_the_setup_needs_no_program_of_the_tests(system: System) -> None:
    system.lacks("chromium", "prometheus")
    assert system.run("setup").returncode == 0
    system.lacks("g++")
    done = system.run("setup")
    assert done.returncode != 0
    assert "make setup" in done.stderr
    assert "g++" in done.stderr
    assert "chromium" not in done.stderr


def test_an_installation_that_fails_is_told(system: System) -> None:
    system.lacks("chromium")
    system.is_user(0)
    system.apt_get(100)
    done = system.run()
    assert done.returncode != 0
    assert "make verify needs Debian packages that are missing, and apt-get update failed" in done.stderr


@pytest.mark.parametrize("tier", ["test", "verify"])
@pytest.mark.parametrize("packages", [True, False], ids=["", "packages cannot be had"])
def test_make_looks_for_packages_before_all_else_with_several_jobs_too(
    tmp_path: Path, packages: bool, tier: str
) -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("there is no make here")
    shutil.copy(ROOT / "Makefile", tmp_path)
    says = "#!/bin/sh\necho {} >>log\nexit {}\n"
    scripts = {"requirements/debian.sh": 0 if packages else 2, "requirements/install.sh": 0, ".venv/bin/python": 0}
    for name, code in scripts.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(says.format(name, code))
        file.chmod(0o755)
    for environment in () if tier == "test" else ("verifiers", "openenv", "agents", "tinker22", "tinker30", "tinker38"):
        for name in (f"requirements/{environment}.lock", f".venv-{environment}/.locked"):  # made in this order
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run([make, "-j4", tier], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    called = (tmp_path / "log").read_text().splitlines()
    assert (done.returncode == 0) == packages
    assert called == (list(scripts) if packages else ["requirements/debian.sh"])
