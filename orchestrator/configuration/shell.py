"""Commands of a shell script, with what it sets itself in their words: VAR=x, VAR=${VAR:-x}, arrays, $((1 + 2)). Pure.

What only execution would show, such as $(date) or an unset variable, stays in a word as it is written.
"""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping

NAME = r"[A-Za-z_]\w*"
ASSIGNED = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
PARAMETER = re.compile(rf"(#?)({NAME}|\d+|@|\*)(?:\[(@|\*|\d+)\])?(?:(:?)([-=+?])(.*)|(\#\#\*/))?", re.DOTALL)
BEFORE_COMMANDS = {"if", "then", "elif", "else", "fi", "do", "done", "while", "until", "!", "time", "{", "}", "esac"}
DECLARE = {"export", "local", "declare", "readonly", "typeset"}
OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.FloorDiv: operator.floordiv, ast.Div: operator.floordiv,
}  # fmt: skip


def commands_of(text: str, environment: Mapping[str, str]) -> list[list[str]]:
    """The words of each command, without quotes. `environment`: variables that are set from outside."""
    return list(_Script(text, dict(environment), {}).commands())


def is_unresolved(text: str) -> bool:
    """Return whether a text has a part that only running a script could tell, or another tool's interpolation."""
    return re.search(rf"\$(\(|\{{|\d|{NAME})|`", text) is not None


