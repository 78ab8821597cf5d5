"""Sentences for users are short, and the list of them is complete."""

from docs.sentences import MOST_WORDS, Template, templates


def test_no_sentence_for_users_is_longer_than_twenty_words():
    long = [f"{one.place}: {one.text}" for one in templates() if one.longest > MOST_WORDS]
    assert not long, "\n".join(long)


def test_the_list_knows_kinds_and_what_is_filled_in():
    found = list(templates())
    assert {one.kind for one in found} >= {"ValueError", "TypeError", "Note"}
    assert any("{}" in one.text for one in found)


def test_the_longest_sentence_of_a_template_is_counted_with_code_as_one_word():
    assert Template("", "", "One two three. Call `opt.step(x, y)` now.").longest == 3
