"""A picture of `gpu_grid.py`'s results: a cell for each batch and kind of draft, as SVG."""

from typing import Any

_CELL_W, _CELL_H, _LEFT, _TOP = 92, 34, 70, 74


def draw(result: dict[str, Any]) -> str:
    """Return the picture: how many times plain decoding each point decodes, and beneath it the best fixed choice."""
    points = result["points"]
    contexts = sorted({point["context"] for point in points})
    batches = sorted({point["batch"] for point in points})
    kinds = list(dict.fromkeys(point["kind"] for point in points))
    panel = len(kinds) * _CELL_W + _LEFT
    width, height = len(contexts) * panel + 20, _TOP + len(batches) * _CELL_H + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(width / 2, 18, f"{result['model']}: times plain decoding (share of the best fixed choice)", 14),
    ]
    for number, context in enumerate(contexts):
        left = number * panel + _LEFT
        parts.append(_text(left + len(kinds) * _CELL_W / 2, 40, f"{context} tokens of context", 13))
        parts += [_text(left + (i + 0.5) * _CELL_W, 62, kind) for i, kind in enumerate(kinds)]
        parts += [_text(left - 34, _TOP + (j + 0.6) * _CELL_H, f"batch {batch}") for j, batch in enumerate(batches)]
    for point in points:
        left = contexts.index(point["context"]) * panel + _LEFT + kinds.index(point["kind"]) * _CELL_W
        top = _TOP + batches.index(point["batch"]) * _CELL_H
        times, share = point["beside_plain"], point["beside_best"]
        parts.append(
            f'<rect x="{left + 1}" y="{top + 1}" width="{_CELL_W - 2}" height="{_CELL_H - 2}" fill="{_colour(times)}"/>'
        )
        parts.append(_text(left + _CELL_W / 2, top + 21, f"{times:.2f}x ({share:.2f})"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, size: int = 12) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="middle" font-size="{size}" fill="#222">{text}</text>'


def _colour(times: float) -> str:
    """Return red below plain decoding, white at it, and greener the faster."""
    if times < 0.97:
        return "#f4b6b0"
    depth = min(max(times - 1, 0.0) / 3, 1.0)
    return f"rgb({round(240 - 130 * depth)}, {round(246 - 46 * depth)}, {round(238 - 128 * depth)})"
