"""A traced program run one operation at a time, to find where a bad value began."""

import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

Kind = Literal["parameter", "variable", "batch", "rate", "operation", "constant"]


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """Where a value that is not finite began.

    Attributes:
        kind: What it is.
        name: The parameter, variable or field; of an operation its name.
        place: Where that is written, as far as it can be told.
        is_derivative: Whether it is known to be part of a backward pass.
        ranges: The smallest and largest finite value of each input of an operation.
        rows: Rows of a batch, the first eight.
        num_rows: How many of them.
    """

    kind: Kind
    name: str
    place: str = ""
    is_derivative: bool = False
    ranges: tuple[tuple[float, float], ...] = ()
    rows: tuple[int, ...] = ()
    num_rows: int = 0


class Mark(NamedTuple):
    """What is known of a value that is not finite.

    ``turned`` is where it became NaN, if it was infinite before.
    """

    suspect: Suspect
    has_nan: bool
    turned: Suspect | None = None


Marks = list[Mark | None]


def is_bad(value: Any) -> bool:
    """Whether a value is floating and not finite."""
    dtype = getattr(value, "dtype", None)
    if dtype is None:
        dtype = np.result_type(value)
    return jnp.issubdtype(dtype, jnp.inexact) and not bool(jnp.isfinite(value).all())


def has_nan(value: Any) -> bool:
    """Whether there is a NaN in a floating value."""
    return bool(jnp.isnan(value).any())


def follow(
    jaxpr: Any,
    consts: Sequence[Any],
    values: Sequence[Any],
    marks: Marks,
    outer: str | None = None,
) -> tuple[list[Any], Marks]:
    """What a jaxpr returns, run one operation at a time, and the marks of that.

    A value that is not finite is marked with where it began: the first operation that
    made one of finite inputs, or an input. What an operation makes finite again, as
    where it selects others, is marked no more.

    Args:
        jaxpr: The jaxpr.
        consts: Its constants.
        values: Its inputs.
        marks: The mark of each input; None for what is finite.
        outer: Where all of it is written, if its own operations cannot tell.
    """
    known: dict[Any, tuple[Any, Mark | None]] = {}

    def read(atom: Any) -> tuple[Any, Mark | None]:
        if hasattr(atom, "val"):
            return atom.val, _mark_of_constant(atom.val)
        return known[atom]

    for variable, value in zip(jaxpr.constvars, consts, strict=True):
        known[variable] = value, _mark_of_constant(value)
    for variable, value, mark in zip(jaxpr.invars, values, marks, strict=True):
        known[variable] = value, mark
    last_use = _last_uses(jaxpr)
    for number, equation in enumerate(jaxpr.eqns):
        inputs, found = _columns([read(atom) for atom in equation.invars])
        outputs = _run(equation, inputs)
        made = _explained(equation, inputs, found, outputs, outer)
        for variable, value, mark in zip(equation.outvars, outputs, made, strict=True):
            known[variable] = value, mark
        for variable in last_use.get(number, ()):
            known.pop(variable, None)
    return _columns([read(atom) for atom in jaxpr.outvars])


def _columns(pairs: list[tuple[Any, Mark | None]]) -> tuple[list[Any], Marks]:
    return [value for value, _ in pairs], [mark for _, mark in pairs]


def _last_uses(jaxpr: Any) -> dict[int, list[Any]]:
    """The variables that are not needed after an equation, by its number."""
    last: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        for atom in (*equation.invars, *equation.outvars):
            if not hasattr(atom, "val"):
                last[atom] = number
    for atom in jaxpr.outvars:
        if not hasattr(atom, "val"):
            last.pop(atom, None)
    uses: dict[int, list[Any]] = {}
    for variable, number in last.items():
        uses.setdefault(number, []).append(variable)
    return uses


def _mark_of_constant(value: Any) -> Mark | None:
    if not is_bad(value):
        return None
    return Mark(Suspect(kind="constant", name="a constant"), has_nan(value))


def _run(equation: Any, values: list[Any]) -> list[Any]:
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    functions: Sequence[Any] = ()
    if isinstance(params, tuple):  # until jax 0.9
        functions, params = params
    made = primitive.bind(*functions, *values, **params)
    return list(made) if primitive.multiple_results else [made]


