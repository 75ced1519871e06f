"""A structure that is recognised when it is recorded again, without making its key."""

from collections.abc import Sequence
from typing import Any

from fuelflow.graph.expression import Operation, Ref, Stamp, value_of
from fuelflow.graph.structure import Key, is_known

Meeting = tuple[int, int, int, Operation | None, int]
"""Where a call is met from the outputs down: in which call, by its number in the order
of meeting, 0 being the outputs; as which input of it, -1 being the call that it
follows; and by which result. Then what it is: an operation, or a call met before."""


class Pattern:
    """A structure as it is recognised: call by call, each where it was found before.

    Args:
        key: The key of the structure.
    """

    def __init__(self, key: Key) -> None:
        steps, wanted = key
        self._num_outputs = len(wanted)
        self._route: list[Meeting] = []
        leaves: dict[int, tuple[int, int]] = {}
        numbers: dict[int, int] = {}
        left = [(0, wanted, -1)]
        while left:
            number, sources, previous = left.pop()
            for position, (place, index) in (*enumerate(sources), (-1, (previous, 0))):
                if place in numbers:
                    self._route.append((number, position, index, None, numbers[place]))
                elif place >= 0:
                    operation, below, _, _, follows = steps[place]
                    numbers[place] = len(numbers) + 1
                    self._route.append((number, position, index, operation, 0))
                    left.append((numbers[place], below, follows))
                elif position >= 0:
                    leaves[index] = number, position
        self._leaves = [leaves[index] for index in sorted(leaves)]
        # The calls of models in the order of recording, and what is known of them.
        self._uses = [
            (numbers[place], call, follows >= 0)
            for place, (_, _, call, _, follows) in enumerate(steps)
            if call >= 0
        ]
        self._num_stamps = 1 + max([call for _, call, _ in self._uses], default=-1)

    def match(
        self, outputs: Sequence[Ref], through: Stamp | None
    ) -> tuple[list[Any], list[Stamp]] | None:
        """The leaves and stamps of what outputs need, if it is this structure.

        None if it is another: if its key is. Two calls of no model may be one, which
        changes no result.

        Args:
            outputs: The results wanted.
            through: As `Structure` takes it.
        """
        nodes: list[Any] = [None]
        inputs: list[Any] = [outputs]
        if len(outputs) != self._num_outputs or not self._meet(nodes, inputs, through):
            return None
        stamps = self._stamps(nodes)
        if stamps is None:
            return None
        leaves = [inputs[number][position] for number, position in self._leaves]
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Ref):
                if not is_known(leaf, through):
                    return None
                leaves[number] = value_of(leaf)
        return leaves, stamps

    def _meet(self, nodes: list[Any], inputs: list[Any], through: Stamp | None) -> bool:
        """Whether all calls are met; takes note of them and of their inputs."""
        for number, position, index, operation, before in self._route:
            if position < 0:
                node = nodes[number].use.previous
            else:
                ref = inputs[number][position]
                if not isinstance(ref, Ref) or ref._index != index:
                    return False
                node = ref._node
                if node.values and is_known(ref, through):
                    return False
            if before:
                if node is not nodes[before]:
                    return False
                continue
            if node is None or node.operation is not operation or node.inputs is None:
                return False
            nodes.append(node)
            inputs.append(node.inputs)
        return True

    def _stamps(self, nodes: list[Any]) -> list[Stamp] | None:
        """The stamps of the calls of models; None if they are not as they should be.

        Which model, and in which mode, is part of an operation.
        """
        stamps: list[Any] = [None] * self._num_stamps
        last = -1
        for number, call, follows in self._uses:
            node = nodes[number]
            stamp, previous = node.use.stamp, node.use.previous
            if stamps[call] is None:
                stamps[call] = stamp
            is_same = stamps[call] is stamp and not stamp.is_stale
            if not is_same or node.serial <= last or (previous is not None) != follows:
                return None
            last = node.serial
        return stamps
