"""Contract types for import-linter: `ThirdParty` limits third-party imports, `NoCircles` forbids cycles.

The configuration file `.importlinter` uses these types.
"""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class ThirdParty(Contract):
    """Requires that `source_modules` and their submodules import no third-party package outside `allowed`."""

    type_name = "third_party"

    source_modules = fields.ListField(subfield=fields.ModuleField())
    allowed = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the third-party imports that are not allowed."""
        allowed = self.allowed | sys.stdlib_module_names
        found = []
        for source in self.source_modules:
            for importer in sorted({source.name} | graph.find_descendants(source.name)):
                for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                    if graph.is_module_squashed(imported) and imported.partition(".")[0] not in allowed:
                        lines = [
                            detail["line_number"]
                            for detail in graph.get_import_details(importer=importer, imported=imported)
                        ]
                        found.append((importer, imported, lines))
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that breaks the contract."""
        for importer, imported, lines in check.metadata["found"]:
            output.print_error(f"{importer} imports {imported} (line {', '.join(map(str, lines))}).")


class NoCircles(Contract):
    """Requires that no modules of `root` import each other in a cycle. Type-only imports count as imports."""

    type_name = "no_circles"

    root = fields.ModuleField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the imports that close a cycle."""
        modules = {
            name for name in graph.modules if name == self.root.name or name.startswith(f"{self.root.name}.")
        }
        imports = {
            name: sorted(graph.find_modules_directly_imported_by(name) & modules) for name in sorted(modules)
        }
        found = []
        for circle in _circles(imports):
            for importer in circle:
                found += [(importer, imported) for imported in imports[importer] if imported in circle]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print each import that is part of a cycle."""
        for importer, imported in check.metadata["found"]:
            output.print_error(f"{importer} and {imported} are in a circle: {importer} imports {imported}.")


def _circles(imports: dict[str, list[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in cycles, found by Tarjan's algorithm (1972)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for imported in imports[module]:
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            position = stack.index(module)
            members = stack[position:]
            del stack[position:]
            if len(members) > 1:
                circles.append(sorted(members))

    for module in imports:
        if module not in order:
            visit(module)
    return circles
