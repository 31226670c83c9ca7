"""JSON without surprises: no duplicate keys, no NaN or infinity, no numbers that others would read differently, no endless nesting."""

from __future__ import annotations

import json
import math
from typing import Any

from gangline.core.model.problems import BadJob, Problem, show_text

#: 18 digits fit every 64-bit integer
MAX_DIGITS = 18


class _Refused(Exception):
    """Ends the parse from inside of a hook."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message


def load_json(data: bytes | str, limit: int) -> Any:
    """Return what the text says. Raises BadJob with one problem: after a fault of this kind the rest cannot be trusted."""
    if len(data) > limit:
        raise BadJob([Problem("", f"{len(data):,} bytes are more than the limit of {limit:,}.", "GL-1002")])
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
        return _DECODER.decode(text)
    except _Refused as refused:
        raise BadJob([Problem("", refused.message, refused.code)]) from None
    except UnicodeDecodeError as error:
        raise BadJob([Problem("", f"Not UTF-8: byte {error.start} cannot be decoded.", "GL-1001")]) from None
    except json.JSONDecodeError as error:
        message = "The body is empty; needed is a JSON object." if not data.strip() else f"Not JSON: {error.msg}."
        raise BadJob([Problem("", message, "GL-1001", line=error.lineno, column=error.colno)]) from None
    except RecursionError:
        raise BadJob([Problem("", "Nested deeper than anything here can be.", "GL-1004")]) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused("GL-1005", f'The key "{show_text(key)}" is given twice in one object; which one counts?')
            seen.add(key)
    return found


def _int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise _Refused("GL-1104", f"A number of {len(digits):,} digits is beyond every limit.")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits) if len(digits) <= 400 else math.inf
    if math.isinf(value):
        raise _Refused("GL-1104", f"The number {show_text(digits)} is beyond every limit.")
    return value


def _constant(name: str) -> Any:
    raise _Refused("GL-1001", f"{name} is not JSON and not a number.")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_int=_int, parse_float=_float, parse_constant=_constant)
