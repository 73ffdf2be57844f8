"""Draws the pictures of docs/images: the architecture, a lost node, and the panel of `spotune watch`.

    python -m docs.pictures

Run by `make manifests`. Each picture is a function that returns an SVG. The same code gives the same text, so a test
compares the committed files with it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from rich.console import Console

from spotune_operator.cli.status import panel
from tests.operator.support.objects import NOW, training_job

_IMAGES: Final = Path(__file__).parent / "images"
_INK, _MUTED, _LINE, _PAPER = "#1f2937", "#5b6472", "#9aa3b0", "#ffffff"
_BLUE, _PALE_BLUE = "#1f5fa8", "#e8f1fb"
_ORANGE, _PALE_ORANGE = "#b85c1a", "#fdf1e7"
_GREEN, _PALE_GREEN = "#2c7a4b", "#e8f5ed"
_RED, _PALE_RED = "#b3261e", "#fbe9e7"
_GREY, _PALE_GREY = "#7b8494", "#f3f4f6"
_FONT: Final = "Helvetica, Arial, 'Liberation Sans', sans-serif"
_TERMINAL_COLUMNS: Final = 78
_TERMINAL_FORMAT: Final = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<style>
.{unique_id}-matrix {{font-family: 'DejaVu Sans Mono', Menlo, Consolas, monospace; font-size: {char_height}px;
 line-height: {line_height}px; font-variant-east-asian: full-width;}}
.{unique_id}-title {{font-size: 18px; font-weight: bold; font-family: Helvetica, Arial, sans-serif;}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own format without its fonts, which a browser would fetch from another host."""


