"""What several lazy arrays need to be run: calls in order, and their arrays."""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from fuelflow._errors import StaleGraphError
from fuelflow.graph.expression import Node, Operation, Ref, Stamp, site_text, value_of
from fuelflow.step.forward import Forward
from fuelflow.step.spec import Table

Source = tuple[int, int]
"""Where a value is from: a call and which of its results, or -1 and which leaf."""

Step = tuple[Operation, tuple[Source, ...], int, bool, int]
"""A call: operation, where each input is from, the set of parameters it uses (-1 for
none), its mode, and the call whose changes of the model it follows (-1 for none)."""

Key = tuple[tuple[Step, ...], tuple[Source, ...]]
"""Calls in the order of recording, and where the results wanted are from."""


class Structure:
    """The calls that some results need, without the arrays they are to run on.

    Two structures with one key are run by one program.

    Attributes:
        key: Operations and how they are connected.
        nodes: The calls, in the order of recording.
        leaves: The arrays they run on, in the order in which they are used.
        stamps: The sets of parameters they use.
    """

    __slots__ = ("_places", "_through", "key", "leaves", "nodes", "stamps")

    def __init__(self, outputs: Sequence[Ref], *, through: Stamp | None = None) -> None:
        """Collects what the outputs need; losses of earlier steps are waited for.

        Args:
            outputs: The results wanted.
            through: Parameters through which a gradient is to be taken: a result that
                depends on them is run again even if its value is known.

        Raises:
            StaleGraphError: If a call of a model is needed whose parameters moved on.
        """
        self._through = through
        self.nodes = _needed(outputs, through)
        self._places = {node: place for place, node in enumerate(self.nodes)}
        self.leaves: list[Any] = []
        self.stamps: list[Stamp] = []
        steps = tuple([self._step(node) for node in self.nodes])
        self.key: Key = steps, self._sources(outputs)

    def _step(self, node: Node) -> Step:
        assert node.inputs is not None
        sources = self._sources(node.inputs)
        use = node.use
        if use is None:
            return node.operation, sources, -1, True, -1
        if use.stamp not in self.stamps:
            self.stamps.append(use.stamp)
        previous = -1 if use.previous is None else self._places[use.previous]
        call = self.stamps.index(use.stamp)
        return node.operation, sources, call, use.model.training, previous

    def _sources(self, values: Sequence[Any]) -> tuple[Source, ...]:
        """Where values are from; those that are arrays become leaves."""
        sources: list[Source] = []
        for value in values:
            if isinstance(value, Ref):
                node = value._node
                if not node.values or not is_known(value, self._through):
                    sources.append((self._places[node], value._index))
                    continue
                value = value_of(value)  # noqa: PLW2901
            sources.append((-1, len(self.leaves)))
            self.leaves.append(value)
        return tuple(sources)

    def table(self) -> Table:
        """Each call by its place in the user's code, for explanations."""
        table: Table = {}
        for node in self.nodes:
            where = f"{node.operation.name} ({site_text(node.site)})"
            number = sum(1 for name in table if name.startswith(where))
            name = f"{where} #{number + 1}" if number else where
            table[name] = node.operation.text
        return table


class Recipe:
    """The calls of a structure, to be run inside a trace."""

    def __init__(self, key: Key) -> None:
        self._steps, self._wanted = key

    def run(self, leaves: Sequence[Any], forwards: Sequence[Forward]) -> list[Any]:
        """The results wanted.

        Args:
            leaves: The arrays to run on, traced.
            forwards: The pass of each set of parameters.
        """
        # The last place is that of the leaves, which is -1.
        made: list[Sequence[Any]] = [*[()] * len(self._steps), leaves]
        for place, (operation, sources, call, training, _) in enumerate(self._steps):
            first = ()
            if call >= 0:
                forward = forwards[call]
                first = ((forward.bound if training else forward.at_rest).model,)
            values = [made[source][index] for source, index in sources]
            made[place] = operation.results(values, *first)
        return [made[source][index] for source, index in self._wanted]


def is_known(ref: Ref, through: Stamp | None) -> bool:
    """Whether a result's value can stand in for running its call."""
    node = ref._node
    return ref._index in node.values and (through is None or through not in node.stamps)


def _needed(outputs: Iterable[Ref], through: Stamp | None) -> list[Node]:
    """The calls to be run, in the order of recording."""
    found: set[Node] = set()
    left = [ref._node for ref in outputs if not is_known(ref, through)]
    while left:
        node = left.pop()
        if node in found:
            continue
        use = node.use
        if use is not None and use.stamp.is_stale:
            raise StaleGraphError(use.stamp.step, _what(node))
        if node.inputs is None:
            raise StaleGraphError(max(s.step for s in node.stamps), _what(node))
        found.add(node)
        for value in node.inputs:
            if isinstance(value, Ref):
                below = value._node
                if not below.values or not is_known(value, through):
                    left.append(below)
        if use is not None and use.previous is not None:
            left.append(use.previous)
    return sorted(found, key=_serial)


_serial = operator.attrgetter("serial")


def _what(node: Node) -> str:
    return f"`{node.operation.name}` recorded at {site_text(node.site)}"
