"""What several lazy arrays need to be run: calls in order, and their arrays."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from fuelflow._errors import StaleGraphError
from fuelflow.graph.expression import Node, Operation, Ref, Stamp
from fuelflow.step.forward import Forward
from fuelflow.step.spec import Table

Step = tuple[Operation, tuple[tuple[int, int] | None, ...], int, bool]
"""A call: operation, where each input is from (a call and which of its results; None
for the next leaf), the set of parameters it uses (-1 for none), and its mode."""


class Structure:
    """The calls that some results need, without the arrays they are to run on.

    Two structures with one key are run by one program.

    Attributes:
        key: Operations and how they are connected.
        nodes: The calls, in the order of recording.
        leaves: The arrays they run on, in the order in which they are used.
        stamps: The sets of parameters they use.
    """

    __slots__ = ("key", "leaves", "nodes", "stamps")

    def __init__(self, outputs: Sequence[Ref], *, through: Stamp | None = None) -> None:
        """Collects what the outputs need.

        Args:
            outputs: The results wanted.
            through: Parameters through which a gradient is to be taken: a result that
                depends on them is run again even if its value is known.

        Raises:
            StaleGraphError: If a call of a model is needed whose parameters moved on.
        """
        self.nodes = _needed(outputs, through)
        self.leaves: list[Any] = []
        self.stamps: list[Stamp] = []
        places: dict[Node, int] = {}
        steps: list[Step] = []
        for place, node in enumerate(self.nodes):
            places[node] = place
            assert node.inputs is not None
            sources = self._sources(node.inputs, places, through)
            stamp = node.call_stamp
            call = -1
            if stamp is not None:
                if stamp not in self.stamps:
                    self.stamps.append(stamp)
                call = self.stamps.index(stamp)
            steps.append((node.operation, sources, call, node.training))
        wanted = self._sources(outputs, places, through)
        self.key: tuple[tuple[Step, ...], Any] = tuple(steps), wanted

    def _sources(
        self, values: Sequence[Any], places: dict[Node, int], through: Stamp | None
    ) -> tuple[tuple[int, int] | None, ...]:
        """Where values are from; those that are arrays become leaves."""
        sources: list[tuple[int, int] | None] = []
        for value in values:
            if isinstance(value, Ref):
                node = value._node
                if not node.values or not _is_known(value, through):
                    sources.append((places[node], value._index))
                    continue
                value = node.values[value._index]  # noqa: PLW2901
            self.leaves.append(value)
            sources.append(None)
        return tuple(sources)

    def recipe(self) -> "Recipe":
        """How to run it, without any array or node."""
        return Recipe(*self.key)

    def table(self) -> Table:
        """Each call by its place in the user's code, for explanations."""
        table: Table = {}
        for node in self.nodes:
            where = f"{node.operation.name} ({node.site})"
            number = sum(1 for name in table if name.startswith(where))
            name = f"{where} #{number + 1}" if number else where
            table[name] = node.operation.text
        return table


class Recipe:
    """The calls of a structure, to be run inside a trace."""

    def __init__(
        self, steps: tuple[Step, ...], wanted: tuple[tuple[int, int] | None, ...]
    ) -> None:
        self._steps = steps
        self._wanted = wanted

    def run(self, leaves: Sequence[Any], forwards: Sequence[Forward]) -> list[Any]:
        """The results wanted.

        Args:
            leaves: The arrays to run on, traced.
            forwards: The pass of each set of parameters.
        """
        made: list[list[Any]] = []
        left = iter(leaves)

        def values(sources: tuple[tuple[int, int] | None, ...]) -> list[Any]:
            return [next(left) if s is None else made[s[0]][s[1]] for s in sources]

        for operation, sources, call, training in self._steps:
            first = ()
            if call >= 0:
                forward = forwards[call]
                first = ((forward.bound if training else forward.at_rest).model,)
            made.append(operation.results(values(sources), *first))
        return values(self._wanted)


def _is_known(ref: Ref, through: Stamp | None) -> bool:
    """Whether a result's value can stand in for running its call."""
    node = ref._node
    return ref._index in node.values and (through is None or through not in node.stamps)


def _needed(outputs: Iterable[Ref], through: Stamp | None) -> list[Node]:
    found: set[Node] = set()
    left = [ref._node for ref in outputs if not _is_known(ref, through)]
    while left:
        node = left.pop()
        if node in found:
            continue
        stamp = node.call_stamp
        if stamp is not None and stamp.is_stale:
            raise StaleGraphError(stamp.step, _what(node))
        if node.inputs is None:
            raise StaleGraphError(max(s.step for s in node.stamps), _what(node))
        found.add(node)
        for value in node.inputs:
            if isinstance(value, Ref):
                below = value._node
                if not below.values or not _is_known(value, through):
                    left.append(below)
        if node.previous is not None:
            left.append(node.previous)
    return sorted(found, key=_serial)


_serial = operator.attrgetter("serial")


def _what(node: Node) -> str:
    return f"`{node.operation.name}` recorded at {node.site}"