class _Drawing:
    """Shapes and texts of one SVG, drawn from the back to the front."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._elements = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f'<g font-family="{_FONT}" font-size="13">',
            f"<title>{escape(title)}</title>",
            "<defs>",
            '<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">',
            f'<path d="M0 0 L10 5 L0 10 z" fill="{_MUTED}"/>',
            "</marker>",
            "</defs>",
        ]
        self.box(0, 0, width, height, _PAPER, _PAPER, radius=0)

    def box(
        self, x: int, y: int, width: int, height: int, fill: str, line: str, *, radius: int = 8, dashed: bool = False
    ) -> None:
        """A rectangle with round corners."""
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        self._elements.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}"'
            f' stroke="{line}" stroke-width="1.4"{dashes}/>'
        )

    def text(self, x: int, y: int, text: str, colour: str = _INK, *, size: int = 13, style: str = "") -> None:
        """A line of text that begins at x; `style` holds `bold`, `middle` or both."""
        weight = ' font-weight="bold"' if "bold" in style else ""
        anchor = ' text-anchor="middle"' if "middle" in style else ""
        self._elements.append(
            f'<text x="{x}" y="{y}" fill="{colour}" font-size="{size}"{weight}{anchor}>{escape(text)}</text>'
        )

    def card(self, x: int, y: int, width: int, height: int, colours: tuple[str, str], texts: Sequence[str]) -> None:
        """A box with a bold heading and lines below it."""
        line, fill = colours
        self.box(x, y, width, height, fill, line)
        heading, *rest = texts
        self.text(x + 12, y + 22, heading, line, size=14, style="bold")
        for number, text in enumerate(rest):
            self.text(x + 12, y + 42 + 17 * number, text, _INK, size=13)

    def arrow(self, path: str, *, dashed: bool = False) -> None:
        """A line along an SVG path, with a tip at its end."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._elements.append(
            f'<path d="{path}" fill="none" stroke="{_MUTED}" stroke-width="1.6"{dashes} marker-end="url(#tip)"/>'
        )

    def line(self, path: str, colour: str, *, width: float = 1.4, dashed: bool = False) -> None:
        """A line along an SVG path."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._elements.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>')

    def svg(self) -> str:
        """The text of the file."""
        return "\n".join([*self._elements, "</g>", "</svg>"]) + "\n"


def architecture() -> str:
    """How a job becomes a model: apply, operator, RayCluster, supervisor, driver, workers, volume."""
    drawing = _Drawing("From kubectl apply to a trained model", 880, 400)
    drawing.card(20, 40, 150, 82, (_GREY, _PALE_GREY), ["FinetuneJob", "one YAML file,", "kubectl apply"])
    drawing.card(
        20,
        190,
        150,
        116,
        (_BLUE, _PALE_BLUE),
        ["Operator", "creates the pods,", "reports the status;", "may be down while", "a job trains"],
    )
    drawing.arrow("M95 122 V188")
    drawing.text(103, 160, "watches", _MUTED, size=13)

    drawing.box(230, 20, 630, 268, _PAPER, _LINE, dashed=True)
    drawing.text(244, 41, "RayCluster", _MUTED, size=14, style="bold")
    drawing.arrow("M170 214 H228")
    drawing.text(199, 206, "applies", _MUTED, size=13, style="middle")
    drawing.arrow("M170 268 H244")
    drawing.text(199, 286, "polls", _MUTED, size=13, style="middle")

    drawing.box(246, 54, 236, 222, _PALE_ORANGE, _ORANGE)
    drawing.text(258, 75, "Head pod, on-demand node", _ORANGE, size=13, style="bold")
    drawing.card(
        258, 88, 212, 80, (_ORANGE, _PAPER), ["Driver", "plans, starts worker groups,", "judges how each one ended"]
    )
    drawing.card(258, 202, 212, 64, (_ORANGE, _PAPER), ["Supervisor", "starts a new driver if one dies"])
    drawing.arrow("M364 202 V170")
    drawing.text(372, 190, "submits", _MUTED, size=13)

    for number, top in enumerate((54, 170)):
        drawing.box(548, top, 298, 106, _PALE_GREEN, _GREEN)
        drawing.text(560, top + 21, f"Worker pod {number + 1}, spot node", _GREEN, size=13, style="bold")
        drawing.card(560, top + 32, 112, 64, (_GREEN, _PAPER), ["Agent", "forks the ranks"])
        for rank in range(2):
            drawing.card(690 + 76 * rank, top + 32, 70, 64, (_GREEN, _PAPER), [f"Rank {2 * number + rank}", "1 GPU"])
        drawing.arrow(f"M672 {top + 64} H688")
    drawing.arrow("M470 118 H546")
    drawing.arrow("M508 118 V222 H546")
    drawing.text(510, 108, "starts", _MUTED, size=13, style="middle")

    drawing.box(246, 326, 400, 58, _PALE_BLUE, _BLUE)
    drawing.text(258, 348, "Shared volume", _BLUE, size=14, style="bold")
    drawing.text(258, 368, "checkpoints, plan, ledger, logs: all the state of a run", size=13)
    drawing.arrow("M600 276 V324")
    drawing.text(608, 311, "commit checkpoints, restore from them", _MUTED, size=13)
    drawing.card(706, 326, 154, 58, (_BLUE, _PALE_BLUE), ["Trained model", "safetensors, the Hub"])
    drawing.arrow("M646 355 H704")
    drawing.text(675, 347, "export", _MUTED, size=13, style="middle")
    return drawing.svg()


def lost_node() -> str:
    """What happens when a node goes without notice: two worker groups, one commit between them."""
    drawing = _Drawing("A node is lost, and the next worker group continues at the exact next sample", 880, 330)
    lanes = {"Node A": 62, "Node B": 108, "Node C": 154, "Driver": 216, "Checkpoints": 262}
    for name, top in lanes.items():
        drawing.text(20, top + 19, name, _INK, size=13, style="bold")
        drawing.line(f"M118 {top + 36} H860", "#e3e6ea")
    _group(drawing, lanes, (118, 318), ("Node A", "Node B"), "steps 1 to 120", _BLUE, _PALE_BLUE)
    _group(drawing, lanes, (322, 436), ("Node A", "Node B"), "steps 121 to 131", _RED, _PALE_RED)
    _group(drawing, lanes, (574, 860), ("Node A", "Node C"), "steps 121, 122, ...", _BLUE, _PALE_BLUE)
    drawing.text(505, lanes["Node A"] + 19, "stopped", _MUTED, size=13, style="middle")
    drawing.text(505, lanes["Node B"] + 19, "gone", _RED, size=13, style="middle")

    drawing.line("M438 46 V252", _RED, width=1.6, dashed=True)
    drawing.text(438, 38, "node B is reclaimed, no notice", _RED, size=13, style="bold middle")
    drawing.text(218, 38, "generation 7", _MUTED, size=13, style="middle")
    drawing.text(717, 38, "generation 8", _MUTED, size=13, style="middle")
    drawing.box(444, lanes["Driver"], 124, 28, _PALE_ORANGE, _ORANGE, radius=5)
    drawing.text(506, lanes["Driver"] + 19, "starts a new group", _ORANGE, size=13, style="middle")

    for x, step in ((218, 60), (320, 120), (717, 180)):
        drawing.box(x - 38, lanes["Checkpoints"], 76, 28, _PALE_GREEN, _GREEN, radius=5)
        drawing.text(x, lanes["Checkpoints"] + 19, f"step {step}", _GREEN, size=13, style="middle")
    drawing.arrow(f"M358 {lanes['Checkpoints'] + 14} H574 V{lanes['Node C'] + 38}")
    drawing.text(466, lanes["Checkpoints"] + 8, "restore", _MUTED, size=13, style="middle")
    drawing.text(
        20,
        320,
        "Step 121 trains on the same samples in both generations. What node B may still write is ignored.",
        _MUTED,
    )
    return drawing.svg()


def _group(
    drawing: _Drawing,
    lanes: dict[str, int],
    span: tuple[int, int],
    nodes: Sequence[str],
    text: str,
    line: str,
    fill: str,
) -> None:
    """A bar for each node of a worker group, from the left to the right end of `span`."""
    left, right = span
    for node in nodes:
        drawing.box(left, lanes[node], right - left, 28, fill, line, radius=5)
        drawing.text((left + right) // 2, lanes[node] + 19, text, line, size=13, style="middle")


def watch() -> str:
    """The panel of `spotune watch`, drawn by its own code from the status that its tests use."""
    console = Console(
        width=_TERMINAL_COLUMNS, record=True, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(panel(training_job(), NOW))
    return console.export_svg(title="spotune watch t5-sql", code_format=_TERMINAL_FORMAT, unique_id="watch")


PICTURES: Final = {"architecture": architecture, "lost-node": lost_node, "watch": watch}
"""By the names of their files in docs/images."""


def files() -> dict[Path, str]:
    """The pictures as they have to be, by path."""
    return {_IMAGES / f"{name}.svg": draw() for name, draw in PICTURES.items()}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
