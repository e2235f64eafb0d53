"""Settings and processes that every test shares."""

import gc
import multiprocessing.spawn
import os
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import costs
from tests.amounts import amount
from tests.machines.cluster import Cluster, machines
from tests.machines.privileges import what_is_missing
from tests.ray_cluster import connected, running_cluster
from tests.starts import Starts
from tests.warm_workers import warm_python as warm_server

# Machines of continuous integration are shared and slow at odd moments: a property is about values, not about time.
settings.register_profile("penstock", deadline=None, max_examples=amount(100))
settings.load_profile("penstock")

# `tests/oracle` compares with other projects, which live in an environment of their own: `make oracle` names the folder
# and so gets it. A run of everything leaves it out, or it would end with import errors.
collect_ignore = ["oracle"]

# Ray reads these when it is loaded, before any test can say them. Workers that are niced wait for whoever shares their
# core; a token that somebody has once made on this machine is asked for by one half of Ray and not known to the other.
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")

# A shell without job control has what it starts by `&` ignore Ctrl-C, `nohup` has it ignore the end of a terminal, and
# so would whatever the tests start, among it what they interrupt. They start it as from a terminal.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPUS_SEEN = {VISIBLE_GPUS: os.environ[VISIBLE_GPUS]} if VISIBLE_GPUS in os.environ else {}
MAX_PROMISES = 45
"""Largest number of real tests in `make test`."""
platform.uname().processor  # noqa: B018 - Python runs a program for it, once; packages ask for it when they are imported
STARTS = Starts()
STARTS.listen()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(STARTS)
    is_controller = getattr(config.option, "numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if (file := os.environ.get(costs.FILE)) and not is_controller:
        config.pluginmanager.register(costs.Costs(Path(file)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (file := Path(os.environ.get(costs.FILE, ""))).is_file():
        terminalreporter.section("processor time")
        for line in costs.summary(file):
            terminalreporter.line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    promises = [item for item in items if item.get_closest_marker("promise")]
    if unmarked := [item.nodeid for item in promises if not item.get_closest_marker("real")]:
        raise pytest.UsageError(f"a test of a promise is marked `real`, too: {unmarked}")
    if len(promises) > MAX_PROMISES:
        raise pytest.UsageError(f"{len(promises)} tests of promises: `make test` has room for {MAX_PROMISES}")


def pytest_collection_finish() -> None:
    """A million objects of packages and tests are there to stay: nobody who collects garbage looks at them again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need machines where there can be none: at one place, so the summary says it once for all."""
    if item.get_closest_marker("machines") and (missing := what_is_missing()):
        pytest.skip(f"NO MACHINES: nothing between two machines was tested, which needs {missing}")


@pytest.fixture(autouse=True, scope="module")
def no_process_group_remains() -> Iterator[None]:
    """A file that leaves this process a rank would change what trainers of the next file do."""
    yield
    if distributed := sys.modules.get("torch.distributed"):
        assert not distributed.is_initialized(), "a test of this file joined a process group and never left it"


@pytest.fixture(autouse=True)
def gpus_stay_visible() -> Iterator[None]:
    """An actor without GPUs that a test makes in its own process hides them from it, and so from later tests' Ray."""
    yield
    os.environ.pop(VISIBLE_GPUS, None)
    os.environ.update(GPUS_SEEN)


@pytest.fixture(scope="session")
def warm_python() -> list[str]:
    """`[*warm_python, PROGRAM, …]` is a process that has torch and transformers at once. The processes of `make test`
    share what it is forked from, which takes twenty seconds of CPU to start and ends with `make test`."""
    together = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    owner = os.getppid() if together else os.getpid()
    return [str(warm_server(Path(f"/tmp/warm-{together or owner}"), owner))]


@pytest.fixture(scope="session")
def warm_spawn(warm_python: list[str]) -> Iterator[None]:
    """Processes that this one spawns, those of vLLM's engines among them, have vLLM at once."""
    multiprocessing.set_executable(warm_python[0])
    yield
    multiprocessing.set_executable(sys.executable)


@pytest.fixture(scope="session")
def vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees, with its processor. Tests only read it."""
    from tests.vision_models import build_vision_model

    return build_vision_model(tmp_path_factory.mktemp("vision_model"))


@pytest.fixture
def cold_spawn() -> Iterator[None]:
    """Processes that this one spawns start as they do for users, whatever other tests asked for."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(sys.executable)
    yield
    multiprocessing.set_executable(before)


@pytest.fixture(scope="session")
def ray_address(warm_python: list[str]) -> Iterator[str]:
    """A Ray cluster of this process's tests, for drivers in processes of their own too."""
    with running_cluster(warm_python) as address:
        yield address


@pytest.fixture(scope="session")
def driver_environment(ray_address: str) -> dict[str, str]:
    """The environment for drivers in processes of their own, for the same cluster."""
    return {**os.environ, "RAY_ADDRESS": ray_address}


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[str]:
    """The tests of a module are one driver: what they leave ends with it. The cluster's address."""
    with connected(ray_address):
        yield ray_address


@pytest.fixture(scope="module")
def ray_machines(
    request: pytest.FixtureRequest, warm_python: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Machines with one Ray cluster on them, for the tests of a module: two, or three by `pytest.mark.machines(3)`.

    `warm_python` runs on them too, and they share the folders of `tmp_path`.
    """
    folder = Path(warm_python[0]).parent
    marker = request.node.get_closest_marker("machines")
    num_machines = marker.args[0] if marker and marker.args else 2
    with machines(num_machines, keep=[folder, tmp_path_factory.getbasetemp()]) as cluster:
        cluster.start_ray(warm=folder)
        yield cluster
