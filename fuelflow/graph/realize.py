"""Running lazy arrays: several at once, by one program for each structure."""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from fuelflow._errors import StaleGraphError
from fuelflow._types import Array, Params, PyTree, Variables
from fuelflow.devices.placement import Placement, placement_of_arrays
from fuelflow.graph.expression import Ref, Stamp, site_text, value_of
from fuelflow.graph.recent import Recent
from fuelflow.graph.structure import Recipe, Structure
from fuelflow.model.definition import Definition
from fuelflow.step.forward import Forward
from fuelflow.step.program import CompileLog, Program
from fuelflow.step.spec import Table

MAX_PROGRAMS = 256
"""Programs kept; the one used longest ago goes first."""


class Pass(NamedTuple):
    """The arrays of one set of parameters, as a program takes them."""

    params: Params
    variables: Variables
    key: jax.Array
    step: Array


def realize(*values: Any) -> Any:
    """The values of lazy arrays, or of trees of them, run together by one program.

    What they share is run once. What is not lazy is given back as it is.

    Args:
        *values: Lazy arrays, and trees of them.

    Returns:
        The one value, or a tuple of several, with `jax.Array` for `Lazy`.

    Raises:
        StaleGraphError: If one was recorded with parameters that have moved on.

    Example:
        >>> import fuelflow as ff, jax.numpy as jnp
        >>> x = ff.lazy(jnp.arange)(3)
        >>> total, parts = ff.realize(x.sum(), {"first": x[0]})
        >>> int(total), int(parts["first"])
        (3, 0)
    """
    leaves, treedef = jax.tree.flatten(values)
    lazies = [leaf for leaf in leaves if isinstance(leaf, Ref)]
    known = iter(realize_all(lazies))
    leaves = [next(known) if isinstance(leaf, Ref) else leaf for leaf in leaves]
    results = jax.tree.unflatten(treedef, leaves)
    return results[0] if len(results) == 1 else results


def realize_all(lazies: Sequence[Ref]) -> list[Any]:
    """The value of each, all that are unknown by one program."""
    unknown = [ref for ref in lazies if ref._index not in ref._node.values]
    if unknown:
        _run(unknown)
    return [value_of(ref) for ref in lazies]


def _run(refs: Sequence[Ref]) -> None:
    structure = Structure(refs)
    passes = tuple([pass_of(stamp) for stamp in structure.stamps])
    definitions = definitions_of(structure.stamps)
    # All parameters of a model are in one place.
    states = [next(iter(each.params.values())) for each in passes]
    placement = placement_of_arrays([*structure.leaves, *states])
    # A program keeps its definitions alive, so that no other can have their identity.
    key = (structure.key, tuple(map(id, definitions)), placement)
    program = _programs.get(key)
    if program is None:
        program = _make_program(structure, definitions, refs, placement)
        _programs.add(key, program)
    leaves = tuple(structure.leaves)
    if placement is not None:
        leaves = tuple(placement.leaves(leaves))
    for ref, value in zip(refs, program(leaves, leaves, passes), strict=True):
        node = ref._node
        node.values[ref._index] = value
        fresh = [stamp for stamp in node.stamps if not stamp.is_stale]
        for stamp in fresh:
            stamp.look([node])
        if not fresh:
            node.release_if_known()


def pass_of(stamp: Stamp) -> Pass:
    """The arrays of the parameters that a stamp stands for.

    Raises:
        StaleGraphError: If nobody holds the graph any more.
    """
    state = _graph_of(stamp).state
    return Pass(state.params, state.variables, state.key, state.step)


def definitions_of(stamps: Sequence[Stamp]) -> tuple[Definition, ...]:
    """The models whose parameters stamps stand for.

    Raises:
        StaleGraphError: If nobody holds the graph of one any more.
    """
    return tuple([_graph_of(stamp).definition for stamp in stamps])


def _graph_of(stamp: Stamp) -> Any:
    graph = stamp.graph
    if graph is None:
        raise StaleGraphError(stamp.step, "a value of a graph that is gone")
    return graph


def forward_of(definition: Definition, arrays: Pass) -> Forward:
    """A training pass with the key that a step would have."""
    key = jax.random.fold_in(arrays.key, arrays.step)
    return Forward(definition, arrays.params, arrays.variables, key, training=True)


def _make_program(
    structure: Structure,
    definitions: tuple[Definition, ...],
    refs: Sequence[Ref],
    placement: Placement | None,
) -> Program:
    recipe = Recipe(structure.key)

    def run(leaves: Sequence[Any], passes: Sequence[Pass]) -> PyTree:
        forwards = [
            forward_of(definition, arrays)
            for definition, arrays in zip(definitions, passes, strict=True)
        ]
        return recipe.run(leaves, forwards)

    return Program(
        f"realize ({site_text(refs[0]._node.site)})",
        run,
        _log,
        fixed_table=structure.table(),
        check_batch=accept,
        describe=describe_nothing,
        settled=None if placement is None else placement.settled,
    )


def accept(leaves: Any) -> None:
    """Refuses nothing: what is recorded has been looked at."""
    del leaves


def describe_nothing(leaves: Any) -> Table:
    """Leaves the description to the structure."""
    del leaves
    return {}


# The same line for another graph is no program compiled twice.
_log = CompileLog(is_strict=False, unnamed_level=logging.INFO)
_programs: Recent[Program] = Recent(MAX_PROGRAMS)
