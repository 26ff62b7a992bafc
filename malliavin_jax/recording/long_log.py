"""One long log: cut into episodes at its restarts, or, where there are none, into pieces that stand in blocks."""

import math
import warnings
from typing import Any, NamedTuple

import numpy as np

from .._base.checks import check_count
from .recording import OnBad, Recording
from .validation import column_of

_LEAST_BLOCKS = 50  # a standard error from as many is itself right to 10 %
_LONG = 10  # autocorrelation times in a block: its standard error is then short of the truth by 2.5 %
_SHORT = 3  # below which it is short by 10 % or more


def split_log(
    x: Any,
    gradient: Any,
    hessian: Any = None,
    *,
    starts: Any = None,
    piece_steps: int | None = None,
    blocks: int | None = None,
    step_size: Any = None,
    inverse_temperature: Any = None,
    max_steps: int | None = None,
    on_bad: OnBad = "refuse",
) -> Recording:
    """One long log, cut into episodes at its restarts, or into pieces of one chain that never restarts.

    The move into a start is a restart, and is not part of any episode.

    Without restarts, `piece_steps` cuts the chain. The row at a cut is the end of one piece and the start of the next,
    so that every step counts once. The weights of a piece are made of its own noise and are exact given where it
    starts: a piece depends on those before it through its start alone. But it does depend on them, so pieces are not
    episodes of their own. Consecutive ones are put into blocks, and a block becomes one episode of `Samples`, whose
    points may depend on each other: every standard error downstream is then one of blocks, and takes the dependence
    into account, up to that of the edges of neighbouring blocks.

    Args:
        x: (rows, d), the positions in the order of the log.
        gradient: (rows, d), the gradient that the learner used at each of them.
        hessian: (rows, d, d), or (rows, d) for its diagonal, or None.
        starts: the rows at which an episode starts, increasing from 0; or a flag for each row, True at a start. None:
            the log is one chain, and `piece_steps` is needed.
        piece_steps: cut every episode into pieces of so many steps; what is left over at its end is left out. A few
            relaxation times of the learner are long enough.
        blocks: how many blocks, about; None takes blocks of ten autocorrelation times of the starts of the pieces (of
            the slowest coordinate, or of its square), but no fewer than 50 of them, with a warning where these are
            shorter than three such times.
        step_size: one number, one for each episode, or one for each row, the size of the step from there; None if not
            known.
        inverse_temperature: one number, or one for each episode; None if not known.
        max_steps: leave out what an episode does after so many steps. The episodes stand in arrays as long as the
            longest of them, which one long episode would make large.
        on_bad: "refuse" the first bad episode, or "drop" the bad ones, as in `Recording`.

    Returns:
        The recording; its episodes are the pieces, where there are any.

    Raises:
        ValueError: if the arrays do not have the same rows, if `starts` do not increase from 0 within them, if neither
            `starts` nor `piece_steps` are given, if no episode is as long as a piece, or as in `Recording`.

    Example:
        ```python
        import numpy as np
        import malliavin_jax as mj

        x = np.random.default_rng(0).normal(size=(30, 1))
        recording = mj.split_log(x, x, starts=[0, 10, 25])
        recording.num_episodes, recording.last_steps  # 3, [ 9 14  4]
        pieces = mj.split_log(x, x, piece_steps=5, blocks=2)  # one chain that never restarts
        pieces.num_episodes, pieces.block_size  # 5 pieces, in blocks of 2
        ```
    """
    given = (("x", x), ("gradient", gradient), ("hessian", hessian))
    columns = {name: column_of(name, array)[:] for name, array in given if array is not None or name == "x"}
    rows = len(columns["x"])
    if columns["x"].ndim != 2:
        raise ValueError(f"x must have shape (rows, d) for one long log, got {columns['x'].shape}")
    for name, column in columns.items():
        if len(column) != rows:
            raise ValueError(f"{name} must have as many rows as x, {rows}, got {len(column)}")
    if starts is None and piece_steps is None:
        raise ValueError("starts must be the rows at which episodes start, or piece_steps given for one chain")
    begin = _starts_of(np.zeros(1, int) if starts is None else starts, rows)
    last_steps = np.diff(begin, append=rows) - 1
    if max_steps is not None:
        last_steps = np.minimum(last_steps, check_count("max_steps", max_steps))
    cuts = Cuts(begin, last_steps, np.arange(len(begin)))
    block_size = 1
    if piece_steps is not None:
        cuts = _pieces(cuts, check_count("piece_steps", piece_steps))
        block_size = _block_size(columns["x"][cuts.begin], blocks)
    elif blocks is not None:
        raise ValueError(f"blocks are made of pieces: give piece_steps too, got blocks={blocks}")
    index = np.minimum(cuts.begin[:, None] + np.arange(max(2, cuts.last_steps.max() + 1))[None, :], rows - 1)
    return Recording(
        columns["x"][index],
        *(columns[name][index] if name in columns else None for name in ("gradient", "hessian")),
        step_size=_step_sizes(step_size, cuts, index, len(begin), rows),
        inverse_temperature=_per_episode(inverse_temperature, "inverse_temperature", cuts, len(begin)),
        last_steps=cuts.last_steps,
        block_size=block_size,
        on_bad=on_bad,
    )


