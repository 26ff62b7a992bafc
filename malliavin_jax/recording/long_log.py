"""One long log with restarts inside, cut into episodes."""

from typing import Any

import numpy as np

from .._base.checks import check_count
from .recording import OnBad, Recording
from .validation import column_of


def split_log(
    x: Any,
    gradient: Any,
    hessian: Any = None,
    *,
    starts: Any,
    step_size: Any = None,
    inverse_temperature: Any = None,
    max_steps: int | None = None,
    on_bad: OnBad = "refuse",
) -> Recording:
    """One long log with restarts inside, cut into episodes.

    The move into a start is a restart, and is not part of any episode.

    Args:
        x: (rows, d), the positions in the order of the log.
        gradient: (rows, d), the gradient that the learner used at each of them.
        hessian: (rows, d, d), or (rows, d) for its diagonal, or None.
        starts: the rows at which an episode starts, increasing from 0; or a flag for each row, True at a start.
        step_size: one number, or one for each episode; None if not known.
        inverse_temperature: likewise.
        max_steps: leave out what an episode does after so many steps. The episodes stand in arrays as long as the
            longest of them, which one long episode would make large.
        on_bad: "refuse" the first bad episode, or "drop" the bad ones, as in `Recording`.

    Returns:
        The recording.

    Raises:
        ValueError: if the arrays do not have the same rows, if `starts` do not increase from 0 within them, or as in
            `Recording`.

    Example:
        ```python
        import numpy as np
        import malliavin_jax as mj

        x = np.random.default_rng(0).normal(size=(30, 1))
        recording = mj.split_log(x, x, starts=[0, 10, 25])
        recording.num_episodes, recording.last_steps  # 3, [ 9 14  4]
        ```
    """
    columns = {"x": column_of("x", x)[:], "gradient": column_of("gradient", gradient)[:]}
    if hessian is not None:
        columns["hessian"] = column_of("hessian", hessian)[:]
    rows = len(columns["x"])
    if columns["x"].ndim != 2:
        raise ValueError(f"x must have shape (rows, d) for one long log, got {columns['x'].shape}")
    for name, column in columns.items():
        if len(column) != rows:
            raise ValueError(f"{name} must have as many rows as x, {rows}, got {len(column)}")
    begin = _starts_of(starts, rows)
    last_steps = np.diff(begin, append=rows) - 1
    if max_steps is not None:
        last_steps = np.minimum(last_steps, check_count("max_steps", max_steps))
    index = np.minimum(begin[:, None] + np.arange(max(2, last_steps.max() + 1))[None, :], rows - 1)
    return Recording(
        **{name: column[index] for name, column in columns.items()},
        step_size=step_size,
        inverse_temperature=inverse_temperature,
        last_steps=last_steps,
        on_bad=on_bad,
    )


def _starts_of(starts: Any, rows: int) -> np.ndarray:
    """The rows at which episodes start, from a list of them or from flags."""
    begin = np.asarray(starts)
    if begin.ndim != 1 or begin.dtype.kind not in "biu":
        raise ValueError(f"starts must be a list of rows or of flags, got {begin.dtype} of shape {begin.shape}")
    if begin.dtype.kind == "b":
        if len(begin) != rows:
            raise ValueError(f"starts must hold one flag for each of the {rows} rows, got {len(begin)}")
        begin = np.flatnonzero(begin)
    begin = begin.astype(np.int64)
    if len(begin) == 0 or begin[0] != 0:
        raise ValueError(f"starts must begin with row 0, got {begin[:1].tolist()}")
    rows_each = np.diff(begin, append=rows)
    if np.any(rows_each <= 0):
        wrong = int(np.argmax(rows_each <= 0))
        following = begin[wrong + 1] if wrong + 1 < len(begin) else f"the end of the log, row {rows}"
        raise ValueError(
            f"starts must increase and stay below {rows}: episode {wrong} starts at row {begin[wrong]}, "
            f"then comes {following}"
        )
    return begin
