"""Names that come from outside: keys of an object store, files that another machine or a manifest lists. They become
paths here, and only such as lie below the directory that they are joined to.
"""

from pathlib import Path, PurePosixPath


class OutsideName(ValueError):
    """A name that leads out of its directory, or is none."""


def checked(name: str) -> str:
    """The name of one file, without a folder.

    >>> checked("rows-1")
    'rows-1'
    """
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise OutsideName(f"{name!r:.200} is no name of a file.")
    return name


def below(directory: Path, name: str) -> Path:
    """The path of a file that may have folders in its name. No name that Penstock gives leads up, begins at the root or
    is empty.

    >>> below(Path("/run"), "samples/step_1.parquet").as_posix()
    '/run/samples/step_1.parquet'
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise OutsideName(f"{name!r:.200} is no name of a file below {directory}.")
    return directory / path
