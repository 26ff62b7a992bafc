"""The axes of logged arrays, (episodes, points, d): a shape that is not theirs, and what it probably is."""

from typing import Any

AXES = ("episodes", "points", "d")
_LOW, _LONG = 10, 50  # an array of so few columns and so many rows is one long log, (rows, d), rather than episodes


def check_axes(name: str, shape: tuple[int, ...], like: tuple[int, ...] | None = None) -> None:
    """Refuse a shape that is not (episodes, points, d), or not that of x, `like`."""
    wrong = len(shape) != 3 or 0 in shape if like is None else shape != like
    if not wrong:
        return
    wanted = f"({', '.join(AXES)})" + (", none of them 0" if like is None else f", that of x, {like}")
    raise ValueError(f"{name} must have shape {wanted}, got {shape}{_remedy(name, shape, like)}")


def check_hessian_axes(shape: tuple[int, ...], x: tuple[int, ...]) -> None:
    """Refuse Hessians that are neither whole nor diagonals, for positions of the shape `x`."""
    whole = (*x, x[-1])
    if shape in (x, whole):
        return
    remedy = _remedy("hessian", shape, x) or _remedy("hessian", shape, whole)
    raise ValueError(
        f"hessian must have shape (episodes, points, d, d), here {whole}, or (episodes, points, d), here {x}, for its "
        f"diagonal, got {shape}{remedy}"
    )


def _remedy(name: str, shape: tuple[int, ...], like: tuple[Any, ...] | None) -> str:
    """What to do about a wrong shape, where that can be told."""
    if like is None and len(shape) == 2 and 0 < shape[1] <= _LOW < _LONG <= shape[0]:
        return (
            f": one log of {shape[0]} rows is cut where its episodes start by split_log(…, starts=…), and one chain "
            f"without restarts by piece_steps=… (--piece-steps); if it holds {shape[0]} episodes in one dimension, add "
            f"the last axis, {name}[..., None]"
        )
    if len(shape) == 2 and (like is None or (*shape, 1) == like):
        return f": in one dimension add the last axis, {name}[..., None]"
    if like is not None and len(shape) == len(like):
        if shape == (like[1], like[0], *like[2:]):
            return f": its first two axes are swapped, pass {name}.swapaxes(0, 1)"
        if shape == (*like[2:], *like[:2]) and len(like) == 3:
            return f": d stands first, pass np.moveaxis({name}, 0, -1)"
        if shape == (like[0], like[1] - 1, *like[2:]):
            return f": row k must hold the {name} at row k of x; the last position has none, pass x[:, :-1]"
    return ""