class Cuts(NamedTuple):
    """What a log is cut into: the first row of each part, its steps, and the number of the episode it belongs to."""

    begin: np.ndarray
    last_steps: np.ndarray
    episode: np.ndarray


def _pieces(episodes: Cuts, steps: int) -> Cuts:
    """Each episode in pieces of `steps` steps."""
    numbers = episodes.last_steps // steps
    if not np.any(numbers):
        raise ValueError(f"piece_steps must be at most {episodes.last_steps.max()}, the longest episode, got {steps}")
    episode = np.repeat(episodes.episode, numbers)
    within = np.arange(len(episode)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    return Cuts(episodes.begin[episode] + steps * within, np.full(len(episode), steps), episode)


def _block_size(starts: np.ndarray, blocks: int | None) -> int:
    """How many pieces make a block, from where they start, (pieces, d)."""
    pieces = len(starts)
    if blocks is not None:
        return max(1, pieces // check_count("blocks", blocks, at_least=2))
    time = autocorrelation_time(starts)
    least = max(1, pieces // _LEAST_BLOCKS)
    if time > 1.5 and least < _SHORT * time:  # pieces that hardly depend on each other need no block
        warnings.warn(
            f"the chain is short: {pieces} pieces, of which {time:.3g} make an autocorrelation time, so that "
            f"{_LEAST_BLOCKS} blocks are no longer than {least / time:.2g} of these; standard errors may be too small",
            RuntimeWarning,
            stacklevel=3,
        )
    # A power of two, or the least: logs of one length then meet few compiled shapes.
    return min(1 << math.ceil(math.log2(_LONG * time)), least)


def autocorrelation_time(series: np.ndarray) -> float:
    """1 + 2 Σ_k ρ_k of the slowest column of (n, d), or of the slowest square of one; in rows, at least 1.

    The sum ends at the first lag beyond five times what it is so far (Sokal's window): further on it would be noise.
    """
    n = len(series)
    centred = np.asarray(series, np.float64) - np.mean(series, 0, dtype=np.float64)
    worst = 1.0
    for column in (*centred.T, *(centred**2).T):
        column = column - column.mean()
        transform = np.fft.rfft(column, 2 * n)
        covariance = np.fft.irfft(np.abs(transform) ** 2)[:n]
        if covariance[0] > 0:
            times = 2 * np.cumsum(covariance / covariance[0]) - 1
            beyond = np.flatnonzero(np.arange(n) >= 5 * times)
            worst = max(worst, float(times[beyond[0] if len(beyond) else -1]))
    return worst


def _step_sizes(value: Any, cuts: Cuts, index: np.ndarray, episodes: int, rows: int) -> Any:
    """Step sizes for `Recording`, from one number, one an episode, or one a row; as few as say the same."""
    if value is None or np.shape(value := np.asarray(column_of("step_size", value)[...])) != (rows,):
        return _per_episode(value, "step_size", cuts, episodes)
    sizes = value[index]
    made = np.arange(sizes.shape[1])[None, :] < np.maximum(cuts.last_steps, 1)[:, None]
    if not np.all((sizes == sizes[:, :1]) | ~made):
        return sizes
    return sizes[0, 0] if np.all(sizes[:, 0] == sizes[0, 0]) else sizes[:, 0]


def _per_episode(value: Any, name: str, cuts: Cuts, episodes: int) -> Any:
    """A setting for each part of the log, from one number or one an episode."""
    if value is None or np.ndim(array := np.asarray(column_of(name, value)[...])) == 0:
        return value
    if array.shape != (episodes,):
        raise ValueError(f"{name} must be one number or have shape ({episodes},), got shape {array.shape}")
    return array[cuts.episode]


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
