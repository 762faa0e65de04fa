"""The figures in README and docs, from the files in `benchmarks/results`.

    python -m benchmarks.text           # writes them into the documents
    python -m benchmarks.text --check   # says which are not what the files say, as `make lint` does

In a document a figure stands between `<!--=name-->` and `<!--/-->`, where `name` is one of `benchmarks.figures`.
Columns of tables that are headed "figure" hold nothing else with a number in it; and no number with a unit stands
anywhere but between such marks, in code, or in `benchmarks/given.txt`, which has what is set and not measured.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ages import older
from benchmarks.figures import FIGURES, PASSING

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FIGURE = re.compile(r"<!--=([\w.]+)-->(.*?)<!--/-->", re.DOTALL)
_COLUMN = "figure"  # heading of a column that is made of figures alone
_CODE = re.compile(r"```.*?```|`[^`\n]*`|<!--.*?-->", re.DOTALL)
_MEASURE = re.compile(r"\b\d[\d,.]*\s*(?:%|(?:ns|us|ms|s|seconds|minutes|hours|times|kB|[KMG]i?B)\b)")
GIVEN = (Path(__file__).parent / "given.txt").read_text(encoding="utf-8").splitlines()


def written(text: str) -> str:
    """A document with the figures that the files say."""
    return _FIGURE.sub(lambda match: f"<!--={match[1]}-->{FIGURES[match[1]]()}<!--/-->", text)


def complaints(text: str) -> Iterator[str]:
    """What is wrong with the figures of a document."""
    for match in _FIGURE.finditer(text):
        name, found = match.groups()
        if name not in FIGURES:
            yield f"{name!r} is no figure of benchmarks/figures"
        elif name not in PASSING and FIGURES[name]() != found:
            yield f"{name}: the text says {found.strip()!r}, the file {FIGURES[name]().strip()!r}"
    for measure in _loose(text):
        yield f"{measure!r} comes from no file, and is not in benchmarks/given.txt"
    for line, cell in _cells(text):
        rest = _FIGURE.sub("", cell)
        if re.search(r"\d", rest):
            yield f"line {line}: {rest.strip()!r} is a figure that comes from no file"


def _loose(text: str) -> Iterator[str]:
    """Numbers with a unit that stand in a document's prose, with the words around them."""
    prose = _CODE.sub("", _FIGURE.sub("", text))
    prose = " ".join(line.strip() for line in prose.splitlines() if not line.startswith("    "))
    for phrase in GIVEN:
        prose = prose.replace(phrase, "")
    for match in _MEASURE.finditer(prose):
        yield prose[max(match.start() - 30, 0) : match.end() + 20]


def _cells(text: str) -> Iterator[tuple[int, str]]:
    """Cells of columns of figures, with their lines."""
    place = None
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith("|"):
            place = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if _COLUMN in cells:
            place = cells.index(_COLUMN)
        elif place is not None and place < len(cells) and not set(cells[place]) <= {"-", ":"}:
            yield number, cells[place]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.text", description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a document says something else")
    given = parser.parse_args()
    wrong, used = [], set()
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        used |= {match[1] for match in _FIGURE.finditer(text)}
        if not given.check:
            text = written(text)
            path.write_text(text, encoding="utf-8")
        wrong += [f"{path.relative_to(ROOT)}: {complaint}" for complaint in complaints(text)]
    wrong += [f"benchmarks/figures: no document has the figure {name!r}" for name in FIGURES if name not in used]
    aged = older()
    if given.check and aged:
        print(f"warning: older than the code they measure (`make measure` makes them again): {', '.join(aged)}")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
