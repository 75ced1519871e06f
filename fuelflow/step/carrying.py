"""Carrying what probes record out of a traced pass, as further results of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core

from fuelflow.step.probe import record, witness
from fuelflow.step.weighted import Mean
from fuelflow.step.witness import PassRows, Sums, Witness, added, note, zero_sums

# Not every version of jax declares its flags and classes to type checkers.
_config: Any = jax.config
_core: Any = core

Means = dict[str, Mean]


def call_with_probes(function: Callable[[], Any], rows: PassRows) -> tuple[Any, Means]:
    """What a function without arguments returns, and what is recorded inside of it.

    Args:
        function: Traced once. What it returns may be any tree of arrays.
        rows: The rows it goes through.

    Raises:
        ValueError: If a name is recorded with a weight and without, or where it cannot
            be carried out of.
    """
    if not _is_traced(rows.weight):
        with _witnessed(rows) as told:
            result = function()
        return result, _means(told.sums, told.has_weight, rows)
    staged = Staged.of(lambda _: function(), ())
    if not staged.names:
        return staged((), rows)[0], {}
    result, sums = _without_probes(lambda: staged((), rows))()
    return result, _means(sums, staged.names, rows)


def grad_with_probes(
    function: Callable[[Any], tuple[Any, Any]], argument: Any, rows: PassRows
) -> tuple[Any, Any, Means]:
    """The gradient of a function, its second result, and what is recorded inside of it.

    Args:
        function: Returns a scalar and a tree of arrays. Traced once.
        argument: Where the gradient is taken.
        rows: The rows it goes through.

    Raises:
        ValueError: As `call_with_probes`.
    """
    if not _is_traced(argument):
        with _witnessed(rows) as told:
            grads, result = jax.grad(function, has_aux=True)(argument)
        return grads, result, _means(told.sums, told.has_weight, rows)
    staged = Staged.of(function, argument)

    def evaluated(argument: Any) -> tuple[Any, tuple[Any, Sums]]:
        (scalar, result), sums = staged(argument, rows)
        return scalar, (result, sums)

    differentiated = jax.grad(evaluated, has_aux=True)
    if staged.names:
        differentiated = _without_probes(differentiated)
    grads, (result, sums) = differentiated(argument)
    return grads, result, _means(sums, staged.names, rows)


def _means(sums: Sums, names: dict[str, bool], rows: PassRows) -> Means:
    return {
        name: rows.mean(sums[name], has_weight=has_weight)
        for name, has_weight in names.items()
    }


def _is_traced(tree: Any) -> bool:
    """Whether a function is to be traced: always, but for runs with jit disabled."""
    if not _config.jax_disable_jit:
        return True
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


@contextmanager
def _witnessed(rows: PassRows) -> Iterator[Witness]:
    told = Witness(rows)
    token = witness.set(told)
    try:
        yield told
    finally:
        witness.reset(token)


@dataclass(frozen=True)
class Staged:
    """A function that was traced, and is evaluated from its program.

    Attributes:
        program: What was traced.
        out_tree: The structure of its results.
        names: What is recorded in it, and whether with a weight.
    """

    program: Any
    out_tree: Any
    names: dict[str, bool]

    @classmethod
    def of(cls, function: Callable[[Any], Any], argument: Any) -> "Staged":
        """A function of one tree of arrays, traced."""
        program, shapes = jax.make_jaxpr(function, return_shape=True)(argument)
        return cls(program, jax.tree.structure(shapes), recorded_in(program))

    def __call__(self, argument: Any, rows: PassRows) -> tuple[Any, Sums]:
        """Its results, and the sums of what is recorded."""
        values = jax.tree.leaves(argument)
        results, sums = _Carrier(rows).run(self.program, values)
        return jax.tree.unflatten(self.out_tree, results), sums


def recorded_in(program: Any) -> dict[str, bool]:
    """The names recorded in a program at any depth, and whether with a weight.

    Raises:
        ValueError: If a name is recorded with a weight and without.
    """
    names: dict[str, bool] = {}
    _collect(program, names)
    return names


def _collect(program: Any, names: dict[str, bool]) -> None:
    if not program.effects:
        return
    for equation in program.eqns:
        if equation.primitive is record:
            has_weight = len(equation.invars) > 1
            note(names, equation.params["name"], has_weight=has_weight)
        elif equation.effects:
            for inner in _inner_programs(equation):
                _collect(inner, names)


def _records(equation: Any) -> bool:
    if equation.primitive is record:
        return True
    return bool(equation.effects) and any(map(recorded_in, _inner_programs(equation)))


def _inner_programs(equation: Any) -> list[Any]:
    return [
        leaf
        for value in equation.params.values()
        for leaf in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(leaf, _core.Jaxpr | _core.ClosedJaxpr)
    ]


def _closed(program: Any) -> Any:
    """A program with its constants; as a parameter of `jax.checkpoint` it has none."""
    return program if hasattr(program, "consts") else _core.ClosedJaxpr(program, ())


def _without_probes(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function in whose program no probe is left, which would slow its dispatch."""

    def evaluated(*arguments: Any) -> Any:
        made = jax.make_jaxpr(function, return_shape=True)(*arguments)
        program, shapes = made
        results = _core.jaxpr_as_fun(_stripped(program))(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return evaluated


def _stripped(program: Any) -> Any:
    if not recorded_in(program):
        return program
    if hasattr(program, "consts"):
        return _core.ClosedJaxpr(_stripped_open(program.jaxpr), program.consts)
    return _stripped_open(program)


def _stripped_open(program: Any) -> Any:
    equations = []
    for equation in program.eqns:
        if equation.primitive is record:
            continue
        equations.append(_stripped_equation(equation))
    effects = frozenset().union(*(equation.effects for equation in equations))
    return program.replace(eqns=equations, effects=effects)


def _stripped_equation(equation: Any) -> Any:
    if not _records(equation):
        return equation

    def strip(value: Any) -> Any:
        if isinstance(value, _core.Jaxpr | _core.ClosedJaxpr):
            return _stripped(value)
        return tuple(map(strip, value)) if isinstance(value, tuple) else value

    params = {name: strip(value) for name, value in equation.params.items()}
    inner = [each.effects for each in _inner_programs(equation.replace(params=params))]
    return equation.replace(params=params, effects=frozenset().union(*inner))


@dataclass(frozen=True)
class _Carrier:
    """Evaluates programs equation by equation, and adds up what is recorded."""

    rows: PassRows

    def run(self, program: Any, values: Sequence[Any]) -> tuple[list[Any], Sums]:
        """The results of a program, and what is recorded in it."""
        program = _closed(program)
        if not recorded_in(program):
            return list(_core.jaxpr_as_fun(program)(*values)), {}
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.constvars, program.consts, strict=True))
        known |= zip(jaxpr.invars, values, strict=True)

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, "val") else known[atom]

        sums: Sums = {}
        for part, wanted in _parts(jaxpr):
            if isinstance(part, list):
                results = _evaluate(jaxpr, part, wanted, known)
                known |= zip(wanted, results, strict=True)
                continue
            operands = [read(atom) for atom in part.invars]
            if part.primitive is record:
                num_mapped = part.params["num_mapped"]
                mean = self.rows.read(*operands, num_mapped=num_mapped)
                new = {part.params["name"]: mean}
            else:
                results, new = self._step_into(part, operands)
                known |= zip(part.outvars, results, strict=True)
            sums = added(sums, new)
        return [read(atom) for atom in jaxpr.outvars], sums

    def _step_into(
        self, equation: Any, operands: list[Any]
    ) -> tuple[Sequence[Any], Sums]:
        """An equation in whose inner programs something is recorded."""
        name, params = equation.primitive.name, equation.params
        match name:
            case "jit" | "pjit" | "closed_call" | "core_call":
                (program,) = _inner_programs(equation)
                return self.run(program, operands)
            case "scan":
                return self._scan(equation, operands)
            case "while":
                return self._while(equation, operands)
            case "cond" if params.get("branches_platforms") is None:
                return self._cond(params["branches"], operands)
            case "checkpoint" | "remat" | "remat2":
                return self._checkpoint(params, operands)
            case "custom_jvp_call" | "custom_vjp_call" | "custom_vjp_call_jaxpr":
                return self._beside(equation, operands)
        names = ", ".join(f"`{name}`" for name in recorded_in_equation(equation))
        raise ValueError(
            f"a probe cannot be carried out of a `{name}` inside of a model or loss, "
            f"got {names}: return the number from there, and record it outside"
        )

    def _scan(self, equation: Any, operands: list[Any]) -> tuple[Sequence[Any], Sums]:
        params = equation.params
        body = _closed(params["jaxpr"])
        inner, outer = body.jaxpr.invars, equation.invars
        # How these are counted differs from version to version.
        num_stacked = sum(
            len(a.aval.shape) < len(b.aval.shape)
            for a, b in zip(inner, outer, strict=True)
        )
        num_carried = sum(
            len(a.aval.shape) == len(b.aval.shape)
            for a, b in zip(body.jaxpr.outvars, equation.outvars, strict=True)
        )
        num_fixed = len(operands) - num_stacked - num_carried
        fixed, rest = operands[:num_fixed], operands[num_fixed:]
        carried, stacked = rest[:num_carried], rest[num_carried:]

        def step(carried: list[Any], stacked: list[Any]) -> tuple[list[Any], Any]:
            results, sums = self.run(body, [*fixed, *carried, *stacked])
            return results[:num_carried], (results[num_carried:], sums)

        last, (results, sums) = jax.lax.scan(
            step,
            carried,
            stacked,
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*last, *results], jax.tree.map(lambda each: each.sum(0), sums)

    def _while(self, equation: Any, operands: list[Any]) -> tuple[Sequence[Any], Sums]:
        params = equation.params
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        if names := recorded_in(condition):
            listed = ", ".join(f"`{name}`" for name in names)
            raise ValueError(
                "a probe cannot be carried out of the condition of a while loop, got "
                f"{listed}: record it in the loop's body"
            )
        num_asked, num_fixed = params["cond_nconsts"], params["body_nconsts"]
        asked, rest = operands[:num_asked], operands[num_asked:]
        fixed, start = rest[:num_fixed], rest[num_fixed:]

        def goes_on(carry: tuple[list[Any], Sums]) -> Any:
            return self.run(condition, [*asked, *carry[0]])[0][0]

        def step(carry: tuple[list[Any], Sums]) -> tuple[list[Any], Sums]:
            results, sums = self.run(body, [*fixed, *carry[0]])
            return results, added(carry[1], sums)

        first = (start, zero_sums(recorded_in(body)))
        return jax.lax.while_loop(goes_on, step, first)

    def _cond(
        self, branches: Sequence[Any], operands: list[Any]
    ) -> tuple[Sequence[Any], Sums]:
        names = {name: None for branch in branches for name in recorded_in(branch)}

        def taken(branch: Any) -> Callable[..., tuple[list[Any], Sums]]:
            def run(*operands: Any) -> tuple[list[Any], Sums]:
                results, sums = self.run(branch, operands)
                return results, {**zero_sums(names), **sums}

            return run

        index, *rest = operands
        return jax.lax.switch(index, [taken(branch) for branch in branches], *rest)

    def _checkpoint(
        self, params: Any, operands: list[Any]
    ) -> tuple[Sequence[Any], Sums]:
        def run(*operands: Any) -> tuple[list[Any], Sums]:
            return self.run(params["jaxpr"], operands)

        run = jax.checkpoint(
            run, prevent_cse=params["prevent_cse"], policy=params["policy"]
        )
        return run(*operands)

    def _beside(self, equation: Any, operands: list[Any]) -> tuple[Sequence[Any], Sums]:
        """An equation with derivatives of its own, and its program once more for these.

        What both compute is one in the compiled program.
        """
        known: dict[Any, Any] = {
            atom: value
            for atom, value in zip(equation.invars, operands, strict=True)
            if not hasattr(atom, "val")
        }
        (program,) = _inner_programs(equation)
        wanted = [each for each in equation.outvars if not _is_dropped(each)]
        found = iter(_evaluate(_closed(program).jaxpr, [equation], wanted, known))
        results = [
            None if _is_dropped(each) else next(found) for each in equation.outvars
        ]
        _, sums = self.run(program, jax.lax.stop_gradient(operands))
        return results, sums


