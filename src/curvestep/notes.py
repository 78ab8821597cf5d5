"""Facts with their sentences: a program asks for the kind, a person reads the text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """A warning, a reason or a doubt about a result.

    Args:
        kind: A word that stays when the sentence is reworded: ``"few-rows"``. Code and tests ask for this.
        text: The sentence, for a person. Nothing is decided by it.

    Example:
        >>> note = Note("few-rows", "Only 5 rows: no interval can be given.")
        >>> print(note)
        Only 5 rows: no interval can be given.
        >>> note.kind in {"few-rows", "no-noise"}
        True
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text