def _explained(
    equation: Any,
    values: list[Any],
    marks: Marks,
    outputs: list[Any],
    outer: str | None,
) -> Marks:
    """The marks of what an operation made."""
    bad = [is_bad(output) for output in outputs]
    if not any(bad):
        return [None] * len(outputs)
    within = _within(equation, values, marks, outputs, outer)
    return [
        (within[index] or _chosen(equation, values, marks, output, outer))
        if bad[index]
        else None
        for index, output in enumerate(outputs)
    ]


def _chosen(
    equation: Any, values: list[Any], marks: Marks, output: Any, outer: str | None
) -> Mark:
    """The mark of a bad output, by those of the inputs."""
    is_nan = has_nan(output)
    candidates = [
        (mark, value)
        for mark, value in zip(marks, values, strict=True)
        if mark is not None
    ]
    if is_nan:  # a NaN comes of a NaN, if there is one
        candidates = [c for c in candidates if c[0].has_nan] or candidates
    found = [c for c in candidates if c[0].suspect.kind != "constant"]
    if not found:
        if any(mark.has_nan or not is_nan for mark, _ in candidates):
            place = outer or place_of(equation)
            mark = candidates[0][0]
            return mark._replace(suspect=replace(mark.suspect, place=place))
        # Infinite constants, as a mask has, are meant; what makes NaN of them is not.
        return Mark(_operation(equation, values, outer), is_nan)
    mark = _at_first_bad(found, output)
    if is_nan and not mark.has_nan:
        return Mark(mark.suspect, True, _operation(equation, values, outer))
    return mark


def _at_first_bad(candidates: list[tuple[Mark, Any]], output: Any) -> Mark:
    """The mark of the input that is bad where the output first is."""
    if len(candidates) > 1:
        where = int(jnp.argmax(~jnp.isfinite(output).ravel()))
        for mark, value in candidates:
            is_alike = jnp.shape(value) == jnp.shape(output)
            if is_alike and not bool(jnp.isfinite(value).ravel()[where]):
                return mark
    return candidates[0][0]


def _operation(equation: Any, values: list[Any], outer: str | None) -> Suspect:
    floating = [value for value in values if _is_floating(value)]
    return Suspect(
        kind="operation",
        name=equation.primitive.name,
        place=outer or place_of(equation),
        is_derivative="transpose" in str(equation.source_info.name_stack),
        ranges=tuple(_range_of(value) for value in floating[:3]),
    )


def _is_floating(value: Any) -> bool:
    dtype = getattr(value, "dtype", None)
    dtype = np.result_type(value) if dtype is None else dtype
    return jnp.issubdtype(dtype, jnp.floating) and np.size(value) > 0


def _range_of(value: Any) -> tuple[float, float]:
    finite = jnp.isfinite(value)
    if not bool(finite.any()):
        finite = jnp.ones_like(finite)
    low = jnp.min(jnp.where(finite, value, jnp.inf))
    high = jnp.max(jnp.where(finite, value, -jnp.inf))
    return float(low), float(high)


# Operations that hold others.


def _within(
    equation: Any,
    values: list[Any],
    marks: Marks,
    outputs: list[Any],
    outer: str | None,
) -> Marks:
    """The marks of outputs by the operations that an operation holds, if it does."""
    none: Marks = [None] * len(outputs)
    kind, params = equation.primitive.name, equation.params
    if kind == "scan":
        return _within_scan(params, values, marks, outer)
    if kind == "while":
        return _within_while(params, values, marks, outer)
    if kind == "cond":
        branches, (index, *operands) = params["branches"], values
        number = min(max(int(index), 0), len(branches) - 1)
        branch = branches[number]
        _, found = follow(branch.jaxpr, branch.consts, operands, marks[1:], outer)
        return found
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        held = params.get(name)
        jaxpr = getattr(held, "jaxpr", held)
        if jaxpr is None or not hasattr(jaxpr, "eqns"):
            continue
        if len(jaxpr.invars) != len(values) or len(jaxpr.outvars) != len(outputs):
            return none
        inside = outer
        if kind in ("pjit", "jit", "custom_jvp_call", "custom_vjp_call"):
            inside = outer or _place_outside(equation, jaxpr)
        _, found = follow(jaxpr, getattr(held, "consts", ()), values, marks, inside)
        return found
    return none


