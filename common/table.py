"""Text tables: the one place where columns are laid out."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], indent: str = "  ", gap: str = "   ") -> list[str]:
    """Lines whose columns are as wide as their widest cell: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=False))]
        lines.append((indent + gap.join(cells)).rstrip())
    return lines


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """The same as a Markdown table; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]
