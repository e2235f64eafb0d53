"""A disk that refuses calls: full, at its largest file, or without descriptors."""

import errno
import io
import itertools
import os
from contextlib import contextmanager
from unittest.mock import patch

ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EMFILE)


@contextmanager
def refusing(directory, refuses):
    """Refuse writes and openings below a directory. `refuses`: asked for each, with its number and its file."""
    numbers, real = itertools.count(), {"pwrite": os.pwrite, "open": os.open, "io": io.open}

    def checked(name, what, *arguments, **more):
        file = os.readlink(f"/proc/self/fd/{what}") if name == "pwrite" else str(what)
        if file.startswith(str(directory)):
            number = next(numbers)
            if refuses(number, file):
                code = ERRORS[number % len(ERRORS)]
                raise OSError(code, os.strerror(code))
        return real[name](what, *arguments, **more)

    with (
        patch.object(os, "pwrite", lambda *given: checked("pwrite", *given)),
        patch.object(os, "open", lambda *given, **more: checked("open", *given, **more)),
        patch.object(io, "open", lambda *given, **more: checked("io", *given, **more)),
    ):
        yield
