"""Did-you-mean: the nearest of the words that would have been right."""

from __future__ import annotations

from collections.abc import Iterable

#: edits (insert, delete, replace, swap of neighbours) up to which a word counts as a slip of the fingers
MAX_EDITS = 2


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Return the allowed word within MAX_EDITS of `word`, the nearest and then the first; "" when there is none.

    Words of up to three letters must be nearer, so that `on` is not offered for `no`.
    """
    best, best_edits = "", MAX_EDITS + 1
    if len(word) > 64:
        return best
    for candidate in allowed:
        limit = min(MAX_EDITS, len(candidate) // 2)
        if abs(len(candidate) - len(word)) <= limit:
            edits = edit_distance(word.lower(), candidate.lower())
            if edits <= limit and edits < best_edits:
                best, best_edits = candidate, edits
    return best


def edit_distance(left: str, right: str) -> int:
    """Return the optimal string alignment distance: edits that turn one word into the other."""
    before: list[int] = []
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, above, row = row, before, [i]
        for j, b in enumerate(right, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                cost = min(cost, above[j - 2] + 1)
            row.append(cost)
    return row[-1]
