"""What the rows of `accuracy.py` say: ratios, the summary, and every cell that misses.

A row holds, for each method, its errors on each data set at the one setting that is best over all of them. A method
that saw fewer data sets is compared on those that it saw.
"""

import numpy as np
from common import DEGREES

from .ours import FORMS

OURS = (*FORMS, "without control, oracle length")
KERNELS = tuple(f"{name}, oracle" for name in DEGREES.values())
MEAN_TO_RIVAL, ANY_TO_RIVAL = 1.15, 1.5  # what the ratio to the best rival is asked not to exceed
MEAN_TO_OLD, ANY_TO_OLD = 0.5, 1.05  # and the ratio to version 0.1.0


def pooled(errors):
    return float(np.sqrt(np.mean(np.square(errors))))


def ratio(row, other, ours="this library"):
    """The error of ours in units of that of another method, on the data sets that both saw."""
    sets = min(len(row["errors"][ours]), len(row["errors"][other]))
    return pooled(row["errors"][ours][:sets]) / pooled(row["errors"][other][:sets])


def best_of(row, names):
    """The strongest of `names` in this row, None if none was measured."""
    seen = [name for name in names if name in row["errors"]]
    return max(seen, key=lambda name: ratio(row, name), default=None)


def judge(row):
    """The comparisons of a row: errors of this library relative to those of others.

    The best rival is one that saw every data set. The error of a good fit is mostly one number a data set, the mean of
    the gradient noise: of several settings on one data set hindsight would pick the luckiest number.
    """
    everywhere = [name for name, errors in row["errors"].items() if len(errors) == len(row["errors"]["this library"])]
    rival = best_of(row, [name for name in everywhere if name not in OURS])
    plain = best_of(row, KERNELS)
    verdict = {}
    for what, name in (("to best rival", rival), ("to best oracle kernel", plain)):
        if name is not None:
            verdict[what] = ratio(row, name)
    others = ("version 0.1.0", "full correction", "no correction", "without control", "the paper, literally")
    verdict |= {f"to {name}": ratio(row, name) for name in others if name in row["errors"]}
    if row["limit"] > 0:
        verdict["to limit"] = row["rmse"]["this library"] / row["limit"]
    return rival, verdict


def summary(rows):
    """Per noise, size and number of times, and over all: mean and largest ratios, and the cells that miss."""
    keys = ("noise", "episodes", "times")
    places = sorted({tuple(row[key] for key in keys) for row in rows})
    groups = []
    for place in places:
        named = dict(zip(keys, place, strict=True))
        groups.append(named | _means([row for row in rows if tuple(row[key] for key in keys) == place]))
    overall = _means(rows)
    return {"groups": groups, "overall": overall, "misses": misses(rows, groups, overall)}


def _means(rows):
    found = {}
    for of in ("best rival", "version 0.1.0"):
        ratios = [row["ratios"][f"to {of}"] for row in rows if f"to {of}" in row["ratios"]]
        if ratios:
            found |= {f"mean to {of}": float(np.mean(ratios)), f"most to {of}": max(ratios)}
    return found


def misses(rows, groups, overall):
    """A line for each cell, and each mean, that is worse than asked for."""
    found = []
    for group in [*groups, overall]:
        place = name_of(group) if "noise" in group else "over all"
        for short, most in (("best rival", MEAN_TO_RIVAL), ("version 0.1.0", MEAN_TO_OLD)):
            if group.get(f"mean to {short}", 0.0) > most:
                found.append(f"mean, {place}: {group[f'mean to {short}']:.2f} of {short} (asked: {most})")
    for row in rows:
        for what, most in (("to best rival", ANY_TO_RIVAL), ("to version 0.1.0", ANY_TO_OLD)):
            if row["ratios"].get(what, 0.0) > most:
                of = row["best rival"] if what == "to best rival" else "version 0.1.0"
                found.append(f"{row['case']}, {name_of(row)}: {row['ratios'][what]:.2f} of {of} (asked: {most})")
    return found


def name_of(row):
    times = "1 time" if row["times"] == 1 else f"{row['times']} times"
    return f"noise {row['noise']:g}, N = {row['episodes']}, {times}"


def show(found):
    """Print the summary."""
    print(f"\n{'':42}{'to best rival':>22}{'to version 0.1.0':>22}")
    print(f"{'':42}" + 2 * f"{'mean':>11}{'most':>11}")
    for group in [*found["groups"], found["overall"]]:
        numbers = [group.get(f"{kind} to {of}") for of in ("best rival", "version 0.1.0") for kind in ("mean", "most")]
        cells = "".join(f"{'–' if number is None else f'{number:.2f}':>11}" for number in numbers)
        print(f"{name_of(group) if 'noise' in group else 'over all':42}{cells}")
    print(f"\n{len(found['misses'])} miss what is asked:" if found["misses"] else "\nall is as asked")
    for line in found["misses"]:
        print("  " + line)
