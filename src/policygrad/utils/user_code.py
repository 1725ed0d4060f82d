"""What a user wrote and names here: `module:NAME`, or `path/to/file.py:NAME`; loaded, and written so that it is found again."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from policygrad.errors import ConfigError


def is_user_reference(name: str) -> bool:
    """Whether a name is one of a module or a file, not of policygrad."""
    return ":" in name or name.endswith(".py")


def load_object(name: str, what: str, kind: type | tuple[type, ...] | None = None) -> Any:
    """The object called `name`.

    what: begins the message of a refusal. kind: what is looked for; it says which names are near, the caller checks what it gets.

    Raises:
        ConfigError: no such file, module or attribute, or one that raises when loaded, with file, line and near names.
    """
    path, colon, attribute = name.rpartition(":")
    if not colon or not attribute:
        _no_attribute(load_module(path or name, what), path or name, "", what, kind)
    module = load_module(path, what)
    found: Any = module
    for word in attribute.split("."):
        if not hasattr(found, word):
            _no_attribute(module, path, attribute, what, kind)
        found = getattr(found, word)
    return found


def load_module(path: str, what: str) -> Any:
    """The module of a name or of a file; one in the current folder counts, as it would for a script there.

    Raises:
        ConfigError: as `load_object`.
    """

    if path.endswith(".py"):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            here = [str(p.relative_to(file.parent)) for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
            raise ConfigError(f"{what}: there is no file {file}: {_nearest(file.name, here, 'its folder has')}")
        module = load_file(str(file), what)
        _check_neighbours(file, what)
        return module
    add_cwd_to_path(path)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and f"{path}.".startswith(f"{error.name}."):
            near = _nearest(path, [p.stem for p in Path.cwd().glob("*.py")], "the current folder has")
            raise ConfigError(
                f"{what}: there is no module {error.name!r}: {near}; a file elsewhere is path/to/file.py:NAME"
            ) from error
        raise ConfigError(f"{what}: {path} needs the module {error.name!r}: install it") from error
    except (Exception, SystemExit) as error:
        origin = _file_of(error, path)
        said = describe_exception(error, origin)
        raise ConfigError(f"{what}: importing {origin or path} raised {said}; fix that first") from error
    _check_which(module, path, what)
    return module


def import_path(kind: type) -> str:
    """`module:Class`, or `/path/to/file.py:Class` of a file that was loaded as such: what `load_object` finds again."""

    name = kind.__module__
    if name.startswith(FILE_MODULE):
        name = str(sys.modules[name].__file__)
    return f"{name}:{kind.__qualname__}"


def find_definition(thing: Any) -> str:
    """`path/to/file.py:12` of a class or a function, from the current folder where it is below it; "" where there is no source."""
    try:
        file, (rows, line) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return ""
    decorators = next((i for i, row in enumerate(rows) if row.lstrip().startswith(("class ", "def "))), 0)
    return f"{_shown(Path(file or ''))}:{line + decorators}"


def find_assignment(name: str) -> str:
    """`path/to/file.py:12` of the line that gives a module's `NAME = …`; of the file alone where no line does."""
    path, _, attribute = name.rpartition(":")
    file = getattr(load_module(path, name), "__file__", None)
    if not file:
        return path
    shown = _shown(Path(file))
    lines = [node.lineno for node in _assignments(Path(file)) if attribute in _targets(node)]
    return f"{shown}:{lines[-1]}" if lines else str(shown)


