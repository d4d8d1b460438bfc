"""Patterns mean what a shell user expects, on every filesystem."""

from __future__ import annotations

import pytest

from pipeline.patterns import Glob, expand_braces, is_hidden

PATHS = [
    "a.txt", "b.md", "ab.txt", "x/a.txt", "x/y/a.txt", ".git/a.txt", "x/_tmp/a.txt", "_SUCCESS", "x/.a.txt", "a\nb.txt",
]  # fmt: skip


def matches(pattern: str) -> list[str]:
    plain, _ = Glob(pattern).compile()
    return [path for path in PATHS if plain.fullmatch(path)]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.txt", ["a.txt", "ab.txt", "a\nb.txt"]),
        ("?.txt", ["a.txt"]),
        ("[ab].*", ["a.txt", "b.md"]),
        ("[!a].*", ["b.md"]),
        ("[^a].*", ["b.md"]),
        ("[a-c].md", ["b.md"]),
        ("*/a.txt", ["x/a.txt"]),
        ("**/a.txt", ["a.txt", "x/a.txt", "x/y/a.txt"]),
        ("x/**", ["x/a.txt", "x/y/a.txt"]),
        ("x/", ["x/a.txt", "x/y/a.txt"]),
        ("x/**/a.txt", ["x/a.txt", "x/y/a.txt"]),
        ("**/y/*", ["x/y/a.txt"]),
        (".git/*", [".git/a.txt"]),
        ("_*", ["_SUCCESS"]),
        ("x/_*/*", ["x/_tmp/a.txt"]),
        ("x/.*", ["x/.a.txt"]),
        ("a.tx", []),
        ("x?a.txt", []),
        ("x[/]a.txt", []),
        ("x[!b]a.txt", []),
    ],
)
def test_a_glob_matches_whole_paths_and_no_hidden_names_unless_written_out(
    pattern: str, expected: list[str]
) -> None:
    assert matches(pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "name"), [("a[1.txt", "a[1.txt"), ("[]]", "]"), ("[!]]", "x"), ("[[]x", "[x"), ("a.+b", "a.+b"), ("[a\\]", "\\")]
)  # fmt: skip
def test_letters_that_mean_something_to_regular_expressions_mean_themselves(
    pattern: str, name: str
) -> None:
    plain, _ = Glob(pattern).compile()
    assert plain.fullmatch(name)


def test_the_second_expression_also_matches_hidden_names() -> None:
    _, hidden = Glob("**").compile()
    assert all(hidden.fullmatch(path) for path in PATHS)


@pytest.mark.parametrize(
    ("pattern", "depth"), [("*", 1), ("x/*.txt", 2), ("x/**", None), ("**/a", None), ("x*/", None)]
)
def test_the_depth_of_a_glob_bounds_how_far_folders_are_searched(
    pattern: str, depth: int | None
) -> None:
    assert Glob(pattern).depth == depth


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a", ["a"]),
        ("{a,b}.txt", ["a.txt", "b.txt"]),
        ("{a,b}{1,2}", ["a1", "a2", "b1", "b2"]),
        ("{a,{b,c}d}", ["a", "bd", "cd"]),
        ("{a/b,c}/d", ["a/b/d", "c/d"]),
        ("{,x}a", ["a", "xa"]),
        ("{a}", ["{a}"]),
        ("{a", ["{a"]),
        ("a}b{", ["a}b{"]),
        ("{a}{b,c}", ["{a}b", "{a}c"]),
        ("{{a,b}", ["{a", "{b"]),
    ],
)
def test_braces_expand_as_in_a_shell(pattern: str, expected: list[str]) -> None:
    assert expand_braces(pattern) == expected


@pytest.mark.parametrize(
    ("path", "hidden"),
    [("a/b.txt", False), ("a/.b", True), (".a/b", True), ("a/_SUCCESS", True), ("a_/b._", False)],
)
def test_a_name_is_hidden_when_it_or_a_folder_above_begins_with_a_dot_or_underscore(
    path: str, hidden: bool
) -> None:
    assert is_hidden(path) == hidden
