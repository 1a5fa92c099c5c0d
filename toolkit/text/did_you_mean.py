"""The word that was probably meant, for messages about one that is unknown."""

from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def nearest(word: str, words: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the one of `words` that `word` is probably meant to be; None if none is near.

    Args:
        word: What was written.
        words: The words that are known.
        cutoff: How alike they must be, from 0 to 1 (`difflib.SequenceMatcher.ratio`).

    >>> nearest("nnode", ["nnodes", "image"]), nearest("x", ["image"])
    ('nnodes', None)
    """
    import difflib  # for mistakes only

    words = list(words)
    longer = (candidate for candidate in words if word and candidate.startswith(word))
    return next(longer, None) or next(
        iter(difflib.get_close_matches(word, words, n=1, cutoff=cutoff)), None
    )


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return the way out for a word that is none of `choices`.

    >>> did_you_mean("nnode", ["nnodes", "image"]), did_you_mean("x", ["image", "args"])
    ("did you mean 'nnodes'?", 'valid are image, args')
    """
    choices = list(choices)
    if meant := nearest(str(word), choices):
        return f"did you mean {meant!r}?"
    return f"valid are {', '.join(choices)}" if choices else "none is valid here"
