"""The trainer image's large layers: the interpreter, the environment and the source, at their paths on this machine.

They have about 8 GB and are not part of any image. A lower directory of an overlay must be one real directory, so the
files are hard-linked into a separate tree. When uv or pip later replace a file in the environment, the layer keeps the
old one.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from spotune_testcluster.commands import run
from spotune_testcluster.errors import CannotRunHereError
from spotune_testcluster.store import Store, key_of

KINDS = ("python", "venv", "source")
SOURCES = ("api", "operator", "serve", "trainer")
# Prefixes that hold a whole system. A layer contains only the interpreter's part of them.
SHARED_PREFIXES = {Path("/usr"), Path("/usr/local")}
# Temporary file of Python while it writes a module's bytecode.
UNFINISHED_BYTECODE = "*.pyc.*"

Report = Callable[[str], None]


@dataclass(frozen=True)
class Environment:
    """A virtual environment and its interpreter.

    Attributes:
        venv: The environment's folder.
        prefix: The interpreter's prefix as pyvenv.cfg names it; may be a link.
        version: Major and minor, such as 3.11.
    """

    venv: Path
    prefix: Path
    version: str

    @classmethod
    def of(cls, repository: Path) -> "Environment":
        """Read the environment of a repository from its pyvenv.cfg (PEP 405).

        Raises:
            CannotRunHereError: The repository has no environment.
        """
        venv = repository / ".venv"
        if not (venv / "pyvenv.cfg").exists():
            raise CannotRunHereError(f"the trainer image needs {venv}, which does not exist: run make setup")
        pairs = [line.partition("=") for line in (venv / "pyvenv.cfg").read_text().splitlines()]
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        version = fields.get("version_info") or fields["version"]
        return cls(venv, Path(fields["home"]).parent, ".".join(version.split(".")[:2]))

    @property
    def library(self) -> Path:
        """Where its distributions are installed."""
        return self.venv / "lib" / f"python{self.version}" / "site-packages"


def get_layers(store: Store, repository: Path, report: Report) -> Mapping[str, Path]:
    """Return the directory of each layer by its kind. A layer is made if its content is new.

    Args:
        store: Keeps the layers.
        repository: The root of the checkout whose `.venv` and source the trainer image contains.
        report: Called with a line for each layer that has to be made.
    """
    environment = Environment.of(repository)

    def layer(kind: str, key: str, copy: Callable[[Path], None]) -> Path:
        def make(entry: Path) -> None:
            report(f"making the {kind} layer of the trainer image")
            tree = entry / "root"
            _make_folder(tree)
            copy(tree)

        return store.get(kind, key, make) / "root"

    return {
        "python": layer("python", _python_key(environment), lambda tree: _copy_python(environment, tree)),
        "venv": layer("venv", _venv_key(environment, repository), lambda tree: _link([environment.venv], tree)),
        "source": layer("source", _source_key(repository), lambda tree: _copy_source(repository, tree)),
    }


# Increase it if layers of the same files are made in another way.
_REVISION = 2


def _python_key(environment: Environment) -> str:
    prefix = environment.prefix.resolve()
    return key_of(
        _REVISION, str(environment.prefix), *_state([prefix / "bin", prefix / "lib" / f"python{environment.version}"])
    )


def _venv_key(environment: Environment, repository: Path) -> str:
    """The key changes with every `make setup`, and when a distribution is installed or removed by hand."""
    pins = repository / "constraints/dev.txt"
    said = [environment.venv / ".ready", environment.venv / "pyvenv.cfg", environment.library, environment.venv / "bin"]
    return key_of(_REVISION, pins.read_text() if pins.exists() else "", *_state(path for path in said if path.exists()))


def _source_key(repository: Path) -> str:
    return key_of(_REVISION, *_state(_source_files(repository)))


def _state(paths: Iterable[Path]) -> Iterator[tuple[str, ...]]:
    for path in paths:
        status = path.stat()
        yield (str(path), str(status.st_size), str(status.st_mtime_ns), str(status.st_mode))


def _source_files(repository: Path) -> Iterator[Path]:
    for name in SOURCES:
        for folder, _, files in os.walk(repository / name):
            paths = (Path(folder) / file for file in sorted(files))
            yield from (path for path in paths if not path.match(UNFINISHED_BYTECODE))


def _copy_python(environment: Environment, tree: Path) -> None:
    prefix = environment.prefix.resolve()
    if prefix in SHARED_PREFIXES:
        patterns = ("bin/python3*", f"lib/python{environment.version}", "lib/libpython3*")
        _link([path for pattern in patterns for path in sorted(prefix.glob(pattern))], tree)
    else:
        _link([prefix], tree)
    if environment.prefix != prefix:
        shown = _below(tree, environment.prefix)
        _make_folder(shown.parent)
        shown.symlink_to(prefix)


def _copy_source(repository: Path, tree: Path) -> None:
    """Copy the source, because its files are edited in place. Modification times are kept: bytecode depends on them."""
    for source in (repository / name for name in SOURCES):
        target = _below(tree, source)
        _make_folder(target.parent)
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns(UNFINISHED_BYTECODE))


def _link(sources: list[Path], tree: Path) -> None:
    """Put `sources` into `tree` at their own paths, as hard links if both are on one file system."""
    how = ["-al"] if _can_link(sources[0], tree) else ["-a", "--reflink=auto"]
    for source in sources:
        target = _below(tree, source)
        _make_folder(target.parent)
        run(["cp", *how, "--no-target-directory", str(source), str(target)], f"copying {source} to {target}")


def _can_link(source: Path, tree: Path) -> bool:
    """Whether files can be hard-linked. It makes a link, because two mounts of one file system have the same device."""
    folders = os.walk(source) if source.is_dir() else [(str(source.parent), [], [source.name])]
    file = next(Path(folder) / files[0] for folder, _, files in folders if files)
    probe = tree / ".link"
    try:
        os.link(file, probe, follow_symlinks=False)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    probe.unlink()
    return True


def _below(tree: Path, path: Path) -> Path:
    return tree / path.relative_to("/")


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, readable by all users: pods need not run as root, and the host protects /root.

    The mode of a folder in this layer replaces its mode in the base image, so /tmp gets the mode that it has there.
    """
    for missing in [path for path in (*reversed(folder.parents), folder) if not path.exists()]:
        missing.mkdir()
        missing.chmod(0o1777 if missing.name == "tmp" else 0o755)
