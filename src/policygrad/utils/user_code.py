"""Code that a user names as `module:NAME` or `path/to/file.py:NAME`: loading it, and finding its name and place again."""

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
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

from policygrad.errors import ConfigError


def is_user_reference(name: str) -> bool:
    """Return True for a name in a module or a file, False for one of policygrad's own."""
    return ":" in name or name.endswith(".py")


def load_object(name: str, what: str, kind: type | tuple[type, ...] | None = None) -> Any:
    """Return the object that `module:NAME` or `path/to/file.py:NAME` names. Raises ConfigError if there is no such
    file, module or attribute, or loading it raises; with file, line and similar names.

    `what` starts error messages, which choose similar names by the expected `kind`; the caller checks the result.
    """
    path, colon, attribute = name.rpartition(":")
    if not colon or not attribute:
        _raise_no_attribute(load_module(path or name, what), path or name, "", what, kind)
    module = load_module(path, what)
    result: Any = module
    for part in attribute.split("."):
        if not hasattr(result, part):
            _raise_no_attribute(module, path, attribute, what, kind)
        result = getattr(result, part)
    return result


def load_module(path: str, what: str) -> Any:
    """Import a module by name or file, also from the current folder, like a script. Raises ConfigError like `load_object`."""
    if path.endswith(".py"):
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            siblings = [p.name for p in file.parent.glob("*.py")] if file.parent.is_dir() else []
            raise ConfigError(f"{what}: there is no file {file}: {_suggest(file.name, siblings, 'its folder has')}")
        module = load_file(str(file), what)
        _check_sibling_modules(file, what)
        return module
    add_cwd_to_path(path)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name and f"{path}.".startswith(f"{error.name}."):
            hint = _suggest(path, [p.stem for p in Path.cwd().glob("*.py")], "the current folder has")
            raise ConfigError(
                f"{what}: there is no module {error.name!r}: {hint}; a file elsewhere is path/to/file.py:NAME"
            ) from error
        raise ConfigError(f"{what}: {path} needs the module {error.name!r}: install it") from error
    except (Exception, SystemExit) as error:
        origin = error.filename if isinstance(error, SyntaxError) else None
        with suppress(ImportError, ValueError):
            spec = importlib.util.find_spec(path)
            origin = spec.origin if spec else None
        reason = describe_exception(error, origin)
        raise ConfigError(f"{what}: importing {origin or path} raised {reason}; fix that first") from error
    local, loaded = Path.cwd() / (path.replace(".", "/") + ".py"), getattr(module, "__file__", None)
    if local.is_file() and (loaded is None or Path(loaded).resolve() != local.resolve()):
        raise ConfigError(
            f"{what}: {path!r} is {loaded or 'a module of Python'}, not {local}, which has the same name: write the file, "
            f"{local.relative_to(Path.cwd())}:NAME"
        )
    return module


def import_path(kind: type) -> str:
    """Return `module:Class`, or `/path/to/file.py:Class` if it was loaded from a file, for `load_object`."""
    name = kind.__module__
    if name.startswith(FILE_MODULE):
        name = str(sys.modules[name].__file__)
    return f"{name}:{kind.__qualname__}"


def find_definition(thing: Any) -> str:
    """Return `path/to/file.py:12` of a class or a function, relative to the current folder if below it; "" without a source."""
    try:
        file, (rows, line) = inspect.getsourcefile(thing), inspect.getsourcelines(thing)
    except (OSError, TypeError):
        return ""
    decorators = next((i for i, row in enumerate(rows) if row.lstrip().startswith(("class ", "def "))), 0)
    return f"{relative_to_cwd(Path(file or ''))}:{line + decorators}"


def find_assignment(name: str) -> str:
    """Return `path/to/file.py:12` of the line with a module's `NAME = …`, or the file alone if there is no such line."""
    path, _, attribute = name.rpartition(":")
    file = getattr(load_module(path, name), "__file__", None)
    if not file:
        return path
    where = str(relative_to_cwd(Path(file)))
    for node in reversed(ast.parse(Path(file).read_text(encoding="utf-8")).body):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == attribute for target in targets):
                return f"{where}:{node.lineno}"
    return where