def _shown(file: Path) -> Path:
    """From the current folder where it is below it."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _assignments(file: Path) -> list[ast.Assign | ast.AnnAssign]:
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    return [node for node in nodes if isinstance(node, (ast.Assign, ast.AnnAssign))]


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _check_which(module: Any, path: str, what: str) -> None:
    """A module of the current folder that another one of its name hides would be taken for it in silence."""
    here, loaded = Path.cwd() / (path.replace(".", "/") + ".py"), getattr(module, "__file__", None)
    if here.is_file() and (loaded is None or Path(loaded).resolve() != here.resolve()):
        raise ConfigError(
            f"{what}: {path!r} is {loaded or 'a module of Python'}, not {here}, which has the same name: write the file, "
            f"{here.relative_to(Path.cwd())}:NAME"
        )


def _check_neighbours(file: Path, what: str) -> None:
    """A file imports its neighbours by plain names, of which a process has one each: another folder's would be taken in silence."""
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    names = {name.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names |= {(node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    for name in sorted(names & {path.stem for path in file.parent.glob("*.py")}):
        taken = getattr(sys.modules.get(name), "__file__", None)
        if taken is not None and Path(taken).resolve() != file.parent / f"{name}.py":
            raise ConfigError(
                f"{what}: {file} imports {name!r}, and {name!r} is {taken} in this process, not {file.parent / name}.py: give one "
                "of the two another name"
            )


def _file_of(error: BaseException, path: str) -> str | None:
    """The file that was being imported: the module's own where a frame or the syntax error says so."""
    spec = None
    try:
        spec = importlib.util.find_spec(path)
    except (ImportError, ValueError):
        return error.filename if isinstance(error, SyntaxError) else None
    return spec.origin if spec else None


def _no_attribute(module: Any, path: str, attribute: str, what: str, kind: type | tuple[type, ...] | None) -> NoReturn:
    names = [n for n, value in vars(module).items() if not n.startswith("_") and _is(value, kind, module)]
    file = getattr(module, "__file__", None) or path
    if not attribute:
        known = f"it has {', '.join(names)}" if names else "it has none"
        raise ConfigError(f"{what}: {path} is a whole file: write {path}:NAME; {known}")
    raise ConfigError(f"{what}: there is no {attribute!r} in {file}: {_nearest(attribute, names, 'it has')}")


def _is(value: Any, kind: type | tuple[type, ...] | None, module: Any) -> bool:
    """Whether a module's member may be what was meant: of the kind, and a class that is defined there."""
    return isinstance(value, kind or type) and getattr(value, "__module__", "") in (
        module.__name__,
        type(value).__module__,
    )


def _nearest(name: str, known: Iterable[str], has: str) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"{has} {', '.join(known[:8]) or 'none'}"


# Code of a user's own: a function by its dotted path, or in a file that no import path leads to.

FILE_MODULE = "policygrad_file_"
"""Begins the names of modules that are files which no import path leads to."""


def add_cwd_to_path(module_name: str) -> None:
    """Puts the current folder on the import path if it holds the module, as it would be for a script there."""
    top, here = module_name.partition(".")[0], Path.cwd()
    if top in sys.modules or str(here) in sys.path:
        return
    if (here / f"{top}.py").exists() or (here / top).is_dir():
        sys.path.append(str(here))


def import_function(dotted: str) -> Callable[..., Any]:
    """A function by its dotted path; a module in the current folder counts, as it would for a script there."""
    module_name, _, function = dotted.rpartition(".")
    add_cwd_to_path(module_name)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"reward {dotted!r}: there is no module {error.name!r}; install it, run from the folder that holds it, "
                "or write path/to/file.py:function"
            ) from error
        raise ConfigError(f"reward {dotted!r}: {module_name} needs the module {error.name!r}; install it") from error
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(
            f"reward {dotted!r}: importing {module_name} raised {kind}: {error}; fix that first"
        ) from error
    return _member(module, function, module_name)


def _member(module: Any, name: str, where: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        found: Callable[..., Any] = function
        return found
    if function is not None:
        raise ConfigError(f"reward: {name!r} in {where} is {type(function).__name__}, not a function")
    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:8]) or 'no functions'}"
    raise ConfigError(f"reward: there is no function {name!r} in {where}; {hint}")


@dataclass(frozen=True)
class FileFunction:
    """A function of a file that no import path leads to. A worker gets path and name, and loads the file itself."""

    path: str
    name: str
    function: Callable[..., Any]

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.function

    @property
    def reward_options(self) -> dict[str, Any]:
        return getattr(self.function, "reward_options", {})

    @property
    def reward_prepare(self) -> Callable[[], object] | None:
        return getattr(self.function, "reward_prepare", None)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        return self.function(*args, **columns)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str]]:
        return FileFunction.load, (self.path, self.name)

    @classmethod
    def load(cls, path: str, name: str) -> FileFunction:
        """Execute the file (once per process) and take the function; the file's folder joins the import path."""
        return cls(path, name, _member(load_file(path), name, path))


def load_file(path: str, what: str = "reward") -> Any:
    """The module of a Python file, executed once per process under a name of its own: two files of one name are two modules.

    what: begins the message of a refusal. Raises ConfigError: no such file, or one that raises, with its line.
    """
    module_name = FILE_MODULE + hashlib.sha256(path.encode()).hexdigest()[:12]
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"{what}: there is no file {path}; check the path before the colon")
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"{what}: loading {path} raised {describe_exception(error, path)}; fix that first") from error
    return module


def describe_exception(error: BaseException, path: str | None) -> str:
    """`KeyError: 'x' (line 7)`: what code of a user's raised, and where in the file it did."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {said}" + (f" (line {lines[-1]})" if lines else "")
