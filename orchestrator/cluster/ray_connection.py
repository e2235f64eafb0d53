"""Addresses of Ray clusters: RAY_ADDRESS, checked before Ray sees it, and `cluster.json` in the directory of a run,
written by the process that drives the run and read by processes that ask it something (`penstock status`, `penstock
scale`).
"""

import contextlib
import json
import logging
import os
import secrets
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from penstock.conf.errors import RayEnded, ResourceError, suggest
from penstock.orchestrator.run_directory.run_directory import RunDirectory

AUTH_MODE = "RAY_AUTH_MODE"
"""Environment variable that Ray sets in the process that starts a cluster; one that joins must have the same."""
TOKEN = "token"
AUTH_MODES = (TOKEN, "disabled")
PRIVATE, OTHERS = 0o600, 0o077
TOKEN_BYTES = 32
"""Size of a token, in bytes, as Ray makes them."""
KNOCK_S = 30.0
"""Seconds for the cluster's port to answer."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""First bytes of a gRPC client, which a server of HTTP/1 answers with an error of its own."""
HTTP1 = b"HTTP/"
DASHBOARD_PORT, GCS_PORT = 8265, 6379
"""Ray's default ports."""
RECONNECT, RECONNECT_S = "RAY_gcs_rpc_server_reconnect_timeout_s", 60.0
"""Ray's setting for how long the head of a cluster may be away, and its default in seconds: then Ray ends nodes, actors
and drivers, each with a message in its log."""
PATIENCE = 0.75
"""Share of that time after which a run ends by itself."""
END_S = 120.0
"""Extra seconds for a run to write what is missing before Ray ends its process."""
NUM_LOOKS = 9
"""Looks in a row at a head that takes no connection, after which it is lost."""


def cluster_address() -> str | None:
    """Value of RAY_ADDRESS. None: the run starts a local Ray, as for `local` and for an empty value."""
    address = os.environ.get("RAY_ADDRESS", "").strip()
    return address if address not in ("", "local") else None


def check_token() -> None:
    """Raise `ResourceError` for a mode of authentication that Ray does not know, which it takes for none, and for a
    file without a token."""
    mode, file = os.environ.get(AUTH_MODE) or TOKEN, os.environ.get("RAY_AUTH_TOKEN_PATH")
    if mode.lower() not in AUTH_MODES:
        raise ResourceError(f"{AUTH_MODE}={mode}: unknown{suggest(mode, AUTH_MODES)}")
    if mode.lower() == TOKEN and file and not os.environ.get("RAY_AUTH_TOKEN") and not Path(file).is_file():
        raise ResourceError(f"RAY_AUTH_TOKEN_PATH={file}: there is no such file. Name the one that has Ray's token.")


def keep_token_private(*, is_joining: bool = False) -> None:
    """Make Ray's token readable by its user alone, since a reader of it may run code. Ray writes it with what the umask
    allows, so it is made here where there is none: Ray takes the one that it finds. Where none can be kept, this
    process has one of its own. `is_joining`: the cluster is another's, whose token is not made here; and where there is
    none, Ray asks for none."""
    is_given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    is_wanted = os.environ.get("RAY_AUTH_MODE", "token").lower() == "token" and not (is_given or is_joining)
    file = Path(os.path.expanduser("~"), ".ray", "auth_token")
    try:
        if is_wanted and not file.exists():
            _make_token(file)
        if stat.S_IMODE(file.stat().st_mode) & OTHERS:
            file.chmod(PRIVATE)
    except OSError:  # home cannot be written to
        if is_wanted and not os.access(file, os.R_OK):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(TOKEN_BYTES)


