"""What users write for an input → which paths below a folder it means.

Beam's own globs know no braces, differ from one filesystem to another, and read a file's name as a pattern
(`a[1].txt` does not find itself), so patterns are turned into one regular expression here and every
filesystem is only asked to list.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WILDCARDS = re.compile(r"[*?\[{]")
HIDDEN = "._"  # as Hadoop, Spark and Arrow have it: .git, _SUCCESS, _temporary


@dataclass(frozen=True, slots=True)
class Glob:
    """A pattern relative to a folder. `*`, `?` and `[…]` stay within a name, `**` spans folders.

    `depth` is the number of names in a path that can match, None without a limit.
    """

    pattern: str

    @property
    def depth(self) -> int | None:
        names = self._names()
        return None if "**" in names else len(names)

    def compile(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        """Two expressions for relative paths: what matches if no name is hidden, and what matches otherwise.

        A name that begins with `.` or `_` is hidden unless its part of the pattern begins so too.
        """
        return self._compile(hidden=False), self._compile(hidden=True)

    def _names(self) -> list[str]:
        # A trailing slash asks for a folder, and folders are read recursively.
        pattern = self.pattern + "**" if self.pattern.endswith("/") else self.pattern
        return [name for name in pattern.split("/") if name not in ("", ".")]

    def _compile(self, *, hidden: bool) -> re.Pattern[str]:
        guard = "" if hidden else f"(?![{re.escape(HIDDEN)}])"
        names = self._names()
        parts = []
        for number, name in enumerate(names):
            last = number == len(names) - 1
            if name == "**":
                parts.append(f"(?:{guard}[^/]+/)*" + (f"{guard}[^/]+" if last else ""))
            else:
                wild = name[0] in "*?["
                parts.append((guard if wild else "") + _one_name(name) + ("" if last else "/"))
        return re.compile("".join(parts))


def is_hidden(path: str) -> bool:
    """Whether any name in a path relative to the folder that the user named is hidden."""
    return any(name[0] in HIDDEN for name in path.split("/") if name)


def expand_braces(pattern: str) -> list[str]:
    """The patterns that `{a,b}` stands for, nested ones too. Braces without a comma or a partner are literal."""
    for opening in re.finditer(r"\{", pattern):
        alternatives, depth, begin = [], 0, opening.end()
        for place in range(opening.start(), len(pattern)):
            letter = pattern[place]
            depth += (letter == "{") - (letter == "}")
            if (letter == "," and depth == 1) or depth == 0:
                alternatives.append(pattern[begin:place])
                begin = place + 1
            if depth == 0:
                break
        if depth == 0 and len(alternatives) > 1:
            before, after = pattern[: opening.start()], pattern[begin:]
            return [
                expanded
                for chosen in alternatives
                for expanded in expand_braces(before + chosen + after)
            ]
    return [pattern]


def _one_name(pattern: str) -> str:
    """The expression of a pattern within one name."""
    out, place = [], 0
    while place < len(pattern):
        letter = pattern[place]
        place += 1
        if letter == "*":
            out.append("[^/]*")
        elif letter == "?":
            out.append("[^/]")
        elif letter == "[" and (end := _class_end(pattern, place)) > 0:
            members = pattern[place:end]
            negated = members[0] in "!^"
            members = re.sub(r"([\\\[\]^&~|])", r"\\\1", members[1:] if negated else members)
            out.append(f"(?!/)[{'^' if negated else ''}{members}]")
            place = end + 1
        else:
            out.append(re.escape(letter))
    return "".join(out)


def _class_end(pattern: str, start: int) -> int:
    """Where the `]` of a character class is; a `]` that comes first belongs to the class. -1: there is none."""
    first = start + (pattern[start : start + 1] in ("!", "^"))
    return pattern.find("]", first + 1)
