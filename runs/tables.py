"""Tables for a terminal of any width: numbers are never cut, names fold."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import PaddingDimensions
from rich.table import Table
from rich.text import Text

NARROWEST = 12  # columns that a name is folded to at most
AROUND = 2  # columns around a cell: its padding, and what divides it from the next


class NumberTable(Table):
    """A table whose names fold where room is short, and whose numbers are never cut.

    Where there is no room for the numbers beside each other, each row becomes lines of text.

    Args:
        title: Above it.
        names: Headers of the columns of text, which come first.
        numbers: Headers of the columns of numbers.
        padding: Of cells, as of rich's tables.
    """

    def __init__(
        self,
        title: str | None,
        names: Sequence[str],
        numbers: Sequence[str] = (),
        padding: PaddingDimensions = (0, 1, 0, 0),
    ):
        super().__init__(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=padding)
        for header in names:
            self.add_column(header, overflow="fold")
        for header in numbers:
            self.add_column(header, justify="right", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows as text where that has not the room."""
        for column in self.columns:
            cells = (column.header, *column.cells)
            widest = max(widest_line(console.render_str(str(cell))) for cell in cells)
            column.min_width = widest if column.no_wrap else min(widest, NARROWEST)
        needed = sum((column.min_width or 0) + AROUND for column in self.columns) + AROUND
        if needed <= options.max_width:
            return super().__rich_console__(console, options)
        return self.as_text(console)

    def as_text(self, console: Console) -> RenderResult:
        """Each row as text: what it is of, and its numbers by name."""
        if self.title:
            yield Text(str(self.title), style="italic")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            texts = [console.render_str(str(cell)).plain.strip() for cell in row]
            pairs = list(zip(self.columns, texts, strict=True))
            names = [text for column, text in pairs if text and not column.no_wrap]
            given = [(column.header, text) for column, text in pairs if text and column.no_wrap]
            numbers = [f"{header} {text}" for header, text in given]
            parts = (", ".join(names), "; ".join(numbers))
            yield Text(": ".join(filter(None, parts)), overflow="fold")


def widest_line(text: Text) -> int:
    """Columns that the widest line of a text takes."""
    return max((line.cell_len for line in text.split()), default=0)