def relative_to_cwd(file: Path) -> Path:
    """Return the path relative to the current folder if the file is below it."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def _check_sibling_modules(file: Path, what: str) -> None:
    """Refuse a file that imports a sibling whose plain name another folder's module has taken in this process."""
    nodes = list(ast.walk(ast.parse(file.read_bytes())))
    names = {name.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for name in node.names}
    names |= {(node.module or "").partition(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    for name in sorted(names & {path.stem for path in file.parent.glob("*.py")}):
        loaded = getattr(sys.modules.get(name), "__file__", None)
        if loaded is not None and Path(loaded).resolve() != file.parent / f"{name}.py":
            raise ConfigError(
                f"{what}: {file} imports {name!r}, and in this process {name!r} is {loaded}, not {file.parent / name}.py. Rename "
                "one of the two."
            )


def _raise_no_attribute(
    module: Any, path: str, attribute: str, what: str, kind: type | tuple[type, ...] | None
) -> NoReturn:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and isinstance(value, kind or type)
        and getattr(value, "__module__", "") in (module.__name__, type(value).__module__)  # a class that it defines
    ]
    if not attribute:
        candidates = f"it has {', '.join(names)}" if names else "it has none"
        raise ConfigError(f"{what}: {path} is a module: write {path}:NAME; {candidates}")
    file = getattr(module, "__file__", None) or path
    raise ConfigError(f"{what}: there is no {attribute!r} in {file}: {_suggest(attribute, names, 'it has')}")


def _suggest(name: str, names: Iterable[str], prefix: str, cutoff: float = 0.5) -> str:
    """Return `did you mean 'x'?`, or the prefix and the first names."""
    names = sorted(names)
    similar = difflib.get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"did you mean {similar[0]!r}?" if similar else f"{prefix} {', '.join(names[:8]) or 'none'}"


# Functions by dotted path, or in a file that is not on the import path.

FILE_MODULE = "policygrad_file_"  # prefix of the names of modules that are loaded from a file


def add_cwd_to_path(module_name: str) -> None:
    """Add the current folder to the import path if it contains the module, as for a script there."""
    top, folder = module_name.partition(".")[0], Path.cwd()
    if top in sys.modules or str(folder) in sys.path:
        return
    if (folder / f"{top}.py").exists() or (folder / top).is_dir():
        sys.path.append(str(folder))


def import_function(dotted: str) -> Callable[..., Any]:
    """Import a reward function by its dotted path. Modules in the current folder are found, as by a script there.
    Raises ConfigError if there is no such module or function, or importing it raises."""
    module_name, _, function = dotted.rpartition(".")
    return _get_function(load_module(module_name, f"reward {dotted!r}"), function, module_name)


def _get_function(module: Any, name: str, where: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise ConfigError(f"reward: {name!r} in {where} is {type(function).__name__}, not a function")
    names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    raise ConfigError(
        f"reward: there is no function {name!r} in {where}; {_suggest(name, names, 'it has', cutoff=0.4)}"
    )


class FileFunction:
    """A function in a file that is not on the import path. A worker receives path and name, and loads the file itself."""

    def __init__(self, path: str, name: str) -> None:
        """Execute the file, once per process. The file's folder is added to the import path."""
        self.path, self.name = path, name
        self.__wrapped__ = self.function = _get_function(load_file(path), name, path)
        self.reward_options: dict[str, Any] = getattr(self.function, "reward_options", {})
        self.reward_prepare: Callable[[], object] | None = getattr(self.function, "reward_prepare", None)

    def __call__(self, *args: Any, **columns: Any) -> Any:
        return self.function(*args, **columns)

    def __reduce__(self) -> tuple[type[FileFunction], tuple[str, str]]:
        return FileFunction, (self.path, self.name)


def load_file(path: str, what: str = "reward") -> Any:
    """Execute a Python file, once per process, and return its module, under a name that is unique to the path.

    `what` starts error messages. Raises ConfigError if there is no such file, or executing it raises; with the line.
    """
    module_name = FILE_MODULE + hashlib.sha256(path.encode()).hexdigest()[:12]
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path, loader=_Uncached(module_name, path))
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


class _Uncached(SourceFileLoader):
    """Compiles the file as it is now. Python's own cache of compiled files takes one of the same size that was changed within the
    same second for the file before the change: rewards would be those of code that is no longer there.
    """

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def describe_exception(error: BaseException, path: str | None) -> str:
    """Return `KeyError: 'x' (line 7)`, with the line in the user's file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    if isinstance(error, SyntaxError) and error.filename == path:
        lines = [error.lineno]
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {message}" + (f" (line {lines[-1]})" if lines else "")
