"""A contract type for import-linter that limits a package's third-party imports.

`.importlinter` refers to it.
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