class _Script:
    def __init__(self, text: str, values: dict[str, str], arrays: dict[str, list[str]]) -> None:
        self._text, self._at = text.replace("\\\n", " "), 0
        self._values, self._arrays = values, arrays
        self._is_other_branch = False

    def commands(self) -> Iterator[list[str]]:
        words: list[str] = []
        for word in self._scan(""):
            if word is not None:
                words.append(word)
                continue
            if found := self._without_assignments(words):
                yield found
            words = []

    def expanded(self) -> str:
        """The whole text as one word."""
        return " ".join(word for word in self._scan("") if word is not None)

    def _without_assignments(self, words: list[str]) -> list[str]:
        while words and words[0] in BEFORE_COMMANDS:
            self._is_other_branch = words[0] in ("else", "elif") or (self._is_other_branch and words[0] != "fi")
            words = words[1:]
        declares = bool(words) and words[0] in DECLARE
        while words and (words[0] in DECLARE or ASSIGNED.fullmatch(words[0])):
            if found := ASSIGNED.fullmatch(words[0]):
                self._assign(found[1], found[2], found[3])
            words = words[1:]
        return [] if declares else words

    def _assign(self, name: str, adds: str, value: str) -> None:
        if self._is_other_branch and name in self._values:  # the first branch stands for all
            return
        self._values[name] = self._values.get(name, "") + value if adds else value

    def _scan(self, end: str) -> Iterator[str | None]:
        """Words up to the character `end`, and None after each command."""
        word: str | None = None
        while self._at < len(self._text) and self._text[self._at] != end:
            mark = self._text[self._at]
            self._at += 1
            if mark in " \t" or (mark == "\n" and end):
                if word is not None:
                    yield word
                word = None
            elif mark == "(" and word is not None and (found := ASSIGNED.fullmatch(word)) and not found[3]:
                self._set_array(found[1], found[2])
                word = None
            elif mark in "\n;|&<>()":
                if word is not None:
                    yield word
                yield None
                word = None
            elif mark == "#" and word is None:
                self._until("\n")
                self._at -= self._at < len(self._text)
            elif mark == "'":
                word = (word or "") + self._until("'")
            elif mark == '"':
                fields = self._quoted()
                *whole, last = [(word or "") + fields[0], *fields[1:]] if fields else [word]
                yield from whole
                word = last
            elif mark == "`":
                word = (word or "") + f"`{self._until('`')}`"
            elif mark == "$":
                fields = [part for field in self._dollar() for part in field.split()]
                *whole, last = [(word or "") + fields[0], *fields[1:]] if fields else [word]
                yield from whole
                word = last
            elif mark == "\\":
                word = (word or "") + self._text[self._at : self._at + 1]
                self._at += 1
            else:
                word = (word or "") + mark
        if word is not None:
            yield word
        yield None

    def _set_array(self, name: str, adds: str) -> None:
        items = [word for word in self._scan(")") if word is not None]
        self._at += 1
        self._arrays[name] = [*self._arrays.get(name, ()), *items] if adds else items

    def _quoted(self) -> list[str]:
        """Fields of a text within double quotes: one, or as many as an array in it has; none for "$@"."""
        start, fields, says_something = self._at, [""], False
        while self._at < len(self._text) and self._text[self._at] != '"':
            mark = self._text[self._at]
            self._at += 1
            if mark == "$":
                if found := self._dollar():
                    fields[-1] += found[0]
                    fields += found[1:]
                says_something |= bool(found)
                continue
            if mark == "\\" and self._text[self._at : self._at + 1] in ('"', "\\", "$", "`"):
                mark = self._text[self._at]
                self._at += 1
            fields[-1] += mark
            says_something = True
        is_none = self._at > start and not says_something
        self._at += 1
        return [] if is_none else fields

    def _dollar(self) -> list[str]:
        """Fields that stand for what begins with the dollar before this place; itself if that is not known."""
        rest = self._text[self._at :]
        for opening, closing in (("((", "))"), ("(", ")"), ("{", "}")):
            if rest.startswith(opening):
                inner = self._within(opening, closing)
                if opening == "((":
                    return [self._computed(inner)]
                return [f"$({inner})"] if opening == "(" else self._parameter(inner)
        if rest[:1] in ("@", "*"):
            self._at += 1
            return []
        found = re.match(rf"{NAME}|\d", rest)
        self._at += found.end() if found else 0
        return self._parameter(found[0]) if found else ["$"]

    def _parameter(self, inner: str) -> list[str]:
        found = PARAMETER.fullmatch(inner)
        if found is None:
            return [f"${{{inner}}}"]
        count, name, index, colon, way, other, base = found.groups()
        if name in ("@", "*"):
            return []
        if name in self._arrays:
            items = self._arrays[name]
            chosen = items if index in ("@", "*") else items[int(index or 0) : int(index or 0) + 1]
            return [str(len(items))] if count else chosen
        value = None if index else self._values.get(name)
        if count and value is not None:
            value = str(len(value))
        if colon and not value:
            value = None
        if way == "+":
            return [] if value is None else [self._nested(other)]
        if value is None and way in ("-", "="):
            value = self._nested(other)
            if way == "=":
                self._values[name] = value
        if value is None:
            return [f"${{{name}}}"]
        return [value.rpartition("/")[2] if base else value]

    def _nested(self, text: str) -> str:
        return _Script(text, self._values, self._arrays).expanded()

    def _computed(self, expression: str) -> str:
        text = self._nested(expression.replace("(", "\\(").replace(")", "\\)").replace("*", "\\*"))
        named = re.sub(NAME, lambda name: self._values.get(name[0], name[0]), text)
        try:
            return str(_number(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError):
            return f"$(({expression}))"

    def _within(self, opening: str, closing: str) -> str:
        """The text between brackets, and go past them."""
        start, depth = self._at + len(opening), 0
        self._at = start
        while self._at < len(self._text):
            if not depth and self._text.startswith(closing, self._at):
                break
            depth += (self._text[self._at] == opening[0]) - (self._text[self._at] == closing[0])
            self._at += 1
        inner = self._text[start : self._at]
        self._at += len(closing)
        return inner

    def _until(self, end: str) -> str:
        """The text up to a mark, and go past it."""
        place = self._text.find(end, self._at)
        place = len(self._text) if place < 0 else place
        found, self._at = self._text[self._at : place], place + 1
        return found


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](_number(node.left), _number(node.right))
    raise ValueError(ast.dump(node))
