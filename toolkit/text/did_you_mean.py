"""Suggestions for messages about an unknown word."""

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the word that was probably meant; None if no word is similar.

    Args:
        word: The word in question.
        words: The words to choose from.
        cutoff: How similar they must be, from 0 to 1 (`difflib.SequenceMatcher.ratio`).

    >>> nearest("nnode", ["nnodes", "image"]), nearest("x", ["image"])
    ('nnodes', None)
    """
    import difflib  # for mistakes only

    words = list(words)
    longer = [candidate for candidate in words if word and candidate.startswith(word)]
    similar = longer or difflib.get_close_matches(word, words, n=1, cutoff=cutoff)
    return similar[0] if similar else None


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return the way out for a word that is not among the choices.

    >>> did_you_mean("nnode", ["nnodes", "image"]), did_you_mean("x", ["image", "args"])
    ("did you mean 'nnodes'?", 'valid are image, args')
    """
    choices = list(choices)
    if meant := nearest(str(word), choices):
        return f"did you mean {meant!r}?"
    return f"valid are {', '.join(choices)}" if choices else "none is valid here"
