"""Python files that a user brings: loaded once, and pickled by value so that what they define reaches every actor.

They are loaded while a configuration is composed (`imports=[file.py]`, `algorithm=file.py:name`), before anything
starts. Reward processes import the same files by their path (`workers/user_code.py`).
"""

from pathlib import Path
from types import ModuleType

from penstock.workers.user_code import import_file


def load_file(path: Path, key: str) -> ModuleType:
    """The module of a file; the same file gives the same module. Raises `ConfigError` naming `key` and the fault."""
    module = import_file(str(path), key)
    from ray import cloudpickle  # late: takes half a second, and most runs bring no file

    # Actors run elsewhere and cannot import a user's file by its name; its functions travel as code.
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    return module
