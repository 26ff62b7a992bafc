"""What a compiled program would do, read from its optimised text: kernels, bytes, operations, turns of loops."""

import functools
import math
import re
from typing import NamedTuple

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
BYTES |= {"c64": 8, "c128": 16, "s16": 2, "u16": 2}
# Instructions that neither launch a kernel nor move memory.
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"opt-barrier", "copy-start", "copy-done", "slice-start", "slice-done", "async-start", "async-done", "iota"}
# Within a kernel: what only moves numbers about.
MOVES = FREE | {
    "broadcast",
    "reshape",
    "transpose",
    "slice",
    "concatenate",
    "pad",
    "reverse",
    "copy",
    "gather",
    "convert",
}
MOVES |= {"dynamic-slice", "dynamic-update-slice", "bitcast-convert", "real", "imag", "complex"}

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$|^(ENTRY )?%?([\w.\-]+) \{$")
_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


class Instruction(NamedTuple):
    name: str
    shape: str
    kind: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split("), ")[0])

    def called(self, word: str) -> str | None:
        found = re.search(rf"\b{word}=%?([\w.\-]+)", self.rest)
        return found.group(1) if found else None


class Work(NamedTuple):
    """What a program, or a part of it, does in all its turns."""

    kernels: float = 0
    bytes: float = 0
    operations: float = 0
    unknown_loops: int = 0  # with a number of turns that the text does not tell; counted once

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, turns: float) -> "Work":
        return Work(turns * self.kernels, turns * self.bytes, turns * self.operations, self.unknown_loops)


