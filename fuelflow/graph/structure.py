"""What several lazy arrays need to be run: calls in order, and their arrays."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from fuelflow._errors import StaleGraphError
from fuelflow.graph.expression import Node, Operation, Ref, Stamp
from fuelflow.step.forward import Forward
from fuelflow.step.spec import Table


class Structure:
    """The calls that some results need, without the arrays they are to run on.

    Two structures with one key are run by one program.

    Attributes:
        key: Operations and how they are connected.
        nodes: The calls, in the order of recording.
        leaves: The arrays they run on.
        stamps: The sets of parameters they use.
    """

    __slots__ = ("_steps", "_wanted", "key", "leaves", "nodes", "stamps")

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
        places = {id(node): number for number, node in enumerate(self.nodes)}
        self.leaves: list[Any] = []
        self.stamps: list[Stamp] = []
        leaf_places: dict[int, int] = {}
        stamp_places: dict[int, int] = {}

        def source(value: Any) -> tuple[int, int]:
            """Node and index of an input; node -1 for a leaf."""
            if isinstance(value, Ref):
                node = value._node
                if not _is_known(value, through):
                    return places[id(node)], value._index
                value = node.values[value._index]
            place = leaf_places.get(id(value))
            if place is None:
                place = leaf_places[id(value)] = len(self.leaves)
                self.leaves.append(value)
            return -1, place

        steps = []
        for node in self.nodes:
            stamp = node.call_stamp
            call = -1
            if stamp is not None:
                call = stamp_places.get(id(stamp), -1)
                if call < 0:
                    call = stamp_places[id(stamp)] = len(self.stamps)
                    self.stamps.append(stamp)
            assert node.inputs is not None
            sources = tuple([source(value) for value in node.inputs])
            steps.append((node.operation, sources, call, node.training))
        self._wanted = tuple([source(ref) for ref in outputs])
        self._steps = tuple(steps)
        self.key: Hashable = (self._steps, self._wanted)

    def recipe(self) -> "Recipe":
        """How to run it, without any array or node."""
        return Recipe(self._steps, self._wanted)

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
        self,
        steps: tuple[tuple[Operation, tuple[tuple[int, int], ...], int, bool], ...],
        wanted: tuple[tuple[int, int], ...],
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

        def value(source: tuple[int, int]) -> Any:
            node, index = source
            return leaves[index] if node < 0 else made[node][index]

        for operation, sources, call, training in self._steps:
            first = ()
            if call >= 0:
                forward = forwards[call]
                first = ((forward.bound if training else forward.at_rest).model,)
            made.append(operation.results([value(s) for s in sources], *first))
        return [value(source) for source in self._wanted]


def _is_known(ref: Ref, through: Stamp | None) -> bool:
    """Whether a result's value can stand in for running its call."""
    node = ref._node
    return ref._index in node.values and (through is None or through not in node.stamps)


def _needed(outputs: Iterable[Ref], through: Stamp | None) -> list[Node]:
    found: dict[int, Node] = {}
    left = [ref._node for ref in outputs if not _is_known(ref, through)]
    while left:
        node = left.pop()
        if id(node) in found:
            continue
        stamp = node.call_stamp
        if stamp is not None and stamp.is_stale:
            raise StaleGraphError(stamp.step, _what(node))
        if node.inputs is None:
            raise StaleGraphError(max(s.step for s in node.stamps), _what(node))
        found[id(node)] = node
        left += [
            value._node
            for value in node.inputs
            if isinstance(value, Ref) and not _is_known(value, through)
        ]
        if node.previous is not None:
            left.append(node.previous)
    return sorted(found.values(), key=_serial)


def _serial(node: Node) -> int:
    return node.serial


def _what(node: Node) -> str:
    return f"`{node.operation.name}` recorded at {node.site}"
