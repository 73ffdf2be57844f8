"""Finds the commands of all installed packages, and imports a command only when it is used.

Commands of this package are listed here. Trainer and operator register theirs as entry points of the group
``spotune.commands``, so this package does not import them.
"""

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from spotune.errors import UsageError

ENTRY_POINT_GROUP = "spotune.commands"
_OWN_COMMANDS = {
    "crd": "spotune.cli.crd:crd",
    "plan": "spotune.cli.plan:plan",
    "report": "spotune.cli.report:report",
    "simulate": "spotune.cli.simulate:simulate",
}
_PACKAGE_PREFIX = "spotune_"


@dataclass(frozen=True)
class CommandSource:
    """Where a command is implemented.

    Attributes:
        name: Name on the command line.
        target: ``module:attribute``, a function for typer or a ``typer.Typer`` with commands of its own.
    """

    name: str
    target: str

    @property
    def extra(self) -> str:
        """The extra that installs the package: ``trainer`` for ``spotune_trainer``; empty for this package."""
        package = self.target.partition(":")[0].partition(".")[0]
        return package.removeprefix(_PACKAGE_PREFIX) if package.startswith(_PACKAGE_PREFIX) else ""

    def load(self) -> Any:
        """Import the function or typer app.

        Raises:
            UsageError: A required package is not installed; the message says what to install.
        """
        module, _, attribute = self.target.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise self.missing_package(error) from error
        except AttributeError as error:
            raise UsageError(f"spotune {self.name} is missing from this installation: reinstall spotune") from error

    def missing_package(self, error: ModuleNotFoundError) -> UsageError:
        """The error for a module that was not found while the command was loaded or ran."""
        requirement, missing = f"spotune {self.name} needs", error.name or "?"
        if self.extra and not missing.startswith("spotune"):
            package, remedy = missing.partition(".")[0], f"pip install 'spotune[{self.extra}]'"
            return UsageError(f"{requirement} the Python package {package}, which is not installed: {remedy}")
        return UsageError(f"{requirement} {missing}, which is missing from this installation: reinstall spotune")


def find_commands() -> dict[str, CommandSource]:
    """All commands except ``validate`` by name, without importing them."""
    found = [CommandSource(name, target) for name, target in _OWN_COMMANDS.items()]
    found += [CommandSource(point.name, point.value) for point in entry_points(group=ENTRY_POINT_GROUP)]
    return {source.name: source for source in sorted(found, key=lambda source: source.name)}
