"""The house rules that a machine can check, each a function that lists its faults.

A check takes the root of a source tree, so the tests can try it on a planted fault,
and answers with one line per fault that says where it is and what the rule is.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

# From the top down: a room imports only itself and rooms on lower floors.
FLOORS = (
    ("__main__",),
    ("cli", "_rooms"),
    ("examples",),
    ("testing",),
    ("watch",),
    ("run",),
    ("checkpoint",),
    ("graph",),
    ("metrics", "data"),
    ("step",),
    ("model", "devices"),
    ("_types", "_errors"),
)
# These read as a user's own script would, through the front door.
USER_ROOMS = ("cli", "examples")
FRONT_DOOR = "the front door"

MAX_MODULE_LINES = 450
MAX_FUNCTION_LINES = 70
MAX_SUPPRESSIONS_PER_THOUSAND_LINES = 3

# No pattern here matches its own text, so this file keeps the rules it states.
_MACHINE_PATH = re.compile(r"(?<![\w/.~])/(?:work|root|home|Users)/")
_REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.(?:org|io)|pythonhosted\.(?:org)|npmjs\.(?:org|com)"
    r"|download\.pytorch\.(?:org)|deb\.debian\.(?:org))\b"
)
_SUPPRESSION = re.compile(
    r"#\s*(?P<checker>(?:type|pyright):\s*ignore|(?:ruff:\s*)?noqa|pyright:\s*\w+"
    r"|ruff:\s*(?:ignore|disable))(?P<rule>\s*\[[\w, -]+\]|:\s*[A-Z]+\d+)?"
)
_CODE_BLOCK = re.compile(r"^```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```", re.M | re.S)


def python_files(root: Path, *folders: str) -> list[Path]:
    """The Python files under some folders of the tree, sorted."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def repository_files(root: Path) -> list[Path]:
    """The files that git tracks or would track."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = (root / name for name in listed.stdout.split("\0") if name)
    return [path for path in paths if path.is_file()]


def import_faults(root: Path) -> list[str]:
    """Imports that do not run downwards through ``FLOORS``."""
    return [
        f"{path.relative_to(root)}:{line}: `{room}` must not import `{target}`"
        for path in python_files(root, "fuelflow")
        for room in [_room(_module_name(root, path))]
        if room != FRONT_DOOR
        for line, module in _imported_modules(root, path)
        for target in [_room(module)]
        if not _may_import(room, target)
    ]


def room_faults(root: Path) -> list[str]:
    """Modules that stand in no room of ``FLOORS``."""
    names = {_room(_module_name(root, p)) for p in python_files(root, "fuelflow")}
    known = {FRONT_DOOR, *(room for floor in FLOORS for room in floor)}
    return [f"`fuelflow/{name}` has no floor" for name in sorted(names - known)]


def _may_import(room: str, target: str) -> bool:
    if target == FRONT_DOOR:
        return room in USER_ROOMS
    return target == room or _floor(target) > _floor(room)


def _floor(room: str) -> int:
    floors = (number for number, rooms in enumerate(FLOORS) if room in rooms)
    return next(floors, -1)


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else FRONT_DOOR


def _module_name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(root: Path, path: Path) -> Iterator[tuple[int, str]]:
    """The line and name of each module of fuelflow that a file imports, anywhere."""
    for node in ast.walk(_parsed(path)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=level):
                base = _absolute(_module_name(root, path), path, module, level)
                modules = [_target(root, base, alias.name) for alias in names]
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if (
                ast.unparse(function).endswith("import_module")
            ):
                modules = [name]
            case _:
                continue
        for module in modules:
            if module == "fuelflow" or module.startswith("fuelflow."):
                yield node.lineno, module


def _absolute(here: str, path: Path, module: str | None, level: int) -> str:
    if level == 0:
        return module or ""
    # A package counts as its own first level.
    levels_up = level - 1 if path.name == "__init__.py" else level
    parts = here.split(".")
    return ".".join([*parts[: len(parts) - levels_up], *filter(None, [module])])


def _target(root: Path, base: str, name: str) -> str:
    """The module that ``from base import name`` reaches: ``name`` may be one."""
    folder = root.joinpath(*base.split("."), name)
    is_module = folder.is_dir() or folder.with_suffix(".py").is_file()
    return f"{base}.{name}" if is_module else base


def front_door_faults(root: Path) -> list[str]:
    """Whatever ``fuelflow/__init__.py`` holds besides the one face it should be."""
    door = _parsed(root / "fuelflow/__init__.py")
    has_docstring = ast.get_docstring(door) is not None
    faults = (
        [] if has_docstring else ["line 1: the front door opens with its docstring"]
    )
    bound, exported = set(), None
    for node in _opened(door.body[has_docstring:]):
        match node:
            case ast.Import(names=names) | ast.ImportFrom(names=names, level=0):
                bound |= {alias.asname or alias.name for alias in names}
            case ast.Assign(targets=[ast.Name(id="__version__")]):
                bound.add("__version__")
            case ast.Assign(targets=[ast.Name(id="__all__")]) if exported is None:
                exported = ast.literal_eval(node.value)
            case _:
                faults.append(f"line {node.lineno}: neither import nor `__all__`")
    if exported is None:
        return [*faults, "`__all__` is missing"]
    if list(exported) != sorted(set(exported)):
        faults.append("`__all__` must be sorted, each name once")
    public = {name for name in bound if not name.startswith("_")} - {"TYPE_CHECKING"}
    faults += [f"`{name}` is not in `__all__`" for name in sorted(public - {*exported})]
    faults += [f"`{name}` is not imported" for name in sorted({*exported} - bound)]
    return faults


def _opened(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, those that only type checkers read among them."""
    for node in statements:
        match node:
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), body=body, orelse=[]):
                yield from body
            case _:
                yield node


