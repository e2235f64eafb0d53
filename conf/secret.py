"""Secrets among the settings: keys, passwords, tokens. What prints, dumps or logs a `Secret` gets `***`, or the place
that it was read from; `reveal` gives the value to the one who uses it.

    key = Secret.read("env:ALICE_KEY")    # or file:PATH, or the secret itself
    print(key)                            # env:ALICE_KEY
    client = Client(api_key=reveal(key))

The value goes with its section to other processes and nodes: only the command itself needs the variable or the file.
"""

import os
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Self

from penstock.conf.errors import ConfigError

HIDDEN = "***"
FREE = ("options", "engine_options")
"""Names of settings whose keys are another's: a function's, an engine's."""
_NAME = re.compile(
    r"""(^|\.)headers\.[^.]+$ | (^|\.)env\.[A-Z][A-Z0-9_]*$ | (^|\.)(key|token|tenants\.[^.]+)$ | [A-Z]_(KEY|TOKEN)$
    | (?i:(api|access|auth|secret|private|hf)[_-]?(key|token)|secret|passw|passphrase|authorization|credential|cookie)
      [^.]*$""",
    re.VERBOSE,
)
"""Dotted names of secrets. Of headers and environment variables each may be one."""
_INSIDE = re.compile(r"(?i)(key|token|secret|passw|passphrase|authorization|credential|cookie|headers|env)\w*\W?\s*:")
_SETTING = re.compile(
    r"""^(?P<before>[-+\s]*["']?(?:[\w-]+\.)*(?P<name>[\w-]+)["']?\s*[:=]\s*["']?)(?P<value>[^\s"'(){}\[\],]{4,})"""
    r"""(?P<after>["']?,?\s*(?:\#.*)?)$""",
    re.MULTILINE,
)
"""A line that sets a name to a text without spaces."""
_USER = re.compile(r"(://[^/\s:@\"'<>\\]*:)[^/\s@\"'<>\\]+(?=@)")
_QUERY = re.compile(r"(?i)([?&][\w.-]*(?:key|token|secret|signature|sig|passw|credential)[\w.-]*=)[^&#\s\"'<>\\]+")


class Secret(str):
    """A secret, whose text is what may be shown of it."""

    __slots__ = ("_value",)
    _value: Any

    def __new__(cls, value: Any, shown: str = HIDDEN) -> Self:
        made = super().__new__(cls, shown)
        made._value = value
        return made

    def __getnewargs__(self) -> tuple[Any, str]:  # type: ignore[override]
        return self._value, str(self)

    @classmethod
    def read(cls, setting: Any, key: str = "key") -> Self:
        """The secret that a setting is, or names by env:NAME or file:PATH. `key`: the setting's. Raises
        `ConfigError`."""
        kind, _, place = str(setting).partition(":")
        if setting == HIDDEN:
            raise ConfigError(f"{key}={HIDDEN}: stands for a secret that is not kept. Name env:VARIABLE or file:PATH.")
        if kind not in ("env", "file"):
            return cls(setting)
        try:
            found = os.environ[place] if kind == "env" else Path(place).expanduser().read_text(encoding="utf-8").strip()
        except KeyError:
            raise ConfigError(f"{key}={setting}: this process has no such variable. Set it.") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{key}={setting}: cannot be read: {error}.") from None
        if not found:
            raise ConfigError(f"{key}={setting}: is empty. Write the secret there.")
        return cls(found, str(setting))


def reveal(value: Any) -> Any:
    """The value with the secrets in it in plain text."""
    if isinstance(value, Secret):
        return value._value
    if isinstance(value, dict):
        return {name: reveal(one) for name, one in value.items()}
    return type(value)(map(reveal, value)) if type(value) in (list, tuple) else value


def hide(value: Any, name: str) -> Any:
    """The value of a setting with each secret in it as a `Secret`: one by its dotted `name`, or a URL with one in it.
    Raises `ConfigError`."""
    if isinstance(value, dict):
        return {key: hide(one, f"{name}.{key}") for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(hide(one, name) for one in value)
    if type(value) not in (str, int, float) or value == "":  # a `Secret` already, or nothing that could be one
        return value
    if _NAME.search(name):
        return Secret.read(value, name)
    return hide_url(value) if isinstance(value, str) else value


def hide_url(text: str) -> str:
    """The text, as a `Secret` if it is a URL with a password or a key in it."""
    return text if (shown := hide_in(text)) == text else Secret(text, shown)


def hide_in(text: str) -> str:
    """The text without passwords and keys of URLs in it."""
    return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}", text))


def hide_lines(text: str) -> str:
    """The text, such as YAML, Python or a patch of either, without the values of lines that set a secret by its name,
    and without passwords and keys of URLs."""

    def shown(found: re.Match[str]) -> str:
        is_place = found["value"].startswith(("env:", "file:"))
        return found[0] if is_place or not _NAME.search(found["name"]) else f"{found['before']}{HIDDEN}{found['after']}"

    return hide_in(_SETTING.sub(shown, text))


def hide_word(word: str) -> str:
    """A word `key=value`, as a `Secret` if there is one in it."""
    key, _, value = word.partition("=")
    if isinstance(word, Secret) or value.startswith(("env:", "file:")):
        return word
    is_secret = _NAME.search(key.lstrip("+")) or (value[:1] in ("{", "[") and _INSIDE.search(value))
    return Secret(word, f"{key}={HIDDEN}") if is_secret else hide_url(word)


def hide_secrets(section: Any, name: str = "") -> None:
    """Hide the secrets of a section and of those in it. Raises `ConfigError`, for a password in a URL, too, where a
    setting names a place: messages would print it with the place."""
    for field in fields(section):
        value, key = getattr(section, field.name), f"{name}{field.name}"
        if field.name in FREE:
            setattr(section, field.name, hide(value, key))
        elif field.name == "overrides":
            setattr(section, field.name, list(map(hide_word, value)))
        elif isinstance(value, str) and not isinstance(value, Secret) and _USER.search(value):
            raise ConfigError(
                f"{key}={hide_in(value)}: has a password. Leave it out, and give it as fsspec takes it: by variables "
                "such as FSSPEC_SFTP_USERNAME and FSSPEC_SFTP_PASSWORD, or in ~/.config/fsspec."
            )
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for place, one in (("", value), *inner):
            if is_dataclass(one):
                hide_secrets(one, f"{key}." if one is value else f"{key}.{place}.")
