"""The step before it runs: parameters, arithmetic, memory and program text."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from fuelflow._types import Params
from fuelflow.step.program import Executable
from fuelflow.step.spec import leaf_text

# Type checkers find ClosedJaxpr exported by some versions of jax and not by others.
Jaxpr = Any


@dataclass(frozen=True)
class ParamPlan:
    """One parameter as the step treats it.

    Attributes:
        name: Dotted name.
        kind: Dtype and shape, such as ``f32[3,3]``.
        size: Number of values.
        is_trained: Whether it is updated.
        lr_multiplier: Factor on its rate.
    """

    name: str
    kind: str
    size: int
    is_trained: bool
    lr_multiplier: float


@dataclass(frozen=True)
class StepPlan:
    """What one step will do. Figures a backend does not give are None.

    Attributes:
        params: Every parameter, in the model's order.
        flops: Floating-point operations of one step as XLA counts them before its
            optimizations, with the body of a scan counted as often as it runs; None if
            it holds a loop whose length is only known when it runs.
        bytes_accessed: Bytes read and written by all operations, counted the same way:
            an upper bound, since fused operations keep values in registers.
        argument_bytes: Size of the state and batch.
        output_bytes: Size of the new state and the outcome.
        aliased_bytes: The part of the output that reuses the argument's buffers.
        temporary_bytes: Size of what is allocated besides while the step runs.
        peak_bytes: The most that is allocated at a time, as the backend reckons it;
            on a CPU that leaves out temporaries.
        jaxpr: The traced program.
        text: The compiled program, as the backend prints it.
    """

    params: tuple[ParamPlan, ...]
    flops: float | None
    bytes_accessed: float | None
    argument_bytes: int | None
    output_bytes: int | None
    aliased_bytes: int | None
    temporary_bytes: int | None
    peak_bytes: int | None
    jaxpr: Jaxpr
    text: str | None

    @property
    def num_params(self) -> int:
        """Number of values in all parameters."""
        return sum(param.size for param in self.params)

    @property
    def num_trained(self) -> int:
        """Number of values that are updated."""
        return sum(param.size for param in self.params if param.is_trained)

    def __repr__(self) -> str:
        width = max(len(param.name) for param in self.params)
        lines = [
            f"{p.name:<{width}}  {p.kind:<16} {p.size:>12,}"
            + ("" if p.is_trained else "  frozen")
            + ("" if p.lr_multiplier == 1 else f"  lr × {p.lr_multiplier:g}")
            for p in self.params
        ]
        figures = {
            "parameters": f"{self.num_params:,}, of which trained {self.num_trained:,}",
            "arithmetic": _shown(self.flops, "FLOP"),
            "bytes accessed": _shown(self.bytes_accessed, "B"),
            "arguments": _shown(self.argument_bytes, "B"),
            "outputs": _shown(self.output_bytes, "B"),
            "of which in place": _shown(self.aliased_bytes, "B"),
            "temporary": _shown(self.temporary_bytes, "B"),
            "peak": _shown(self.peak_bytes, "B"),
        }
        return "\n".join(
            lines + [f"{name:<18} {text}" for name, text in figures.items()]
        )


def make_plan(
    executable: Executable,
    params: Params,
    trained: frozenset[str],
    multipliers: Mapping[str, float],
) -> StepPlan:
    """The plan of a compiled step.

    Args:
        executable: The step's program.
        params: Parameters by name, in the order to show them.
        trained: Those that are updated.
        multipliers: Factors on their rates, where not 1.
    """
    memory = executable.call.memory_analysis()
    jaxpr = executable.traced.jaxpr
    costs = count_costs(jaxpr)
    return StepPlan(
        params=tuple(
            ParamPlan(
                name,
                leaf_text(param),
                param.size,
                name in trained,
                multipliers.get(name, 1.0) if name in trained else 1.0,
            )
            for name, param in params.items()
        ),
        flops=costs.get("flops"),
        bytes_accessed=costs.get("bytes accessed"),
        argument_bytes=getattr(memory, "argument_size_in_bytes", None),
        output_bytes=getattr(memory, "output_size_in_bytes", None),
        aliased_bytes=getattr(memory, "alias_size_in_bytes", None),
        temporary_bytes=getattr(memory, "temp_size_in_bytes", None),
        peak_bytes=getattr(memory, "peak_memory_in_bytes", None),
        jaxpr=jaxpr,
        text=executable.call.as_text(),
    )


_COUNTED = ("flops", "bytes accessed")


def count_costs(jaxpr: Jaxpr) -> dict[str, float]:
    """FLOPs and bytes of a traced program, loops of known length counted in full.

    XLA counts the body of a loop once. So for each scan the count of its body alone is
    taken once less, and its own full count as often as it runs.

    Returns:
        ``flops`` and ``bytes accessed``, each left out if the backend does not count it
        or a loop has no known length.
    """
    once = _costs_once(jaxpr)
    if any(eqn.primitive.name == "while" for eqn in _equations(jaxpr.jaxpr)):
        return {}
    total = {name: float(once[name]) for name in _COUNTED if name in once}
    for eqn in _equations(jaxpr.jaxpr):
        if eqn.primitive.name != "scan":
            continue
        body = eqn.params["jaxpr"]
        in_full = count_costs(body)
        body_once = _costs_once(body)
        for name in list(total):
            if name not in in_full:
                del total[name]
                continue
            total[name] += eqn.params["length"] * in_full[name] - float(body_once[name])
    return total


def _costs_once(jaxpr: Jaxpr) -> Mapping[str, Any]:
    # Brings Pallas along, twenty milliseconds that an import need not take.
    from jax.extend.core import jaxpr_as_fun

    lowered = jax.jit(jaxpr_as_fun(jaxpr)).lower(*jaxpr.in_avals)
    try:
        return lowered.cost_analysis() or {}
    except NotImplementedError:  # a backend that only counts what it has compiled
        return {}


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of a program and those it calls, but not of scans' bodies."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name != "scan":
            for inner in _called(list(eqn.params.values())):
                yield from _equations(inner)


def _called(values: list[Any]) -> Iterator[Jaxpr]:
    from jax.extend import core

    jaxprs: Any = core
    for value in values:
        if isinstance(value, jaxprs.ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, jaxprs.Jaxpr):
            yield value
        elif isinstance(value, list | tuple):
            yield from _called(list(value))


def _shown(number: float | None, unit: str) -> str:
    if number is None:
        return "not given by this backend"
    for power, prefix in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.2f} {prefix}{unit}"
    return f"{number:.0f} {unit}"