def recorded_in_equation(equation: Any) -> dict[str, bool]:
    """The names recorded in an equation's inner programs."""
    names: dict[str, bool] = {}
    for program in _inner_programs(equation):
        names |= recorded_in(program)
    return names


def _parts(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Lists of equations without records, and single ones with, in order.

    With each list come the variables of it that are used later.
    """
    equations = jaxpr.eqns
    bounds = [i for i, equation in enumerate(equations) if _records(equation)]
    last_use = {
        atom: i
        for i, equation in enumerate(equations)
        for atom in equation.invars
        if not hasattr(atom, "val")
    }
    last_use |= {a: len(equations) for a in jaxpr.outvars if not hasattr(a, "val")}
    start = 0
    for bound in [*bounds, len(equations)]:
        part = list(equations[start:bound])
        if part:
            made = [v for each in part for v in each.outvars if not _is_dropped(v)]
            yield part, [v for v in made if last_use.get(v, -1) >= bound]
        if bound < len(equations):
            yield equations[bound], []
        start = bound + 1


def _is_dropped(variable: Any) -> bool:
    return type(variable).__name__ == "DropVar"


def _evaluate(
    jaxpr: Any, equations: list[Any], wanted: list[Any], known: dict[Any, Any]
) -> list[Any]:
    """Some equations of a program, as JAX itself evaluates them."""
    made = {v for each in equations for v in each.outvars}
    asked = {
        atom: None
        for each in equations
        for atom in each.invars
        if not hasattr(atom, "val") and atom not in made
    }
    effects = frozenset().union(*(each.effects for each in equations))
    part = _core.Jaxpr(
        (), list(asked), wanted, equations, effects, debug_info=jaxpr.debug_info
    )
    return _core.jaxpr_as_fun(_core.ClosedJaxpr(part, ()))(
        *[known[atom] for atom in asked]
    )
