"""docs/index.html, the page to touch: page.html with the sources that it shows beside the paper.

    <!-- source gril.window gril.gril_loop -->      Python, as it stands in the project now
    <!-- javascript recur readOut -->               the page's own functions, which it shows itself
"""
import html
import inspect
import re
import textwrap
from pathlib import Path
from pkgutil import resolve_name

from machine.errors import Missing

TEMPLATE = Path(__file__).with_name("page.html")
PAGE = TEMPLATE.parent.parent / "docs/index.html"


def build():
    """The page as text."""
    text = re.sub(r"<!-- source (.+?) -->", python, TEMPLATE.read_text(encoding="utf-8"))
    return re.sub(r"<!-- javascript (.+?) -->", javascript, text)


def python(found):
    sources = []
    for name in found[1].split():
        module, function = name.split(".", 1)
        try:
            source = inspect.getsource(resolve_name(name))
        except AttributeError:
            raise Missing(f"{TEMPLATE.name} shows {name}, and {module}.py has no {function}: "
                          f"write its new name into {TEMPLATE}") from None
        source = html.escape(textwrap.dedent(source).rstrip())
        sources.append(f"<h4>{module}.py: {function}</h4>\n<pre>{source}</pre>")
    return "<div>\n" + "\n".join(sources) + "\n</div>"


def javascript(found):
    names = found[1].split()
    return (f"<div>\n<h4>this page: {', '.join(names)}</h4>\n"
            f"<pre data-functions=\"{' '.join(names)}\"></pre>\n</div>")


def write(quick=False):
    """docs/index.html, always whole: there is nothing to train."""
    text = build()
    PAGE.write_text(text, encoding="utf-8")
    print(f"page      {PAGE.relative_to(PAGE.parent.parent)}, {len(text.encode()):,} bytes")
