"""The commands of the command line: where each one lives, loaded only when it is asked for.

Commands of this package are listed here; those of the trainer and the operator are entry points of the group
``spotune.cli.plugins``, so that this package imports neither of them.
"""

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from spotune.errors import UsageError

ENTRY_POINT_GROUP = "spotune.cli.plugins"
_OWN_COMMANDS = {
    "crd": "spotune.cli.crd:crd",
    "plan": "spotune.cli.plan:plan",
    "report": "spotune.cli.report:report",
    "simulate": "spotune.cli.simulate:simulate",
}
_PACKAGE_PREFIX = "spotune_"


@dataclass(frozen=True)
class CommandSource:
    """Where a command lives.

    Attributes:
        name: Name on the command line.
        target: ``module:attribute``, a function for typer or a ``typer.Typer`` with commands of its own.
    """

    name: str
    target: str

    @property
    def extra(self) -> str:
        """The extra that installs what the command needs, ``trainer`` for ``spotune_trainer``; empty for our own."""
        package = self.target.partition(":")[0].partition(".")[0]
        return package.removeprefix(_PACKAGE_PREFIX) if package.startswith(_PACKAGE_PREFIX) else ""

    def load(self) -> Any:
        """Imports the function or typer app.

        Raises:
            UsageError: A package that it needs is not installed; says what to install.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise self.missing_package(error) from error
        except AttributeError as error:
            raise UsageError(f"spotune {self.name} is missing from this installation: reinstall spotune") from error

    def missing_package(self, error: ModuleNotFoundError) -> UsageError:
        """What to say when a module was not found while the command was loaded or ran."""
        needs, missing = f"spotune {self.name} needs", error.name or "?"
        if self.extra and not missing.startswith("spotune"):
            package, remedy = missing.partition(".")[0], f"pip install 'spotune[{self.extra}]'"
            return UsageError(f"{needs} the Python package {package}, which is not installed: {remedy}")
        return UsageError(f"{needs} {missing}, which is missing from this installation: reinstall spotune")


def find_commands() -> dict[str, CommandSource]:
    """All commands that live outside the module of the command line, by name; imports none of them."""
    found = [CommandSource(name, target) for name, target in _OWN_COMMANDS.items()]
    found += [CommandSource(point.name, point.value) for point in entry_points(group=ENTRY_POINT_GROUP)]
    return {source.name: source for source in sorted(found, key=lambda source: source.name)}