def size_faults(root: Path) -> list[str]:
    """Modules and functions of the library that have grown too long."""
    faults = []
    for path in python_files(root, "fuelflow"):
        name, lines = path.relative_to(root), len(path.read_text().splitlines())
        if lines > MAX_MODULE_LINES:
            faults.append(f"{name}: {lines} lines, at most {MAX_MODULE_LINES}")
        for node in ast.walk(_parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                faults.append(
                    f"{name}:{node.lineno}: `{node.name}` has {lines} lines, "
                    f"at most {MAX_FUNCTION_LINES}"
                )
    return faults


def suppression_faults(root: Path, *folders: str) -> list[str]:
    """Suppressions that name no rule, and all of them where they are too many."""
    found, num_lines = [], 0
    for path in python_files(root, *folders):
        source = path.read_text()
        num_lines += len(source.splitlines())
        for line, comment in _comments(source):
            if match := _SUPPRESSION.search(comment):
                found.append((f"{path.relative_to(root)}:{line}", match))
    faults = [f"{at}: names no rule" for at, match in found if not match["rule"]]
    if found and 1000 * len(found) >= MAX_SUPPRESSIONS_PER_THOUSAND_LINES * num_lines:
        places = ", ".join(at for at, _ in found)
        faults.append(f"{len(found)} suppressions in {num_lines} lines: {places}")
    return faults


def _comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def machine_faults(root: Path, files: Iterable[Path]) -> list[str]:
    """Lines that hold only on one machine: its paths, its package registries."""
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in files
        for number, line in enumerate(_text(path).splitlines(), start=1)
        if _MACHINE_PATH.search(line) or _REGISTRY_HOST.search(line)
    ]


def _text(path: Path) -> str:
    """A file's text; bytes that are none, as in a picture, match no rule."""
    return path.read_bytes().decode(errors="replace")


class CodeBlock(NamedTuple):
    """A fenced block of a Markdown file and the line its code starts on."""

    language: str
    line: int
    code: str


def code_blocks(path: Path, *languages: str) -> list[CodeBlock]:
    """The fenced blocks of a Markdown file in some languages, in order."""
    text = path.read_text() if path.exists() else ""
    return [
        CodeBlock(
            language=match["language"],
            line=text.count("\n", 0, match.start("code")) + 1,
            code=match["code"],
        )
        for match in _CODE_BLOCK.finditer(text)
        if match["language"] in languages
    ]


def readme_test_commands(root: Path) -> list[str]:
    """The shell lines of the README that run tests."""
    blocks = code_blocks(root / "README.md", "sh", "bash", "shell", "console")
    lines = (line.strip() for block in blocks for line in block.code.splitlines())
    return [line for line in lines if "pytest" in line]


def ci_faults(root: Path) -> list[str]:
    """Test commands of the README that ``.ci/run`` does not run word for word."""
    commands = readme_test_commands(root)
    if not commands:
        return ["README.md: shows no command that runs the tests"]
    run = {line.strip() for line in (root / ".ci/run").read_text().splitlines()}
    return [f".ci/run: lacks `{line}`" for line in commands if line not in run]


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))
