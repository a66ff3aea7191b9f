"""Filters of documents."""


def no_short(text, subset):
    return "few-words" if len(text.split()) < 20 else None


def only_books(text, subset):
    return None if subset.startswith("Books") else "no-book"


def divides(text, subset):
    return str(1 // (len(text) - len(text)))


def answers_false(text, subset):
    return False