def _make_token(file: Path) -> None:
    """Make the token whole, and once: another run may start at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "w") as opened:
        opened.write(secrets.token_hex(TOKEN_BYTES))
    with contextlib.suppress(FileExistsError):
        os.link(part, file)
    part.unlink()


def reconnect_s() -> float:
    """Seconds that the head of a cluster may be away before Ray ends what is on it."""
    return float(os.environ.get(RECONNECT) or RECONNECT_S)


@contextlib.contextmanager
def outliving_head() -> Iterator[None]:
    """Have the Ray that this process connects to in the block end the process later than it ends nodes and actors."""
    from ray._raylet import Config  # type: ignore[attr-defined]  # late, as below; compiled

    given = os.environ.get(RECONNECT)
    os.environ[RECONNECT] = str(round(reconnect_s() + END_S))
    Config.initialize("")  # Ray has read its environment when it was imported
    try:
        yield
    finally:
        del os.environ[RECONNECT]
        os.environ.update({RECONNECT: given} if given is not None else {})


class HeadWatch:
    """Looks every few seconds, in a thread of its own, whether the head of a cluster takes connections. A head that
    comes back in time is not lost.

    Lifecycle: made, `raise_if_lost` at any time, `close`.
    """

    def __init__(self, address: str, patience_s: float) -> None:
        self.is_lost = False
        self._address, self._patience_s, self._every_s = address, patience_s, patience_s / NUM_LOOKS
        self._closing = threading.Event()
        threading.Thread(target=self._watch, name="head", daemon=True).start()

    def raise_if_lost(self) -> None:
        """Raise `RayEnded` once the head has been away for too long."""
        if self.is_lost:
            raise RayEnded(
                f"The head of the Ray cluster at {self._address} has not answered for {self._patience_s:g} s, and Ray "
                "ends the nodes of a cluster without a head. Start the command again with resume=auto on a cluster "
                f"that answers. {RECONNECT} says how long a head may be away."
            )

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        host, port = _endpoint(self._address)
        num_misses, due = 0, time.monotonic()  # misses are counted, since time passes in a suspended machine, too
        while not (self.is_lost or self._closing.wait(max(0.0, due - time.monotonic()))):
            due = time.monotonic() + self._every_s
            try:
                socket.create_connection((host, port), self._every_s).close()
                num_misses = 0
            except OSError:
                num_misses += 1
            self.is_lost = num_misses >= NUM_LOOKS


def reach(address: str) -> None:
    """Try the cluster's port, since Ray itself tries for minutes. Raises `ResourceError` for an address of another
    form, where nothing listens, where a web server answers, and what `check_token` raises."""
    check_token()
    answer = b""
    try:
        host, port = _endpoint(address if address != "auto" else _address_here())
        knocking = socket.create_connection((host, port), KNOCK_S)
        with knocking, contextlib.suppress(ConnectionError):  # a cluster with TLS ends the connection
            knocking.sendall(HTTP2_PREFACE)
            answer = knocking.recv(len(HTTP1))
    except OSError as error:
        raise ResourceError(
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({error}). Start one with `ray start --head`, or "
            "unset RAY_ADDRESS to use this machine."
        ) from error
    if answer == HTTP1:
        raise ResourceError(
            f"RAY_ADDRESS={address}: a web server answers there, such as Ray's dashboard. Name the port of the cluster "
            f"itself, as `ray start --head` prints it: RAY_ADDRESS={host}:{GCS_PORT} by default."
        )


def ray_directory() -> str:
    """Temporary directory of the head node of the cluster at RAY_ADDRESS; without one, that of a Ray of this machine.
    Raises `ResourceError` for a cluster that does not answer."""
    from ray._common.utils import get_default_ray_temp_dir  # late, as below
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
    from ray.exceptions import RayError

    if (address := cluster_address()) is None:
        return str(get_default_ray_temp_dir())  # type: ignore[no-untyped-call]
    reach(address)
    try:
        found = GcsClient(address=address if address != "auto" else _address_here()).get_all_node_info(KNOCK_S)
    except RayError as error:
        raise ResourceError(f"RAY_ADDRESS={address}: the cluster does not name its nodes ({error}).") from error
    return next(str(node.temp_dir) for node in found.values() if node.is_head_node)


def _endpoint(address: str) -> tuple[str, int]:
    """Host and port of a cluster. Raises `ResourceError` for an address of another form."""
    scheme, separator, rest = address.rpartition("://")
    try:
        target = urlsplit(f"//{rest}")
        host, port = target.hostname, target.port
    except ValueError:
        host = port = None
    if host and port and not separator and not target.path:
        return host, port
    host = host or "HOST"
    if scheme not in ("ray", "http", "https"):
        raise ResourceError(
            f"RAY_ADDRESS={address}: must be HOST:PORT, such as {host}:{GCS_PORT}, as `ray start --head` prints it, or "
            "`auto` for the cluster of this machine."
        )
    what = "Ray Client, which cannot drive a run" if scheme == "ray" else "Ray's dashboard"
    dashboard = f"http://{host}:{DASHBOARD_PORT}" if scheme == "ray" else address
    raise ResourceError(
        f"RAY_ADDRESS={address}: is an address of {what}. Send the run to the cluster: `ray job submit --address="
        f"{dashboard} -- penstock run …`. On a node of the cluster set RAY_ADDRESS={host}:{GCS_PORT} instead."
    )


def _address_here() -> str:
    """Address of the cluster that this machine is a node of. Raises `ConnectionError`."""
    from ray._private.services import canonicalize_bootstrap_address_or_die  # late, as below

    return str(canonicalize_bootstrap_address_or_die("auto"))


def note_connection(directory: RunDirectory, namespace: str) -> None:
    """Write where the run that this process drives can be found. Ray must be up."""
    import ray

    from penstock.orchestrator.cluster.placement.nodes import cluster_nodes

    content = {
        "address": ray.get_runtime_context().gcs_address,
        "host": cluster_nodes()[0].address,
        "namespace": namespace,
        "pid": os.getpid(),
        "auth_mode": os.environ.get(AUTH_MODE),
    }
    with directory.failed_writes.tolerating("cluster.json", "`penstock status` will not find the run."):
        directory.write_text(directory.cluster_file.name, json.dumps(content) + "\n")


@contextlib.contextmanager
def at_run(directory: RunDirectory, whom: str) -> Iterator[dict[str, Any]]:
    """Connect to the Ray of a run that has not ended, by its `cluster.json`, which this yields. A process that is
    connected already stays so. Raises `ResourceError` where it is not there, or `whom` does not answer in the block."""
    found = json.loads(directory.cluster_file.read_text())
    if found["auth_mode"] is not None:
        os.environ.setdefault(AUTH_MODE, found["auth_mode"])
    import ray  # late: it reads its environment now

    borrowed = ray.is_initialized()
    try:
        if not borrowed:
            quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=found["address"], namespace=found["namespace"], **quiet)
        yield found
    except (ConnectionError, ValueError, TimeoutError, ray.exceptions.RayError) as error:
        raise ResourceError(
            f"{whom} of {directory.path.name} does not answer at {found['address']} ({type(error).__name__}). Is "
            f"process {found['pid']} still there? A run that was killed says no more; its numbers are in "
            f"{directory.place}/{directory.metrics_file.name}."
        ) from None
    finally:
        if not borrowed:
            ray.shutdown()
