"""The page `docs/user-guide/cli-reference.md`, made from the schema: `python -m miles.config.docs`."""

from __future__ import annotations

from pathlib import Path

from miles.config.help_text import GENERAL, RULES, shown
from miles.config.walk import Leaf, item_leaves, leaves, sections

PAGE = Path(__file__).parents[2] / "docs" / "user-guide" / "cli-reference.md"
COMMAND = "python -m miles.config.docs"


def docs_page() -> str:
    """The whole page as Markdown."""
    lines = [f"<!-- Made by `{COMMAND}`; edit miles/config/sections instead. -->", "# Settings and flags", ""]
    lines += ["`train.py [recipe.yaml ...] [--flag value ...]`", "", *(f"- {rule}" for rule in RULES), ""]
    lines += ["| Flag | Meaning |", "|---|---|", *(f"| `{flag}` | {text} |" for flag, text in GENERAL)]
    for section, doc in sections().items():
        lines += [
            "",
            f"## {section}",
            "",
            doc,
            "",
            "| Setting | Flags | Value | Default | Meaning |",
            "|---|---|---|---|---|",
        ]
        for leaf in leaves():
            if leaf.section == section:
                lines += [_row(leaf)]
        for leaf in leaves():
            if leaf.section == section and item_leaves(leaf):
                lines += [
                    "",
                    f"Each entry of `{leaf.path}`:",
                    "",
                    "| Name | Value | Default | Meaning |",
                    "|---|---|---|---|",
                ]
                lines += [_item_row(item) for item in item_leaves(leaf)]
    return "\n".join(lines) + "\n"


def _row(leaf: Leaf) -> str:
    flags = "<br>".join(f"`{flag}`" for flag in [*reversed(leaf.flags), *leaf.inverted])
    cells = [
        f"`{leaf.path}`",
        flags,
        leaf.wants.removesuffix(", or null to unset it"),
        f"`{shown(leaf.default)}`",
        leaf.doc,
    ]
    return _cells(*cells)


def _item_row(item: Leaf) -> str:
    default = "required" if item.required else f"`{shown(item.default)}`"
    return _cells(f"`{item.path}`", item.wants.removesuffix(", or null to unset it"), default, item.doc)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(docs_page(), encoding="utf-8")
