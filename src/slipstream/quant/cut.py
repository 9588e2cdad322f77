"""Which entries of a layer's stored tensors make up some rows and columns of its packed weight.

Every stored form is proportional to the weight it stands for: a tensor of the first r rows and c columns has the
shape the layout gives for a weight of r by c. So the shape for what lies before a part is where the part begins.
"""

from slipstream.checkpoint.span import Span, Window
from slipstream.errors import ConfigError
from slipstream.quant.layout import Layout, Stored


def stored_windows(
    layout: Layout, module: str, rows: Span, columns: Span, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Window]:
    """Return the window of each stored tensor, by suffix.

    Args:
        shapes: the tensors' shapes in the file, which may add or drop dimensions of one.
    """
    whole = layout.tensors(rows.total, columns.total)
    windows = {}
    for suffix, shape in shapes.items():
        stored = whole[suffix]
        spans = [Span.whole(size) for size in stored.shape]
        for axis in range(len(stored.shape)):
            for side, span in (("rows", rows), ("columns", columns)):
                if not span.is_whole and _runs_along(layout, suffix, axis, side, (rows.total, columns.total)):
                    spans[axis] = _cut(module, side, span, stored.shape[axis])
        windows[suffix] = _as_stored(spans, stored, shape)
    return windows


def _runs_along(layout: Layout, suffix: str, axis: int, side: str, size: tuple[int, int]) -> bool:
    """Tell whether a dimension grows with the weight's rows (or columns)."""
    doubled = (2 * size[0], size[1]) if side == "rows" else (size[0], 2 * size[1])
    return layout.tensors(*doubled)[suffix].shape[axis] != layout.tensors(*size)[suffix].shape[axis]


def _cut(module: str, side: str, span: Span, entries: int) -> Span:
    per_entry = -(-span.total // entries)
    if span.start % per_entry or (span.stop % per_entry and span.stop != span.total):
        raise ConfigError(
            f"{module}: a rank's {side} [{span.start}, {span.stop}) of {span.total} begin or end inside a stored "
            f"block of {per_entry}."
        )
    return Span(entries, span.start // per_entry, -(-span.stop // per_entry))


def _as_stored(spans: list[Span], stored: Stored, shape: tuple[int, ...]) -> Window:
    """Lay the spans out over the file's dimensions, where writers differ in those of one."""
    if len(shape) == len(spans):
        return tuple(spans)
    long = iter([span for span, size in zip(spans, stored.shape, strict=True) if size != 1])
    return tuple(Span.whole(1) if size == 1 else next(long) for size in shape)
