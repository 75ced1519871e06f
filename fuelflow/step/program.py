"""Compiled programs: made once for each signature, and every making accounted for."""

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import jax
from jax.stages import Compiled, Traced

from fuelflow._errors import RecompileError
from fuelflow._types import Batch
from fuelflow.step.spec import Table, batch_table, leaf_text, nearest_changes

logger = logging.getLogger("fuelflow")
# Not every version of jax declares its flags to type checkers.
_config: Any = jax.config


_UNNAMED = (
    "something of no name: the structure of the model or batch, a setting that a "
    "recorded function reads, or which of its arrays are one"
)


@dataclass(frozen=True)
class CompileRecord:
    """One compilation of one program.

    Attributes:
        program: ``"step"``, ``"run"``, ``"evaluate"`` or ``"grads"``.
        seconds: Wall time of tracing and compiling.
        changes: One text for each leaf that changed since the nearest earlier
            compilation, old → new; empty for a program's first.
    """

    program: str
    seconds: float
    changes: tuple[str, ...]

    @property
    def is_first(self) -> bool:
        """Whether this was the program's first, which nothing could spare."""
        return not self.changes

    @property
    def reason(self) -> str:
        """What made it necessary."""
        return "; ".join(self.changes) or "first compilation"

    def __str__(self) -> str:
        return f"{self.program}: {self.reason} ({self.seconds:.2f} s)"


class CompileLog:
    """All compilations of one loop, in order.

    Args:
        is_strict: Whether a program's second compilation is an error.
        unnamed_level: Level at which a further compilation is logged that no change of
            a name explains.
    """

    def __init__(
        self, *, is_strict: bool, unnamed_level: int = logging.WARNING
    ) -> None:
        self._unnamed_level = unnamed_level
        self.records: list[CompileRecord] = []
        self._is_strict = is_strict
        self._tables: dict[str, list[Table]] = {}
        self._warned: set[Hashable] = set()

    def explain(self, program: str, table: Table) -> tuple[str, ...]:
        """Why a program must be compiled for a new table; nothing if it is its first.

        Raises:
            RecompileError: If it is not the first, in strict mode.
        """
        known = self._tables.get(program)
        if not known:
            return ()
        changes = tuple(nearest_changes(known, table)) or (_UNNAMED,)
        if self._is_strict:
            raise RecompileError(program, changes)
        return changes

    def add(self, record: CompileRecord, table: Table) -> None:
        """Keeps a record, and warns of a recompilation once for each kind."""
        self.records.append(record)
        self._tables.setdefault(record.program, []).append(table)
        kind = (
            record.program,
            *(change.partition(":")[0] for change in record.changes),
        )
        if record.changes and kind not in self._warned:
            self._warned.add(kind)
            is_named = record.changes != (_UNNAMED,)
            logger.log(
                logging.WARNING if is_named else self._unnamed_level,
                "compiled the program `%s` again, in %.2f s: %s. Further ones of the "
                "kind are in `compiles`, without a warning",
                record.program,
                record.seconds,
                record.reason,
            )


@dataclass(frozen=True)
class Executable:
    """A compiled program, and what it was compiled from."""

    call: Compiled
    traced: Traced


def _as_they_are(results: Any) -> Any:
    return results


class Program:
    """A function compiled ahead of time for each signature of its batch.

    All its other arguments must always look the same, which the loop sees to when it
    admits a state, so a call looks at the batch alone.

    Args:
        name: How records call it.
        function: A pure function.
        log: Where compilations are accounted for.
        fixed_table: Names, shapes and dtypes of the other arguments.
        check_batch: Refuses batches that no executable should be made for.
        donate: Positions of the arguments whose buffers are taken over.
        describe: Names, shapes and dtypes of a batch.
        settled: What becomes of the results before anybody has them, if anything.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        log: CompileLog,
        *,
        fixed_table: Table,
        check_batch: Callable[[Batch], None],
        donate: tuple[int, ...] = (),
        describe: Callable[[Batch], Table] = batch_table,
        settled: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name = name
        self._function = function
        self._jitted = jax.jit(function, donate_argnums=donate)
        self._log = log
        self._fixed_table = fixed_table
        self.check = check_batch
        self._describe = describe
        self._settled = settled or _as_they_are
        self._executables: dict[Hashable, Executable] = {}
        self._by_text: dict[Hashable, Executable] = {}
        self._last_signature: Hashable = None
        self._last: Executable | None = None
        self._only: Executable | None = None

    @property
    def executables(self) -> list[Executable]:
        """All that were made, in order."""
        return list(self._by_text.values())

    def __call__(
        self, batch: Batch, *arguments: Any, num_steps: int | None = None
    ) -> Any:
        """What the function returns for the arguments, dispatched and not waited for.

        Args:
            batch: The batch, by whose signature the executable is found.
            *arguments: All arguments of the function.
            num_steps: Part of the signature, for a function of stacked batches.

        Raises:
            RecompileError: If a second compilation were needed, in strict mode.
            TypeError: If the batch has leaves that are no numeric arrays.
            ValueError: If its leaves have the wrong shapes, or are on another device.
        """
        if _config.jax_disable_jit:
            self.check(batch)
            return self._function(*arguments)
        try:
            if self._only is not None:
                # While there is one executable, JAX's own check of the arguments serves
                # as the look at the signature, at no cost unless it fails. It comes
                # before anything runs, so nothing runs twice.
                try:
                    return self._settled(self._only.call(*arguments))
                except TypeError:
                    pass
            executable = self.executable(batch, *arguments, num_steps=num_steps)
            return self._settled(executable.call(*arguments))
        except ValueError:
            # Where an array is, is no part of the signature, being costly to look at.
            self.check(batch)
            raise

    def executable(
        self, batch: Batch, *arguments: Any, num_steps: int | None = None
    ) -> Executable:
        """The executable for a batch's signature, made if there is none."""
        found = self.find(batch, num_steps=num_steps)
        return found or self._make(batch, arguments, num_steps)

    def find(self, batch: Batch, *, num_steps: int | None = None) -> Executable | None:
        """The executable for a batch's signature, if there is one."""
        leaves, treedef = jax.tree.flatten(batch)
        try:
            signature = (treedef, num_steps, *[(x.shape, x.dtype) for x in leaves])
        except AttributeError:  # a leaf that is no array, which the check refuses
            signature = None
        if signature == self._last_signature and signature is not None:
            return self._last
        executable = self._executables.get(signature)
        if executable is None:
            self.check(batch)
            # NumPy's float64 and float32 are one to JAX, unless 64 bits are enabled.
            executable = self._by_text.get(_text_signature(batch, num_steps))
            if executable is None:
                return None
            self._executables[signature] = executable
        self._last_signature, self._last = signature, executable
        return executable

    def _make(
        self, batch: Batch, arguments: tuple[Any, ...], num_steps: int | None
    ) -> Executable:
        table = {**self._fixed_table, **self._describe(batch)}
        if num_steps is not None:
            table["steps_per_call"] = str(num_steps)
        changes = self._log.explain(self.name, table)
        start = time.perf_counter()
        traced = self._jitted.trace(*arguments)
        executable = Executable(traced.lower().compile(), traced)
        seconds = time.perf_counter() - start
        self._by_text[_text_signature(batch, num_steps)] = executable
        self._only = executable if len(self._by_text) == 1 else None
        self._log.add(CompileRecord(self.name, seconds, changes), table)
        return executable


def _text_signature(batch: Batch, num_steps: int | None) -> Hashable:
    leaves, treedef = jax.tree.flatten(batch)
    return (treedef, num_steps, *[leaf_text(leaf) for leaf in leaves])
