"""Prints how the folders of each package import one another, and every import cycle: `python -m tests.import_graph`.

Lazy imports and those under `TYPE_CHECKING` count. Exit code 1 when there is a cycle, of folders or of modules.
"""

import sys
from collections.abc import Callable, Iterable
from graphlib import CycleError, TopologicalSorter

import grimp

PACKAGES = ("spotune", "spotune_client", "spotune_operator", "spotune_serve", "spotune_trainer")

Graph = dict[str, set[str]]
"""What each node imports."""


def module_graph(package: str) -> Graph:
    """What each module of a package imports of the same package, `__init__` modules included."""
    graph = grimp.build_graph(package, cache_dir=None)
    modules = graph.modules - {package}
    return {module: graph.find_modules_directly_imported_by(module) & modules for module in modules}


def folder_graph(modules: Graph, folder: Callable[[str], str]) -> Graph:
    """What each folder imports of the others."""
    folders: Graph = {}
    for module, imported in modules.items():
        folders.setdefault(folder(module), set()).update(map(folder, imported))
    return {folder: imported - {folder} for folder, imported in folders.items()}


def top_folder(module: str) -> str:
    """The first name below the package."""
    return module.split(".")[1]


def folder_of(modules: Graph) -> Callable[[str], str]:
    """Maps a module to its folder; a folder's `__init__` and a module at the package's root stand for themselves."""
    folders = {module.rpartition(".")[0] for module in modules}
    return lambda module: module if module in folders or module.count(".") == 1 else module.rpartition(".")[0]


def find_cycle(graph: Graph) -> list[str]:
    """The nodes of one cycle, the first one again at its end; empty when there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle: list[str] = error.args[1]
        return cycle
    return []


def levels(graph: Graph) -> Iterable[list[str]]:
    """Nodes by level, the lowest first: a node imports nodes of the levels below its own alone."""
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    while ready := sorter.get_ready():
        yield sorted(ready)
        sorter.done(*ready)


def cycles(package: str) -> list[list[str]]:
    """One cycle each of top-level folders, of all folders, and of modules, where there is one."""
    modules = module_graph(package)
    graphs = [folder_graph(modules, top_folder), folder_graph(modules, folder_of(modules)), modules]
    return [cycle for graph in graphs if (cycle := find_cycle(graph))]


def main() -> int:
    """Print the graph and the cycles; return the exit code."""
    found = 0
    for package in PACKAGES:
        tops = folder_graph(module_graph(package), top_folder)
        print(f"{package}: {len(tops)} folders and root modules, {sum(map(len, tops.values()))} imports between them")
        bad = cycles(package)
        found += len(bad)
        for cycle in bad:
            print(f"  cycle: {' -> '.join(cycle)}")
        if not find_cycle(tops):
            for level, nodes in reversed(list(enumerate(levels(tops)))):
                for node in nodes:
                    print(f"  {level}  {node:<18} {' '.join(sorted(tops[node]))}".rstrip())
    print(f"{found} cycles")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
