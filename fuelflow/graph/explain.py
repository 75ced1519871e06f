"""A recorded expression as text."""

from typing import Any

from fuelflow.graph.expression import Ref
from fuelflow.step.spec import leaf_text

MAX_CALLS = 12
_SIGNS = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "matmul": "@",
    "pow": "**",
    "mod": "%",
    "floordiv": "//",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "eq": "==",
    "ne": "!=",
    "and_": "&",
    "or_": "|",
    "xor": "^",
}


def expression_text(ref: Ref) -> str:
    """What was recorded, the call first and its arguments in parentheses.

    At most ``MAX_CALLS`` calls are shown, the others as dots.
    """
    left = MAX_CALLS

    def show(value: Any) -> str:
        nonlocal left
        if not isinstance(value, Ref):
            return leaf_text(value)
        node = value._node
        if node.inputs is None:
            return leaf_text(value._type)
        if left == 0:
            return "…"
        left -= 1
        shown = [show(part) for part in node.inputs]
        name = node.operation.name
        if name in _SIGNS and len(shown) == 2:
            text = f"({shown[0]} {_SIGNS[name]} {shown[1]})"
        else:
            text = f"{name}({', '.join(shown)})"
        return text if node.operation.is_single else f"{text}[{value._index}]"

    return show(ref)
