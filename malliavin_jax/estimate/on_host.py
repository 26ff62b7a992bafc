"""Localized sums at many places with NumPy: what is small and asked for once takes less time than to compile it.

The formulas are those of `sums.py`, on arrays with an axis of places more, the last. Places are taken some at a time,
so that what is computed of all points stays in the cache, on as many threads as there are cores: NumPy lets go of the
interpreter while it computes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from .._base import host
from .._base.host import on_threads
from .localizers import Localizer
from .sums import Bank, Sums, add_up, episode_terms

_MOST = {1: 60_000_000, 2: 60_000_000}  # points times places, above which a program is worth its compilation
_MOST_BEYOND = 30_000_000  # the shells of odd dimensions cost more
_AT_ONCE = 2**18  # numbers that an array may hold

Places = Float[np.ndarray, "alphas d"]


def serves(localizer: Localizer, places: int, *banks: Bank) -> bool:
    """Whether sums over these points at so many places are better made here."""
    most = _MOST.get(banks[0].x.shape[1], _MOST_BEYOND)
    is_small = places * sum(size_of(bank) for bank in banks) <= most
    return getattr(type(localizer), "takes_numpy", False) and is_small and host.on_host(banks)


def size_of(bank: Bank) -> int:
    """How many points a bank has room for."""
    return bank.observed.size


def for_each_part(function: Callable[[Bank, np.ndarray], Any], bank: Bank, alphas: Places) -> list[list[Any]]:
    """`function(part, α)` of each chunk of a bank and of some places at a time, α of shape (d, some, 1, 1).

    A list for each group of places, of a result for each chunk.
    """
    here = host.to_host(bank)
    some = max(1, _AT_ONCE // max(here.observed[0].size, 1))
    groups = [alphas[start : start + some] for start in range(0, len(alphas), some)]
    parts = [jax.tree.map(lambda leaf, i=i: leaf[i], here) for i in range(len(here.observed))]
    return on_threads(functools.partial(_of_group, function, parts), groups)


@host.silently
def _of_group(function: Callable[[Bank, np.ndarray], Any], parts: list[Bank], places: Places) -> list[Any]:
    alpha = np.ascontiguousarray(places.T)[:, :, None, None]
    return [function(part, alpha) for part in parts]


def sums_at(bank: Bank, alphas: Places, localizer: Localizer) -> Sums:
    """The localized sums at each α."""
    found = for_each_part(functools.partial(_sums, host.to_host(localizer)), bank, alphas)
    return Sums(*(np.concatenate(leaves, -1) for leaves in zip(*map(add_up, found), strict=True)))


def _sums(localizer: Localizer, part: Bank, alpha: np.ndarray) -> Sums:
    terms, w = episode_terms(part, alpha, localizer)
    n = np.stack(terms)  # (m, some, size)
    products = (np.einsum("mas,mas->ma", n, n), np.einsum("mas,as->ma", n, w), np.einsum("as,as->a", w, w))
    return Sums(n.sum(-1), w.sum(-1), *products)


def terms_at(bank: Bank, alphas: Places, localizer: Localizer) -> Float[np.ndarray, "alphas rows episodes"]:
    """n and w of each episode at each α."""
    found = for_each_part(functools.partial(_terms, host.to_host(localizer)), bank, alphas)
    return np.concatenate([np.concatenate(group, -1) for group in found])


def _terms(localizer: Localizer, part: Bank, alpha: np.ndarray) -> np.ndarray:
    n, w = episode_terms(part, alpha, localizer)
    return np.stack([*n, w], 1)