def _place_outside(equation: Any, jaxpr: Any) -> str | None:
    """Where a call is, unless what it calls is a function of the user's own.

    What a library compiles knows who called it first, and nobody else.
    """
    called = str(equation.params.get("name", ""))
    for held in jaxpr.eqns:
        if place_of(held).partition(" ")[0].rpartition(".")[2] == called:
            return None
    return place_of(equation)


def _within_scan(params: Any, values: list[Any], marks: Marks, outer: Any) -> Marks:
    """The marks of a scan's results: those of the iteration where each went bad."""
    num_consts, num_carry = _scan_counts(params)
    num_fixed = num_consts + num_carry
    consts, carry, stacks = (
        values[:num_consts],
        values[num_consts:num_fixed],
        values[num_fixed:],
    )
    body = params["jaxpr"]
    call = jax.jit(jaxpr_as_fun(body))
    carry_marks = list(marks[num_consts:num_fixed])
    stack_marks: Marks = [None] * (len(body.jaxpr.outvars) - num_carry)
    order = range(params["length"])
    for index in reversed(order) if params["reverse"] else order:
        row = [stack[index] for stack in stacks]
        row_marks = [
            mark if mark is not None and is_bad(part) else None
            for mark, part in zip(marks[num_fixed:], row, strict=True)
        ]
        inputs = [*consts, *carry, *row]
        outputs = call(*inputs)
        given = [*marks[:num_consts], *carry_marks, *row_marks]
        is_news = any(map(is_bad, outputs))
        if is_news:
            _, found = follow(body.jaxpr, body.consts, inputs, given, outer)
            for number, mark in enumerate(found[num_carry:]):
                stack_marks[number] = stack_marks[number] or mark
            carry_marks = [
                (old if old is not None and is_bad(output) else mark)
                for old, mark, output in zip(
                    carry_marks, found[:num_carry], outputs[:num_carry], strict=True
                )
            ]
        else:
            carry_marks = list[Mark | None]([None] * num_carry)
        carry = outputs[:num_carry]
    return [*carry_marks, *stack_marks]


def _scan_counts(params: Any) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried."""
    if "num_consts" in params:  # until jax 0.11
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def _within_while(params: Any, values: list[Any], marks: Marks, outer: Any) -> Marks:
    """The marks of a loop's results."""
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    num_fixed = num_cond + num_body
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    goes_on = jax.jit(jaxpr_as_fun(cond))
    call = jax.jit(jaxpr_as_fun(body))
    fixed, carry = values[num_cond:num_fixed], values[num_fixed:]
    carry_marks = list(marks[num_fixed:])
    while bool(goes_on(*values[:num_cond], *carry)[0]):
        inputs = [*fixed, *carry]
        carry = call(*inputs)
        if any(map(is_bad, carry)):
            given = [*marks[num_cond:num_fixed], *carry_marks]
            _, carry_marks = follow(body.jaxpr, body.consts, inputs, given, outer)
        else:
            carry_marks = list[Mark | None]([None] * len(carry))
    return carry_marks


# Where something is written.


def place_of(equation: Any) -> str:
    """The user's line that an operation is for: ``loss_fn (train.py:12)``."""
    traceback = equation.source_info.traceback
    for frame in getattr(traceback, "frames", ()):
        if not _is_library(frame.file_name):
            file = Path(frame.file_name).name
            return f"{frame.function_name} ({file}:{frame.line_num})"
    return ""


@cache
def _is_library(file_name: str) -> bool:
    if file_name.startswith("<frozen"):
        return True
    own = str(Path(sys.modules["fuelflow"].__file__ or "").parent)
    if file_name.startswith(own):
        return not file_name.startswith(str(Path(own) / "examples"))
    if any(file_name.startswith(folder) for folder in _library_folders()):
        return True
    is_standard = file_name.startswith(sysconfig.get_paths()["stdlib"])
    return is_standard and "site-packages" not in file_name


@cache
def _library_folders() -> tuple[str, ...]:
    found: Callable[[str], Any] = find_spec
    specs = [found(name) for name in ("jax", "jaxlib", "flax", "optax", "equinox")]
    return tuple(
        str(folder) + "/"
        for spec in specs
        if spec is not None
        for folder in spec.submodule_search_locations or ()
    )
