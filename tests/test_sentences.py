"""Sentences for users are short, and the list of them is complete."""

from docs.sentences import MOST_WORDS, templates


def test_no_sentence_for_users_is_longer_than_twenty_words():
    long = [f"{one.place}: {one.text}" for one in templates() if one.longest > MOST_WORDS]
    assert not long, "\n".join(long)