def size_of(shape: str) -> float:
    """Bytes of a shape, filled up to its tiles where the layout has any: `f32[10,7]{1,0:T(8,128)}` takes 64 kB."""
    total = 0.0
    for dtype, dims, order, layout in _SHAPE.findall(shape):
        sides = [int(n) for n in dims.split(",") if n]
        tile = re.match(r"T\(([\d,]+)\)", layout or "")
        if tile and sides and order:
            by_rank = [sides[int(i)] for i in order.split(",")]  # minor first
            for i, width in enumerate(reversed([int(n) for n in tile.group(1).split(",")])):
                if i < len(by_rank):
                    by_rank[i] = -(-by_rank[i] // width) * width
            sides = by_rank
        total += BYTES.get(dtype, 0 if dtype == "token" else 4) * math.prod(sides)
    return total


def elements(shape: str) -> float:
    return sum(math.prod([int(n) for n in dims.split(",") if n]) for _, dims, _, _ in _SHAPE.findall(shape)[:1])


class Program:
    """The computations of an optimised program."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        self.entry = ""
        for line in text.splitlines():
            head = _HEAD.match(line)
            if head:
                name = head.group(2) or head.group(4)
                current = self.computations[name] = {}
                self.entry = name if line.startswith("ENTRY") else self.entry
                continue
            found = _LINE.match(re.sub(r"/\*.*?\*/", "", line))
            if found:
                name, shape, kind, rest = found.groups()
                current[name] = Instruction(name, shape, kind, rest, line.lstrip().startswith("ROOT"))

    def work(self) -> Work:
        return self._work(self.entry)

    def kernels_of_inner_loop(self) -> int:
        """Kernels launched at each turn of the innermost loop that makes the most turns in all."""
        return max(self._inner(self.entry, 1), default=(0, 0))[1]

    def _inner(self, name: str, times: float) -> list[tuple[float, int]]:
        found = []
        for one in self.computations[name].values():
            if one.kind == "while" and one.called("body"):
                body, turns = one.called("body"), times * (self._turns(one, name) or 1)
                inner = self._inner(body, turns)
                found += inner or [(turns, int(self._work(body).kernels))]
        return found

    @functools.cache  # noqa: B019  (a program lives as long as the question about it)
    def _work(self, name: str) -> Work:
        total = Work()
        table = self.computations[name]
        for one in table.values():
            if one.kind == "while":
                turns = self._turns(one, name)
                body = self._work(one.called("body"))
                total += body.times(turns) if turns else body + Work(unknown_loops=1)
            elif one.kind == "conditional":
                names = re.findall(r"%([\w.\-]+)", (re.search(r"branch_computations=\{(.*?)\}", one.rest) or [""])[0])
                names = names or [n for n in (one.called("true_computation"), one.called("false_computation")) if n]
                total += max((self._work(n) for n in names), key=lambda work: work.bytes, default=Work())
            elif one.kind == "call":
                total += self._work(one.called("to_apply") or one.called("calls"))
            elif one.kind not in FREE:
                total += Work(1, self._bytes(one, table), self._operations(one, table))
        return total

    def _turns(self, loop: Instruction, where: str) -> int | None:
        known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.rest)
        if known:
            return int(known.group(1))
        condition = self.computations.get(loop.called("condition") or "", {})
        # A condition i < n, maybe inside a fusion: n is a constant there, or an entry of the loop's tuple that is one.
        for one in condition.values():
            if one.kind == "constant" and one.shape.startswith("s32[]"):
                return int(re.match(r"(-?\d+)", one.rest).group(1)) or None
        numbers = [re.search(r"index=(\d+)", one.rest) for one in condition.values() if one.kind == "get-tuple-element"]
        start = self.computations[where].get(loop.operands[0])
        for number in numbers:
            if number and start is not None and start.kind == "tuple":
                entry = self.computations[where].get(start.operands[int(number.group(1))])
                while entry is not None and entry.kind in ("copy", "bitcast") and entry.operands:
                    entry = self.computations[where].get(entry.operands[0])
                value = entry is not None and entry.kind == "constant" and re.match(r"(\d+)", entry.rest)
                if value and int(value.group(1)) > 1:
                    return int(value.group(1))
        return None

    def _bytes(self, one: Instruction, table: dict[str, Instruction]) -> float:
        """What a kernel reads and writes. Of what it only takes slices of, or updates in place, the slices."""
        body = self.computations.get(one.called("calls") or "", {})
        inputs = [table[name].shape for name in one.operands if name in table]
        if not body:
            if one.kind == "dynamic-update-slice":
                return 2 * size_of(inputs[1])
            if one.kind in ("dynamic-slice", "slice", "gather"):
                return 2 * size_of(one.shape)
            return size_of(one.shape) + sum(map(size_of, inputs))
        written, total = size_of(one.shape), 0.0
        for parameter in (entry for entry in body.values() if entry.kind == "parameter"):
            names = _under_other_shapes(parameter.name, body)
            users = [u for u in body.values() if u.kind != "bitcast" and names & set(u.operands)]
            partial = [u for u in users if u.kind in ("dynamic-slice", "slice", "gather", "dynamic-update-slice")]
            if users and len(partial) == len(users) and all(u.operands[0] in names for u in partial):
                for user in partial:
                    if user.kind == "dynamic-update-slice":
                        update = size_of(body[user.operands[1]].shape)
                        written += update - size_of(user.shape)
                    else:
                        total += size_of(user.shape)
            else:
                total += size_of(parameter.shape)
        return max(written, 0) + total

    def _operations(self, one: Instruction, table: dict[str, Instruction]) -> float:
        body = self.computations.get(one.called("calls") or "", {})
        if body:
            inner = [entry for entry in body.values() if entry.kind != "fusion"]
            nested = sum(self._operations(entry, body) for entry in body.values() if entry.kind == "fusion")
            return nested + sum(self._operations(entry, body) for entry in inner)
        if one.kind in ("dot", "convolution"):
            sides = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
            dims = _SHAPE.findall(table[one.operands[0]].shape)[0][1].split(",") if one.operands[0] in table else []
            depth = math.prod(int(dims[int(i)]) for i in sides.group(1).split(",") if i) if sides and dims else 1
            return 2 * depth * elements(one.shape)
        if one.kind in ("reduce", "reduce-window", "scatter", "sort"):
            return elements(table[one.operands[0]].shape) if one.operands[0] in table else elements(one.shape)
        return 0 if one.kind in MOVES else elements(one.shape)


def _under_other_shapes(name: str, body: dict[str, Instruction]) -> set[str]:
    """The names of a parameter: its own, and those of bitcasts, which only see it in another shape."""
    names = {name}
    for one in body.values():  # operands come before their users
        if one.kind == "bitcast" and one.operands[0] in names:
            names.add(one.name)
    return names
