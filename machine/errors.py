"""Words for the person who made the mistake."""
import difflib


def known(what, name, table):
    """The row of a table, or an answer that lists them all."""
    if name not in table:
        near = difflib.get_close_matches(name, table, 1)
        raise ValueError(f"unknown {what} {name!r}{f', did you mean {near[0]}?' if near else '.'} "
                         f"There are: {', '.join(table)}")
    return table[name]
