"""Lists and tables inside an option of a controller's name, where commas are taken."""


def parse_list(field: str, text: str | int) -> tuple[int, ...]:
    """Returns the whole numbers of a list such as `1+3+5`.

    Raises:
        ValueError: it is not such a list.
    """
    parts = str(text).split("+")
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"{field} must be whole numbers joined by +, such as 1+3+5; got {text!r}")
    return tuple(map(int, parts))


def parse_ranges(field: str, text: str) -> tuple[tuple[int, int | None, int], ...]:
    """Returns the (first, last, k) of a table such as `1-4@4+5-16@2+17-@0`; last may be None.

    Raises:
        ValueError: it is not such a table, or its ranges are not ascending from 1.
    """
    rows: list[tuple[int, int | None, int]] = []
    for part in str(text).split("+"):
        sizes, at, k = part.partition("@")
        first, dash, last = sizes.partition("-")
        is_range = at and k.isdigit() and first.isdigit() and (last.isdigit() or not last)
        if not is_range:
            raise ValueError(
                f"{field} must be ranges of batch sizes with a K, such as 1-4@4+5-16@2+17-@0; got "
                f"{part!r} in {text!r}"
            )
        end = int(last) if last else None if dash else int(first)
        rows.append((int(first), end, int(k)))
    for (low, high, _), after in zip(rows, [*rows[1:], None], strict=True):
        follows = after is None or (high is not None and high < after[0])
        if low < 1 or (high is not None and high < low) or not follows:
            raise ValueError(f"{field} must be ranges that ascend from 1 on; got {text!r}")
    return tuple(rows)
