"""Python files that a user brings: loaded once, and pickled by value so that what they define reaches every actor.

Called while a configuration is composed (`imports=[file.py]`, `algorithm=file.py:name`), before anything starts.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from penstock.conf.errors import ConfigError


def load_file(path: Path, key: str) -> ModuleType:
    """The module of that file. The same file gives the same module. Raises `ConfigError` naming `key` and the line
    at fault."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key}: there is no file {path}.")
    # Not the bare stem: a user's `types.py` must not stand in for the standard library's.
    name = f"penstock_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path} is no Python file (its name must end in .py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[name]
        raise
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(
            f"{key}: {path} cannot be imported: {_where(error, path)}{type(error).__name__}: {error}"
        ) from error
    _pickle_by_value(module)
    return module


def _where(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError) and error.lineno:
        return f"line {error.lineno}: "
    line, traceback = None, error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(path):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return f"line {line}: " if line else ""


def _pickle_by_value(module: ModuleType) -> None:
    """Actors run elsewhere and cannot import a user's file; its functions travel as code."""
    from ray import cloudpickle  # late: takes half a second, and most runs bring no file

    cloudpickle.register_pickle_by_value(module)
