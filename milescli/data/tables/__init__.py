"""One data file as a table, by its suffix. The formats lie beside this file."""

from __future__ import annotations

from pathlib import Path

from milescli.data.tables.base import Record, Table, check_file

__all__ = ["Record", "Table", "check_file", "open_table"]


def open_table(path: Path) -> Table:
    """The rows of a file that `check_file` let pass. Raises DataError where it is of no format
    that is read."""
    if path.suffix in (".parquet", ".arrow"):
        from milescli.data.tables.columnar import ColumnarTable

        return ColumnarTable(path)
    if path.suffix == ".csv":
        from milescli.data.tables.comma_separated import CsvTable

        return CsvTable(path)
    from milescli.data.tables.json_lines import JsonLinesTable

    return JsonLinesTable(path)
